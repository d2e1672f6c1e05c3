"""Where a member stands in the ``P x F x R`` mesh, which model chunks a stage holds, and which piece of each set of
parameters a member owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zeropp_ray import placement


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

    ``placement``: which model chunk is chunk ``v`` of stage ``p``, "looped" or "v" (placement.py).

    A member *owns* one of the :attr:`pieces` that a stage's optimizer state is cut in: its master weights and moments.
    That is all of its shard, and the same at every replica; with ``zero1`` the replicas share it out (ZeRO-1), as in a
    layout of ``F * R`` shards.
    """

    stages: int
    chunks: int
    shards: int
    replicas: int
    zero1: bool = False
    placement: str = "looped"

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

    @property
    def mirrored(self) -> bool:
        """Whether replicas own the same: each is then a copy of the state of the others."""
        return self.replicas > 1 and not self.zero1

    def ring(self, me: Member) -> list[Member]:
        """Those among whom copies of the state go round: replicas that own the same; else the stages of one shard and
        replica; in a stage that is alone its shards, or its replicas.
        """
        if self.mirrored or self.stages == self.shards == 1:
            return [Member(me.p, me.f, r) for r in range(self.replicas)]
        if self.stages > 1:
            return [Member(p, me.f, me.r) for p in range(self.stages)]
        return [Member(me.p, f, me.r) for f in range(self.shards)]

    def buddy(self, me: Member) -> Member | None:
        """Who holds a copy of the state of ``me``: the next one of its ring. None if it is alone."""
        ring = self.ring(me)
        return ring[(ring.index(me) + 1) % len(ring)] if len(ring) > 1 else None

    def guarded(self, me: Member) -> Member | None:
        """Whose copies are sent to ``me``, its buddy. None if it is alone, or if its replicas own the same anyway."""
        ring = self.ring(me)
        return None if self.mirrored or len(ring) == 1 else ring[ring.index(me) - 1]

    def model_chunk(self, stage: int, chunk: int) -> int:
        return placement.model_chunk(self.placement, self.stages, stage, chunk)

    def owned(self, stage: int) -> list[int]:
        """Model chunks of ``stage``, in the order of its own chunk index."""
        return [self.model_chunk(stage, v) for v in range(self.chunks)]

    def stage_of(self, model_chunk: int) -> int:
        """The stage that holds a model chunk."""
        return placement.stage_and_chunk(self.placement, self.stages, model_chunk)[0]

    def stages_of(self, model_chunks: Iterable[int]) -> list[int]:
        """The stages that hold these model chunks, ascending."""
        return sorted({self.stage_of(chunk) for chunk in model_chunks})
