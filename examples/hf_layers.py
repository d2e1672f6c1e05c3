"""Decoder layers of `transformers`, unmodified, as a model that zeropp trains.

    pip install transformers
    zeropp train examples/hf_layers.toml

`Model` is what the layered-model protocol asks for: `embed`, `blocks`, `head`. A layer of `transformers` wants more
than `h`, such as rotary positions, so each is held by a thin block that makes them. Nothing here mentions parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.pytorch_utils import Conv1D


class RotaryBlock(nn.Module):
    """A Llama or Qwen2 layer with the rotary positions that it expects."""

    def __init__(self, layer: nn.Module, config: PretrainedConfig) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, h: Tensor) -> Tensor:
        positions = torch.arange(h.shape[1], device=h.device)[None]
        return self.layer(h, position_embeddings=self.rotary(h, positions))


class PlainBlock(nn.Module):
    """A GPT-2 layer, which needs nothing but `h`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h)


class Model(nn.Module):
    """A language model of `kind` "llama", "qwen2" or "gpt2"; `positions` is the longest sequence."""

    def __init__(
        self,
        kind: str = "qwen2",
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        kv_heads: int = 2,
        vocab: int = 256,
        positions: int = 128,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width) if kind == "gpt2" else None
        if kind == "gpt2":
            config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=positions)
            config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0  # dropout is not supported
            config._attn_implementation = "sdpa"
            self.blocks = nn.ModuleList(PlainBlock(GPT2Block(config, i)) for i in range(layers))
            self.norm: nn.Module = nn.LayerNorm(width)
        else:
            make, layer = {"llama": (LlamaConfig, LlamaDecoderLayer), "qwen2": (Qwen2Config, Qwen2DecoderLayer)}[kind]
            config = make(
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                intermediate_size=3 * width,
                max_position_embeddings=positions,
            )
            config._attn_implementation = "sdpa"
            self.blocks = nn.ModuleList(RotaryBlock(layer(config, i), config) for i in range(layers))
            self.norm = LlamaRMSNorm(width)
        self.output = nn.Linear(width, vocab, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        if self.positions is not None:
            h = h + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return h

    def head(self, h: Tensor) -> Tensor:
        return self.output(self.norm(h))

    def init_module(self, module: nn.Module) -> None:
        """Starting values of what `module` holds itself. The norms and rotary tables of transformers have no
        `reset_parameters`, so without this every member would build the whole model."""
        if isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, LlamaRotaryEmbedding):
            frequencies, _ = module.compute_default_rope_parameters(module.config)
            module.inv_freq.copy_(frequencies)
            module.original_inv_freq.copy_(frequencies)
        else:  # norms
            nn.init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
