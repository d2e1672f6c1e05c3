"""A stage as the driver sees it: the actors of its members, started, called, replaced and ended together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.room import Bundle
from actors.worker import Identity, StageWorker
from zeropp_ray.layout import Member


@dataclass
class MemberHandle:
    """One member's actor, its place in the cluster and, once it has said so, its process."""

    me: Member
    actor: Any
    bundle: Bundle | None = None
    identity: Identity | None = None

    def __str__(self) -> str:
        process = "" if self.identity is None else f" (process {self.identity.pid} on {self.identity.host})"
        return f"{self.me}{process}"


def start_worker(bundle: Bundle, cpus: float) -> Any:
    """An actor in ``bundle``. It is not a member yet."""
    place = PlacementGroupSchedulingStrategy(placement_group=bundle.group, placement_group_bundle_index=bundle.number)
    return StageWorker.options(num_cpus=cpus, scheduling_strategy=place).remote()  # type: ignore[attr-defined]


class StageGroup:
    """The members of stage ``index``, all shards and replicas."""

    def __init__(self, index: int, members: Iterable[tuple[Member, Bundle]], cpus: float) -> None:
        """``members``: each with its place."""
        self.index = index
        self.members = [MemberHandle(me, start_worker(bundle, cpus), bundle) for me, bundle in members]

    def kill(self) -> None:
        for member in self.members:
            ray.kill(member.actor, no_restart=True)
