"""A stage as the driver sees it: the actors of its members, started, called, replaced and ended together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.worker import Identity, StageWorker
from zeropp_ray.layout import Member


@dataclass
class MemberHandle:
    """One member's actor, its bundle in the placement group and, once it has said so, its process."""

    me: Member
    actor: Any
    bundle: int = 0
    identity: Identity | None = None

    def __str__(self) -> str:
        process = "" if self.identity is None else f" (process {self.identity.pid} on {self.identity.host})"
        return f"{self.me}{process}"


def start_worker(group: PlacementGroup, bundle: int, cpus: float) -> Any:
    """An actor in ``bundle`` of ``group``. It is not a member yet."""
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return StageWorker.options(num_cpus=cpus, scheduling_strategy=place).remote()  # type: ignore[attr-defined]


class StageGroup:
    """The members of stage ``index``, all shards and replicas."""

    def __init__(self, index: int, members: Iterable[tuple[Member, int]], group: PlacementGroup, cpus: float) -> None:
        """``members``: each with its bundle in ``group``."""
        self.index = index
        self.members = [MemberHandle(me, start_worker(group, bundle, cpus), bundle) for me, bundle in members]

    def kill(self) -> None:
        for member in self.members:
            ray.kill(member.actor, no_restart=True)
