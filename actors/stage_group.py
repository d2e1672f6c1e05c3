"""A stage as the driver sees it: the actors of its members, started, called and ended together."""

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
    """One member's actor and, once it has said so, its process."""

    me: Member
    actor: Any
    identity: Identity | None = None

    def __str__(self) -> str:
        process = "" if self.identity is None else f" (process {self.identity.pid} on {self.identity.host})"
        return f"{self.me}{process}"


class StageGroup:
    """The members of stage ``index``, all shards and replicas."""

    def __init__(self, index: int, members: Iterable[tuple[Member, int]], group: PlacementGroup, cpus: float) -> None:
        """``members``: each with its bundle in ``group``."""
        self.index = index
        self.members = [
            MemberHandle(
                me,
                StageWorker.options(  # type: ignore[attr-defined]
                    num_cpus=cpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=bundle
                    ),
                ).remote(me),
            )
            for me, bundle in members
        ]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Start ``method`` at every member; the references in member order."""
        return [getattr(member.actor, method).remote(*arguments) for member in self.members]

    def kill(self) -> None:
        for member in self.members:
            ray.kill(member.actor, no_restart=True)
