"""Where a member stands in the ``P x F x R`` mesh, which model chunks a stage holds, and which piece of each set of
parameters a member owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Member(NamedTuple):
    """Coordinates of one member: pipeline stage ``p``, shard ``f`` in the stage, replica ``r`` of the whole mesh."""

    p: int
    f: int
    r: int

    def __str__(self) -> str:
        return f"stage {self.p} shard {self.f} replica {self.r}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The mesh: ``stages`` P, ``chunks`` V per stage, ``shards`` F per stage, ``replicas`` R.

    Placement is *looped*: chunk ``v`` of stage ``p`` is model chunk ``v * P + p``.

    A member *owns* one of the :attr:`pieces` that a stage's optimizer state is cut in: its master weights and moments.
    That is all of its shard, and the same at every replica; with ``zero1`` the replicas share it out (ZeRO-1), as in a
    layout of ``F * R`` shards.
    """

    stages: int
    chunks: int
    shards: int
    replicas: int
    zero1: bool = False

    def members(self) -> Iterator[Member]:
        """All members in (p, f, r) order: the order of placement bundles and of every sum over members."""
        for p in range(self.stages):
            for f in range(self.shards):
                for r in range(self.replicas):
                    yield Member(p, f, r)

    @property
    def size(self) -> int:
        return self.stages * self.shards * self.replicas

    @property
    def splits(self) -> int:
        """In how many pieces the optimizer state of a shard is split over the replicas."""
        return self.replicas if self.zero1 else 1

    @property
    def pieces(self) -> int:
        """In how many pieces the optimizer state of a stage is cut: one of each shard, or with ZeRO-1 ``R`` of them."""
        return self.shards * self.splits

    def piece(self, me: Member) -> int:
        """The piece that a member owns, in the order of the stage's parameters."""
        return me.f * self.splits + me.r % self.splits

    def answers(self, me: Member) -> bool:
        """Whether a member counts its piece in the norm and saves it; of replicas that own the same, the first does."""
        return me.r < self.splits

    def model_chunk(self, stage: int, chunk: int) -> int:
        return chunk * self.stages + stage

    def owned(self, stage: int) -> list[int]:
        """Model chunks of ``stage``, in the order of its own chunk index."""
        return [self.model_chunk(stage, v) for v in range(self.chunks)]

    def stages_of(self, model_chunks: Iterable[int]) -> list[int]:
        """The stages that hold these model chunks, ascending."""
        return sorted({chunk % self.stages for chunk in model_chunks})
