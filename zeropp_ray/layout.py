"""Where a member stands in the ``P x F x R`` mesh, and which model chunks a stage holds."""

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
    """

    stages: int
    chunks: int
    shards: int
    replicas: int

    def members(self) -> Iterator[Member]:
        """All members in (p, f, r) order: the order of placement bundles and of every sum over members."""
        for p in range(self.stages):
            for f in range(self.shards):
                for r in range(self.replicas):
                    yield Member(p, f, r)

    @property
    def size(self) -> int:
        return self.stages * self.shards * self.replicas

    def model_chunk(self, stage: int, chunk: int) -> int:
        return chunk * self.stages + stage

    def owned(self, stage: int) -> list[int]:
        """Model chunks of ``stage``, in the order of its own chunk index."""
        return [self.model_chunk(stage, v) for v in range(self.chunks)]

    def stages_of(self, model_chunks: Iterable[int]) -> list[int]:
        """The stages that hold these model chunks, ascending."""
        return sorted({chunk % self.stages for chunk in model_chunks})
