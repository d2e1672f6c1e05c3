"""A model of your own: recurrent blocks instead of attention. See examples/own_model.toml."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """h -> h, both [b, s, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.mix(self.norm(h))[0]
        return h + self.down(nn.functional.gelu(self.up(h)))


class Model(nn.Module):
    """Three parts: embed, blocks (the model is cut between them), head."""

    def __init__(self, width: int = 64, depth: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)  # ids -> h
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary)

    def head(self, h: Tensor) -> Tensor:
        """h -> logits; a method serves as well as a module."""
        return self.out(self.norm(h))
