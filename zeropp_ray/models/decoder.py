"""What the built-in families have in common: causal attention, its cache for generation, and the frame of a decoder.

Plain PyTorch that never mentions parallelism, after the layered-model protocol of `zeropp_ray.models.layered`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeyValues:
    """The keys and values of the tokens that one attention has seen, so that the next token costs only itself."""

    def __init__(self) -> None:
        self.length = 0  # tokens
        self._room = torch.empty(0)  # [2, b, kv_heads, capacity, head_dim]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[b, kv_heads, s, head_dim]` each; all that is kept, `[b, kv_heads, length, head_dim]` each."""
        begin, self.length = self.length, self.length + k.shape[2]
        if not begin or self.length > self._room.shape[3]:
            room = k.new_empty(2, *k.shape[:2], max(64, 2 * self.length), k.shape[3])
            if begin:
                room[..., :begin, :] = self._room[..., :begin, :]
            self._room = room
        self._room[0, :, :, begin : self.length], self._room[1, :, :, begin : self.length] = k, v
        k, v = self._room[..., : self.length, :]
        return k, v


def causal_attention(q: Tensor, k: Tensor, v: Tensor, cache: KeyValues | None = None) -> Tensor:
    """Each token looks at itself and those before it: q `[b, heads, s, head_dim]`, k and v with as many heads or a
    divisor of them, to `[b, heads, s, head_dim]`. With a cache the tokens follow those that it holds, and join them."""
    mask = None
    if cache is not None:
        k, v = cache.append(k, v)
        if q.shape[2] > 1:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    grouped = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=cache is None, enable_gqa=grouped)


class Decoder(nn.Module):
    """Embedding, blocks and head, `ids [b, s] int64 -> logits [b, s, vocab]`, with starting weights.

    A block is called with `h` and, in generation, a cache of its own; `block.residual` are its projections into the
    residual stream. `head.output` is a Linear.
    """

    def __init__(
        self, embed: nn.Module, blocks: Iterable[nn.Module], head: nn.Module, tied: nn.Embedding | None
    ) -> None:
        """`tied`: the embedding of tokens, when the head uses its weights too."""
        super().__init__()
        self.embed, self.blocks, self.head = embed, nn.ModuleList(blocks), head
        if tied is not None:
            self.head.output.weight = tied.weight  # type: ignore[union-attr]
        for module in self.modules():
            self.init_module(module)

    def init_module(self, module: nn.Module) -> None:
        """Initialise one module's own parameters, from the global generator: normal with deviation 0.02, biases 0.
        Projections into the residual stream are scaled by 1/sqrt(2 layers), so that its variance does not grow with
        depth (Radford et al., GPT-2, 2019)."""
        if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            module.reset_parameters()
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            residual = any(module is m for block in self.blocks for m in block.residual)  # type: ignore[union-attr]
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * len(self.blocks)) if residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def new_cache(self) -> list[KeyValues]:
        """What `forward` takes to generate: an empty cache for each block."""
        return [KeyValues() for _ in self.blocks]

    def embed_at(self, ids: Tensor, start: int) -> Tensor:
        """The embedding of tokens of which the first has position `start`."""
        return self.embed(ids)

    def forward(self, ids: Tensor, cache: Sequence[KeyValues] | None = None) -> Tensor:
        """With a cache, `ids` follow the tokens that it holds, and join them."""
        if cache is None:
            h = self.embed(ids)
            for block in self.blocks:
                h = block(h)
        else:
            h = self.embed_at(ids, cache[0].length)
            for block, kept in zip(self.blocks, cache, strict=True):
                h = block(h, kept)
        return self.head(h)
