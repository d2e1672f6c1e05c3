"""Llama (Touvron et al., 2023) in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeropp_ray.models.decoder import Decoder, KeyValues, causal_attention

LOW_TURNS, HIGH_TURNS, STRETCHED_FROM = 1, 4, 8192
"""Llama 3.1 stretches the rotary angles that turn less often than LOW within STRETCHED_FROM tokens, leaves those that
turn more often than HIGH as they are, and blends between the two."""


def default_ffn_dim(dim: int) -> int:
    """The feed-forward width that gives SwiGLU as many weights as a 4x MLP: 8/3 of `dim`, rounded up to 32."""
    return math.ceil(8 * dim / 3 / 32) * 32


def rotary_frequencies(head_dim: int, theta: float, factor: float, device: torch.device) -> Tensor:
    """Angle per token of each pair of a head, fp64 `[head_dim / 2]`. `factor` > 1 stretches the slow ones as Llama 3.1
    does (Grattafiori et al., 2024)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    turns = STRETCHED_FROM * frequencies / (2 * math.pi)
    kept = ((turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


@lru_cache(maxsize=16)
def rotary_table(
    length: int, head_dim: int, theta: float, factor: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Cosines and sines of the rotary embedding, `[2, length, head_dim]`. A cache, not state of the model: nothing to
    initialise, shard or save."""
    with torch.inference_mode(False):  # a table made during inference could not be used in a later backward
        positions = torch.arange(length, device=device, dtype=torch.float64)
        angles = torch.outer(positions, rotary_frequencies(head_dim, theta, factor, device)).repeat(1, 2)
        return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate `x[b, heads, s, head_dim]` by its positions; pairs are (i, i + head_dim/2), as in the published weights
    of the Hugging Face format."""
    left, right = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat((-right, left), dim=-1) * table[1]


class Attention(nn.Module):
    """Causal self-attention, `[b, s, dim] -> [b, s, dim]`; groups of query heads share a key and value head."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, rope_theta: float, rope_factor: float
    ) -> None:
        super().__init__()
        self.head_dim, self.rope_theta, self.rope_factor = head_dim, rope_theta, rope_factor
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, cache: KeyValues | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        table = self._table(x, cache.length if cache is not None else 0)
        y = causal_attention(rotate(q, table), rotate(k, table), v, cache)
        return self.o(y.transpose(1, 2).flatten(2))

    def _table(self, x: Tensor, start: int) -> Tensor:
        end = start + x.shape[1]
        length = end if not start else -(-end // 256) * 256  # token by token: one table for many lengths
        table = rotary_table(length, self.head_dim, self.rope_theta, self.rope_factor, x.device, x.dtype)
        return table[:, start:end]


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

    def __init__(self, dim: int, attention: Attention, ffn_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, norm_eps)
        self.ffn = FeedForward(dim, ffn_dim)

    @property
    def residual(self) -> tuple[nn.Module, ...]:
        return self.attention.o, self.ffn.down

    def forward(self, x: Tensor, cache: KeyValues | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache)
        return x + self.ffn(self.ffn_norm(x))


class Head(nn.Module):
    """Final norm and projection, `[b, s, dim] -> logits [b, s, vocab_size]`."""

    def __init__(self, dim: int, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class Llama(Decoder):
    """The whole model, `ids [b, s] int64 -> logits [b, s, vocab_size]`, fp32.

    `kv_heads = 0` means `heads`, `head_dim = 0` `dim / heads`, `ffn_dim = 0` `default_ffn_dim(dim)`. `ValueError` if
    heads do not divide.
    """

    def __init__(
        self,
        *,
        layers: int,
        dim: int,
        heads: int,
        kv_heads: int = 0,
        head_dim: int = 0,
        ffn_dim: int = 0,
        vocab_size: int = 256,
        tie_embeddings: bool = False,
        rope_theta: float = 10000.0,
        rope_factor: float = 1.0,
        norm_eps: float = 1e-5,
    ) -> None:
        kv_heads = kv_heads or heads
        if (not head_dim and dim % (2 * heads)) or head_dim % 2 or heads % kv_heads:
            raise ValueError(
                f"heads = {heads} must cut dim = {dim} into equal even widths, and kv_heads = {kv_heads} divide heads"
            )
        ffn_dim, head_dim = ffn_dim or default_ffn_dim(dim), head_dim or dim // heads
        embed = nn.Embedding(vocab_size, dim)
        blocks = [
            Block(dim, Attention(dim, heads, kv_heads, head_dim, rope_theta, rope_factor), ffn_dim, norm_eps)
            for _ in range(layers)
        ]
        super().__init__(embed, blocks, Head(dim, vocab_size, norm_eps), embed if tie_embeddings else None)
