"""What a parameter is called here and in Hugging Face's layout."""

from __future__ import annotations

import re
from typing import NamedTuple


class Theirs(NamedTuple):
    """A parameter in their layout; `transposed`: its matrix lies the other way round."""

    name: str
    transposed: bool


_LLAMA = {
    "embed.weight": "model.embed_tokens.weight",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_GPT2 = {
    "embed.tokens.weight": "transformer.wte.weight",
    "embed.positions.weight": "transformer.wpe.weight",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.output.weight": "lm_head.weight",
}
_NAMES = {"llama": (_LLAMA, "model.layers"), "gpt2": (_GPT2, "transformer.h")}

PREFIX = {"llama": "model.", "gpt2": "transformer."}
"""Files that were saved without a head leave this out of their names."""

NOT_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
"""Constants that older files carry along."""

HEAD = "lm_head.weight"


def theirs(family: str, name: str) -> Theirs:
    """Where our parameter `name` is. GPT-2's `Conv1D` keeps the matrix of a Linear as [in, out]."""
    table, layers = _NAMES[family]
    inside = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    if inside is None:
        return Theirs(table[name], False)
    layer, module, kind = inside.groups()
    conv1d = family == "gpt2" and kind == "weight" and "." in module  # the norms have no dot
    return Theirs(f"{layers}.{layer}.{table[module]}.{kind}", conv1d)
