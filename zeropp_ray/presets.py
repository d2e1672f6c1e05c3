"""Published models by name, with their true sizes. Data alone: a configuration is read without torch.

A preset gives the fields of `[model]` that it names; what a configuration says itself goes before it. Sizes are those
of the `config.json` that each model was published with, and `PARAMETERS` its published number of parameters, which a
test holds against the built model. GPT-3 was published as a table alone (Brown et al., arXiv 2005.14165, table 2.1; its
width for 13B, 5140, is no multiple of its heads, and taken as 5120); its parameters are counted.
"""

from __future__ import annotations

from typing import Any

_GPT2 = {"family": "gpt2", "vocab_size": 50257, "context": 1024, "tie_embeddings": True}
_GPT3 = {**_GPT2, "context": 2048}  # as a dense GPT-2; the published one has sparse attention in every other layer
_LLAMA2 = {"family": "llama", "vocab_size": 32000, "context": 4096}
_LLAMA3 = {"family": "llama", "vocab_size": 128256, "context": 8192, "kv_heads": 8, "rope_theta": 500000.0}
_LLAMA31 = {**_LLAMA3, "context": 131072, "rope_factor": 8.0}
_LLAMA32 = {**_LLAMA3, "context": 131072, "rope_factor": 32.0, "tie_embeddings": True}
_SMOLLM2 = {"family": "llama", "vocab_size": 49152, "context": 8192, "rope_theta": 1e5, "tie_embeddings": True}


def _size(layers: int, dim: int, heads: int, kv_heads: int = 0, ffn_dim: int = 0) -> dict[str, Any]:
    sizes = {"layers": layers, "dim": dim, "heads": heads, "kv_heads": kv_heads, "ffn_dim": ffn_dim}
    return {name: value for name, value in sizes.items() if value}


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, **_size(12, 768, 12)},
    "gpt2-medium": {**_GPT2, **_size(24, 1024, 16)},
    "gpt2-large": {**_GPT2, **_size(36, 1280, 20)},
    "gpt2-xl": {**_GPT2, **_size(48, 1600, 25)},
    "gpt3-6.7b": {**_GPT3, **_size(32, 4096, 32)},
    "gpt3-13b": {**_GPT3, **_size(40, 5120, 40)},
    "gpt3-175b": {**_GPT3, **_size(96, 12288, 96)},
    "llama2-7b": {**_LLAMA2, **_size(32, 4096, 32, ffn_dim=11008)},
    "llama2-13b": {**_LLAMA2, **_size(40, 5120, 40, ffn_dim=13824)},
    "llama2-70b": {**_LLAMA2, **_size(80, 8192, 64, 8, 28672)},
    "llama3-8b": {**_LLAMA3, **_size(32, 4096, 32, ffn_dim=14336)},
    "llama3-70b": {**_LLAMA3, **_size(80, 8192, 64, ffn_dim=28672)},
    "llama3.1-8b": {**_LLAMA31, **_size(32, 4096, 32, ffn_dim=14336)},
    "llama3.1-70b": {**_LLAMA31, **_size(80, 8192, 64, ffn_dim=28672)},
    "llama3.1-405b": {**_LLAMA31, **_size(126, 16384, 128, ffn_dim=53248)},
    "llama3.2-1b": {**_LLAMA32, **_size(16, 2048, 32, ffn_dim=8192)},
    "llama3.2-3b": {**_LLAMA32, **_size(28, 3072, 24, ffn_dim=8192)},
    "tinyllama-1.1b": {**_LLAMA2, "context": 2048, **_size(22, 2048, 32, 4, 5632)},
    "smollm2-135m": {**_SMOLLM2, **_size(30, 576, 9, 3, 1536)},
    "smollm2-360m": {**_SMOLLM2, **_size(32, 960, 15, 5, 2560)},
    "smollm2-1.7b": {**_SMOLLM2, "rope_theta": 130000.0, **_size(24, 2048, 32, 32, 8192)},
}

PARAMETERS: dict[str, int] = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}

FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": {"tie_embeddings": True}}
"""The built-in families, and where their defaults differ from those of the fields."""
