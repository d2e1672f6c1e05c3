"""GPT-2 (Radford et al., 2019) in plain PyTorch: LayerNorm, learned positions, GELU, biases, tied embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeropp_ray.models.decoder import Decoder, KeyValues, causal_attention


class Embedding(nn.Module):
    """Token and learned position, `ids [b, s] int64 -> [b, s, dim]`; positions count from `start`."""

    def __init__(self, vocab_size: int, context: int, dim: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(context, dim)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1], device=ids.device))


class Attention(nn.Module):
    """Causal self-attention, `[b, s, dim] -> [b, s, dim]`; one Linear gives queries, keys and values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x: Tensor, cache: KeyValues | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.o(causal_attention(q, k, v, cache).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """`[b, s, dim] -> [b, s, dim]`, with the tanh form of GELU."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer layer with pre-normalisation, `[b, s, dim] -> [b, s, dim]`."""

    def __init__(self, dim: int, heads: int, ffn_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, norm_eps)
        self.attention = Attention(dim, heads)
        self.ffn_norm = nn.LayerNorm(dim, norm_eps)
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
        self.norm = nn.LayerNorm(dim, norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class GPT2(Decoder):
    """The whole model, `ids [b, s] int64 -> logits [b, s, vocab_size]`, fp32, for at most `context` tokens.

    `ffn_dim = 0` means `4 * dim`. `ValueError` if heads do not divide.
    """

    def __init__(
        self,
        *,
        layers: int,
        dim: int,
        heads: int,
        ffn_dim: int = 0,
        vocab_size: int = 256,
        context: int = 1024,
        tie_embeddings: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        if dim % heads:
            raise ValueError(f"heads = {heads} must cut dim = {dim} into equal widths")
        embed = Embedding(vocab_size, context, dim)
        blocks = [Block(dim, heads, ffn_dim or 4 * dim, norm_eps) for _ in range(layers)]
        super().__init__(embed, blocks, Head(dim, vocab_size, norm_eps), embed.tokens if tie_embeddings else None)

    def embed_at(self, ids: Tensor, start: int) -> Tensor:
        return self.embed(ids, start)
