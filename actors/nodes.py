"""What the driver asks of the machines that members are on: where they are, whether they live, and to end them.

On its own node it looks for itself; on every other one an agent does, an actor beside the members, so that a member
that cannot answer is read and killed all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.processes import alive, kill, stopped
from actors.progress import Position, read_progress

ANSWER_S = 1.0  # how long an agent may take
GONE_S = 5.0  # how long the end of a killed process is waited for


class Place(NamedTuple):
    """A member's process and its progress file, on one node."""

    pid: int
    started: int
    progress: Path


class Sight(NamedTuple):
    """What can be seen of a member from outside; ``at`` None: nothing was written yet."""

    at: Position | None
    stopped: bool
    alive: bool = True


def look(places: Sequence[Place]) -> list[Sight]:
    """At members of this node."""
    return [
        Sight(read_progress(place.progress), stopped(place.pid), alive(place.pid, place.started)) for place in places
    ]


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class NodeAgent:
    """Sees and ends the members of its node."""

    def look(self, places: list[Place]) -> list[Sight]:
        return look(places)

    def kill(self, processes: list[tuple[int, int]]) -> bool:
        return kill(processes, GONE_S)


class Nodes:
    """The nodes of a run by Ray's id of each."""

    def __init__(self) -> None:
        self._agents: dict[str, Any] = {}

    @cached_property
    def _here(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def look(self, node: str, places: list[Place]) -> list[Sight] | None:
        """At members of ``node``; None if it does not answer."""
        if node == self._here:
            return look(places)
        return self._ask(node, "look", places, ANSWER_S)

    def answers(self, node: str) -> bool:
        return self.look(node, []) is not None

    def kill(self, node: str, processes: list[tuple[int, int]]) -> None:
        """End processes of ``node``. If it does not answer, they are gone with it, or cannot be reached."""
        if node == self._here:
            kill(processes, GONE_S)
            return
        self._ask(node, "kill", processes, ANSWER_S + GONE_S)

    def _ask(self, node: str, method: str, argument: Any, timeout_s: float) -> Any:
        """What the agent of ``node`` answers; None if it does not. One that died is followed by another."""
        try:
            return ray.get(getattr(self._agent(node), method).remote(argument), timeout=timeout_s)
        except TimeoutError:
            return None
        except ray.exceptions.RayError:
            del self._agents[node]
            return None

    def watch(self, nodes: set[str]) -> None:
        """Start what is needed to see members of ``nodes`` later."""
        for node in nodes - {self._here}:
            self._agent(node)

    def _agent(self, node: str) -> Any:
        if node not in self._agents:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._agents[node] = NodeAgent.options(scheduling_strategy=there).remote()  # type: ignore[attr-defined]
        return self._agents[node]

    def end(self) -> None:
        for agent in self._agents.values():
            ray.kill(agent, no_restart=True)
