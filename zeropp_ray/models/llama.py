"""Llama (Touvron et al., 2023) in plain PyTorch: RMSNorm, rotary positions, grouped-query attention,
SwiGLU, untied head.

The model never mentions parallelism. It follows the layered-model protocol of `zeropp_ray.models.layered`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def default_ffn_dim(dim: int) -> int:
    """The feed-forward width that gives SwiGLU as many weights as a 4x MLP: 8/3 of `dim`, rounded up to 32."""
    return math.ceil(8 * dim / 3 / 32) * 32


@lru_cache(maxsize=16)
def rotary_table(length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of the rotary embedding, `[2, length, head_dim]`. A cache, not state of the model: nothing to
    initialise, shard or save."""
    with torch.inference_mode(False):  # a table made during inference could not be used in a later backward
        frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(length, device=device, dtype=torch.float64), frequencies).repeat(1, 2)
        return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate `x[b, heads, s, head_dim]` by its positions; pairs are (i, i + head_dim/2), as in the published weights
    of the Hugging Face format."""
    left, right = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat((-right, left), dim=-1) * table[1]


class Attention(nn.Module):
    """Causal self-attention, `[b, s, dim] -> [b, s, dim]`; groups of query heads share a key and value head."""

    def __init__(self, dim: int, heads: int, kv_heads: int, rope_theta: float) -> None:
        super().__init__()
        self.head_dim, self.grouped, self.rope_theta = dim // heads, kv_heads < heads, rope_theta
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        table = rotary_table(x.shape[1], self.head_dim, self.rope_theta, x.device, x.dtype)
        q, k = rotate(q, table), rotate(k, table)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU, `[b, s, dim] -> [b, s, dim]`."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One transformer layer with pre-normalisation, `[b, s, dim] -> [b, s, dim]`."""

    def __init__(self, dim: int, heads: int, kv_heads: int, ffn_dim: int, rope_theta: float, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, norm_eps)
        self.attention = Attention(dim, heads, kv_heads, rope_theta)
        self.ffn_norm = nn.RMSNorm(dim, norm_eps)
        self.ffn = FeedForward(dim, ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Head(nn.Module):
    """Final norm and projection, `[b, s, dim] -> logits [b, s, vocab_size]`."""

    def __init__(self, dim: int, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class Llama(nn.Module):
    """The whole model, `ids [b, s] int64 -> logits [b, s, vocab_size]`, fp32.

    `kv_heads = 0` means `heads`, `ffn_dim = 0` means `default_ffn_dim(dim)`. `ValueError` if heads do not divide.
    """

    def __init__(
        self,
        *,
        layers: int,
        dim: int,
        heads: int,
        kv_heads: int = 0,
        ffn_dim: int = 0,
        vocab_size: int = 256,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if dim % (2 * heads) or heads % kv_heads:
            raise ValueError(
                f"heads = {heads} must cut dim = {dim} into equal even widths, and kv_heads = {kv_heads} divide heads"
            )
        ffn_dim = ffn_dim or default_ffn_dim(dim)
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, ffn_dim, rope_theta, norm_eps) for _ in range(layers))
        self.head = Head(dim, vocab_size, norm_eps)
        for module in self.modules():
            self.init_module(module)

    def init_module(self, module: nn.Module) -> None:
        """Initialise one module's own parameters, from the global generator: normal with deviation 0.02; projections
        into the residual stream are scaled by 1/sqrt(2 layers), so that its variance does not grow with depth."""
        if isinstance(module, nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            blocks = [block for block in self.blocks if isinstance(block, Block)]
            residual = any(module in (block.attention.o, block.ffn.down) for block in blocks)
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * len(blocks)) if residual else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)
