"""A stage as the driver sees it: the actors of its members, started, called, replaced and ended together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def start_worker(bundle: Bundle, needs: Mapping[str, float]) -> Any:
    """An actor in ``bundle``, all of which it ``needs``. It is not a member yet."""
    place = PlacementGroupSchedulingStrategy(placement_group=bundle.group, placement_group_bundle_index=bundle.number)
    cpus, gpus = needs["CPU"], needs.get("GPU", 0)  # Ray tells it which, by CUDA_VISIBLE_DEVICES
    return StageWorker.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=place).remote()  # type: ignore


class StageGroup:
    """The members of stage ``index``, all shards and replicas."""

    def __init__(self, index: int, members: Iterable[tuple[Member, Bundle]], needs: Mapping[str, float]) -> None:
        """``members``: each with its place."""
        self.index = index
        self.members = [MemberHandle(me, start_worker(bundle, needs), bundle) for me, bundle in members]

    def kill(self) -> None:
        for member in self.members:
            ray.kill(member.actor, no_restart=True)
