"""How large a model is, without building it: what its parts hold, compute, and keep for a backward.

The built-in families in closed form, and any model from its description; a test holds the one against the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from zeropp_ray.config import ModelSection

if TYPE_CHECKING:
    from zeropp_ray.models.describe import ModelDescription, Part


class PartSizes(NamedTuple):
    """Of the embedding, one block, or the head; all but ``elements`` for one sequence."""

    elements: float  # parameters
    flops: float  # of the forward; the whole square of the attention
    linear_flops: float  # those of them whose weight gradient is deferred to `W`
    saved: float  # elements that autograd keeps from `F` to `B`
    stashed: float  # elements that `B` leaves for `W`
    widest: float  # elements that the widest layer puts out


class Measured(NamedTuple):
    """Seconds of (F, B, W) of one micro-batch of ``microbatch_size`` sequences, as they were measured."""

    microbatch_size: int
    embed: tuple[float, float, float]
    block: tuple[float, float, float]
    head: tuple[float, float, float]


@dataclass(frozen=True)
class ModelSizes:
    """A model of equal blocks, for sequences of ``seq_len``; ``width``: bytes of an element that is computed with.

    ``measured``: what its tasks take; None: what follows from the FLOPs.
    """

    label: str
    embed: PartSizes
    block: PartSizes
    head: PartSizes
    layers: int
    seq_len: int
    hidden: int
    vocab: int
    tied: float  # parameters that embedding and head share; counted in both
    width: int
    measured: Measured | None = None

    @property
    def elements(self) -> float:
        """Parameters."""
        return self.embed.elements + self.layers * self.block.elements + self.head.elements - self.tied

    @property
    def flops(self) -> float:
        """Model FLOPs of a training step, per sequence: forward, and twice as many backward."""
        return 3 * (self.embed.flops + self.layers * self.block.flops + self.head.flops)

    def halved(self) -> ModelSizes:
        """The same model for sequences half as long, as to memory: an attention's FLOPs would go down by more."""
        embed, block, head = (
            PartSizes(part.elements, *(size / 2 for size in part[1:])) for part in (self.embed, self.block, self.head)
        )
        return replace(self, embed=embed, block=block, head=head, seq_len=self.seq_len // 2)


def sizes_of(model: ModelSection, dtype: str) -> ModelSizes:
    """Of a built-in family at ``model.seq_len``, in ``float32`` or ``bfloat16``."""
    model = model.resolved()
    s, h, f, vocab = model.seq_len, model.dim, model.ffn_dim, model.vocab_size
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = 2 if dtype == "bfloat16" else 4
    wide = 4 // width  # what a norm keeps in fp32, and ids, in elements
    if model.family == "gpt2":
        matrices, other = 4 * h * h + 2 * h * f, 9 * h + f
        saved, stashed, widest = 8 * h + 2 * f + 4 * wide, 8 * h + 2 * f, max(3 * h, f)
        embed = PartSizes((vocab + model.context) * h, 0, 0, 4 * wide * s, 2 * (h + 1) * s, h * s)
        norm, head_saved = 2 * h, 2 * h + 2 * wide
    else:
        matrices, other = 2 * h * (q + kv) + 3 * h * f, 2 * h
        saved = (2 + 4 * wide) * h + 2 * (q + kv) + 4 * f + 2 * wide
        stashed, widest = 4 * h + 2 * (q + kv) + 3 * f, max(h, q, f)
        embed = PartSizes(vocab * h, 0, 0, 2 * wide * s, (h + 1) * s, h * s)
        norm, head_saved = h, (1 + 2 * wide) * h + wide
    linear, logits = 2 * matrices * s, 2 * vocab * h * s
    block = PartSizes(matrices + other, linear + 4 * s * s * q, linear, saved * s, stashed * s, widest * s)
    head = PartSizes(vocab * h + norm, logits, logits, head_saved * s, (h + vocab) * s, vocab * s)
    tied = vocab * h if model.tie_embeddings else 0
    return ModelSizes(model.label, embed, block, head, model.layers, s, h, vocab, tied, width)


def sizes_from(description: ModelDescription, label: str, width: int) -> ModelSizes:
    """Of any model that was described; blocks that differ count as their mean."""
    parts = [_sizes(part) for part in description.blocks]
    mean = PartSizes(*(sum(values) / len(parts) for values in zip(*parts, strict=True)))
    embed, head = _sizes(description.embed), _sizes(description.head)
    tied = embed.elements + sum(part.elements for part in parts) + head.elements - description.elements
    seq_len, hidden = description.seq_len, description.hidden
    return ModelSizes(label, embed, mean, head, len(parts), seq_len, hidden, description.vocab, tied, width)


def _sizes(part: Part) -> PartSizes:
    return PartSizes(
        part.elements, part.flops, part.linear_flops, part.saved_elements, part.stashed_elements, part.widest
    )


@cache
def even_cut(layers: int, chunks: int, head: float) -> Sequence[int]:
    """Blocks of each of ``chunks`` chunks, as ``zeropp_ray.models.cut`` gives them for equal blocks and a head that
    costs ``head`` of them: the largest chunk as cheap as can be, then the most even cut, larger chunks last.
    """
    if chunks == 1:
        return (layers,)

    def others(last: int) -> list[int]:
        small, more = divmod(layers - last, chunks - 1)
        return [small] * (chunks - 1 - more) + [small + 1] * more

    def score(last: int) -> tuple[float, float, int]:
        costs = [*others(last), last + head]
        return max(costs), sum(cost * cost for cost in costs), -last

    last = min(range(1, min(layers - chunks + 1, -(-layers // chunks)) + 1), key=score)
    return (*others(last), last)
