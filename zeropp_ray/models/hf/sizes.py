"""`config.json` of a Hugging Face folder, to and from the fields of `[model]`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeropp_ray.config import ModelSection
from zeropp_ray.errors import ConfigError
from zeropp_ray.files import expanded
from zeropp_ray.models.llama import HIGH_TURNS, LOW_TURNS, STRETCHED_FROM
from zeropp_ray.presets import PRESETS

_SIZES: dict[str, dict[str, str]] = {  # our field: theirs; all of them must be there
    "llama": {
        "layers": "num_hidden_layers",
        "dim": "hidden_size",
        "heads": "num_attention_heads",
        "ffn_dim": "intermediate_size",
        "vocab_size": "vocab_size",
        "context": "max_position_embeddings",
    },
    "gpt2": {
        "layers": "n_layer",
        "dim": "n_embd",
        "heads": "n_head",
        "vocab_size": "vocab_size",
        "context": "n_positions",
    },
}
_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {  # theirs: what we can do, the default first
    "llama": {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": ("silu", "swish"),
        "partial_rotary_factor": (1, 1.0),
    },
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}
_STRETCH = {  # of Llama 3.1, beside its factor
    "low_freq_factor": LOW_TURNS,
    "high_freq_factor": HIGH_TURNS,
    "original_max_position_embeddings": STRETCHED_FROM,
}


def read_sizes(folder: Path) -> dict[str, Any]:
    """The fields of `[model]` that the model in `folder` has. Dropout that it names is left out.

    `ConfigError` for a folder without a readable `config.json`, another architecture, and what ours cannot do.
    """
    values = _read(folder)
    family = values.get("model_type")
    if family not in _SIZES:
        raise refuse(folder, f"model_type is {family!r}; llama and gpt2 can be read")
    if "quantization_config" in values:
        raise refuse(folder, "its weights are quantized; take the folder of the model in full precision")
    for name, possible in _ONLY[family].items():
        value = values.get(name, possible[0])
        if value not in possible:
            raise refuse(folder, f"{name} is {value!r}; only {possible[0]!r} is supported")
    missing = [name for name in _SIZES[family].values() if not isinstance(values.get(name), int)]
    if missing:
        raise refuse(folder, f"gives no number for {', '.join(missing)}")
    sizes = {ours: values[name] for ours, name in _SIZES[family].items()}
    common = {"family": family, "tie_embeddings": bool(values.get("tie_word_embeddings", family == "gpt2"))}
    if family == "gpt2":
        ffn_dim = values.get("n_inner") or 4 * sizes["dim"]
        return {**common, **sizes, "ffn_dim": ffn_dim, "norm_eps": float(values.get("layer_norm_epsilon", 1e-5))}
    return {
        **common,
        **sizes,
        "kv_heads": values.get("num_key_value_heads") or sizes["heads"],
        "head_dim": values.get("head_dim") or sizes["dim"] // sizes["heads"],
        "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
        **_rope(folder, values),
    }


def _rope(folder: Path, values: Mapping[str, Any]) -> dict[str, float]:
    """Rotary positions, as transformers 5 writes them (`rope_parameters`) and as those before it did."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_factor": 1.0}
    if kind != "llama3" or any(rope.get(name) != value for name, value in _STRETCH.items()):
        shown = ", ".join(f"{name} {value}" for name, value in rope.items())
        raise refuse(folder, f"rope scaling with {shown}; only that of Llama 3.1 from {STRETCHED_FROM} is supported")
    return {"rope_theta": theta, "rope_factor": float(rope["factor"])}


def adopted(values: Mapping[str, Any]) -> dict[str, Any]:
    """The table `[model]` with the sizes of the folder that its `init_from` names, where it gives none itself.

    `ConfigError` with a list if it, or its preset, gives others.
    """
    folder = expanded(str(values["init_from"]), f"model.init_from = {values['init_from']!r}").absolute()
    sizes = read_sizes(folder)
    wanted = {**sizes, **PRESETS.get(str(values.get("preset", "")), {}), **values}
    ours, found = (vars(ModelSection(**{**wanted, **more, "init_from": ""}).resolved()) for more in ({}, sizes))
    differs = [f"{name} {found[name]!r} there, {ours[name]!r} here" for name in sizes if found[name] != ours[name]]
    if differs:
        raise refuse(folder, f"other sizes than the configuration: {'; '.join(differs)}; leave them out to take those")
    return {**sizes, **values, "init_from": str(folder)}


def to_config(model: ModelSection, dtype: str, end: int | None) -> dict[str, Any]:
    """What `config.json` says of our `model`; `end`: the token that ends a text."""
    model = model.resolved()
    sizes = {theirs: getattr(model, ours) for ours, theirs in _SIZES[model.family].items()}
    only = {name: possible[0] for name, possible in _ONLY[model.family].items() if name != "partial_rotary_factor"}
    common = {
        "model_type": model.family,
        **sizes,
        **only,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": 0.02,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": dtype,  # transformers 5; before it:
        "torch_dtype": dtype,
    }
    if model.family == "gpt2":
        dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        specific = {"n_inner": model.ffn_dim, "layer_norm_epsilon": model.norm_eps, **dropout}
        return {"architectures": ["GPT2LMHeadModel"], **common, **specific}
    scaling = {"rope_type": "llama3", "factor": model.rope_factor, **_STRETCH} if model.rope_factor != 1 else None
    return {
        "architectures": ["LlamaForCausalLM"],
        **common,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,  # before transformers 5
        "rope_scaling": scaling,
    }


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise refuse(folder, "holds no config.json; name the folder of a model in Hugging Face layout") from None
    except OSError as error:
        raise refuse(folder, f"config.json cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise refuse(folder, f"config.json is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise refuse(folder, "config.json is no table")
    return values


def refuse(folder: Path, what: str) -> ConfigError:
    """The error of a folder that cannot be started from."""
    return ConfigError(f"model.init_from = {str(folder)!r}: {what}")
