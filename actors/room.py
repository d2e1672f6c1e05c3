"""Room for the members of a run in the cluster: found, waited for, held in placement groups, and given back.

Ray can pack a group or spread it, but not pack its stages and spread them. So ``assign`` chooses a node for each
member, and each node that a run is on gets a placement group of its own, pinned to it, with a bundle for each member
there. A group that is lost with its node is given up by itself, and the others stay.

Until there is room, one group with all bundles that are missing, pinned nowhere, says so to the cluster: it is what an
autoscaler acts upon.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from actors.assignment import Node, assign
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError, Stopped, ZeroppError
from zeropp_ray.layout import Layout, Member

Event = dict[str, Any]

WAIT_S = 600.0  # how long room is waited for: a machine with GPUs may take minutes to start
HOLD_S = 5.0  # how long the groups are waited for where there is room: another run may be faster
KNOWN_S = 30.0  # how long Ray may take to know that a node is gone
SETTLE_S = 2.0  # how long Ray may take to know of what was given back a moment ago
TICK_S = 0.2
TELL_S = 60.0  # between lines about waiting, if nothing changes
NODE_ID = "ray.io/node-id"  # a label that Ray gives to every node
NODE_GROUP = "ray.io/node-group"  # one that nodes of `ray up` and of KubeRay have
EPSILON = 1e-6  # Ray counts in parts of 1/10000


class Bundle(NamedTuple):
    """A place for one member: a bundle of a placement group on one node."""

    group: PlacementGroup
    number: int
    node: str


class Room:
    """The bundles of a run."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        self._config, self._layout = config, layout
        self._needs = needs(config)
        self._groups: dict[str, list[PlacementGroup]] = {}  # by node
        self._number = 0  # of the next group
        self.stopped = lambda: False  # whether to give up waiting

    def take(
        self, placed: Mapping[Member, str] | None = None, spares: int = 0, avoid: Collection[str] = ()
    ) -> Generator[Event, None, tuple[dict[Member, Bundle], list[Bundle]]]:
        """Find and hold bundles for all members that are not ``placed``, and for ``spares``; by member, and of spares.

        ``avoid``: nodes that are likely to be gone, which Ray says only later. Yields events about what is waited for.
        Raises ZeroppError if there is no room for ``resources.wait_s``, Stopped if the run is asked to stop meanwhile.
        """
        missing = self._layout.size - len(placed or {}) + spares
        began, demand, told, told_at = time.monotonic(), None, "", 0.0
        limit_s = self._config.resources.wait_s or WAIT_S
        try:
            while True:
                nodes = self._nodes(demand, avoid if time.monotonic() - began < KNOWN_S else ())
                found = assign(self._layout, nodes, placed, spares)
                if found is not None:
                    if demand is not None:
                        remove_placement_group(demand)
                        demand = None
                    if (held := self._hold(found, placed or {})) is not None:
                        return held
                now = time.monotonic()
                lacking = self._lacking(missing, nodes)
                if now - began > limit_s:
                    raise ZeroppError(f"no room within {limit_s:g} s (resources.wait_s): {lacking}")
                if self.stopped():
                    raise Stopped(f"it waited for room: {lacking}")
                if now - began > SETTLE_S:
                    if demand is None:
                        demand = self._group([self._needs] * missing, [self._config.resources.labels] * missing)
                    if lacking != told or now - told_at > TELL_S:
                        told, told_at = lacking, now
                        left = began + limit_s - now
                        yield {"kind": "log", "text": f"waiting for room, for {left:.0f} s at most: {lacking}"}
                time.sleep(TICK_S)
        finally:
            if demand is not None:
                remove_placement_group(demand)

    def take_now(self, placed: Mapping[Member, str], avoid: Collection[str] = ()) -> Bundle | None:
        """A bundle for a spare, if there is room for one at the moment."""
        found = assign(self._layout, self._nodes(None, avoid), placed, 1)
        held = None if found is None else self._hold(found, placed)
        return None if held is None else held[1][0]

    def give_up(self, node: str) -> None:
        """Remove what is held on a node that is lost."""
        for group in self._groups.pop(node, []):
            remove_placement_group(group)

    def end(self) -> None:
        """Give all back."""
        for node in list(self._groups):
            self.give_up(node)

    def _nodes(self, demand: PlacementGroup | None, avoid: Collection[str]) -> list[Node]:
        """The nodes of the cluster by what is free; what ``demand`` holds, once it is there, is free for members."""
        held: Counter[str] = Counter()
        if demand is not None and demand.wait(0):
            held.update(placement_group_table(demand)["bundles_to_node_id"].values())
        free = ray._private.state.available_resources_per_node()
        nodes = []
        for node in usable_nodes(self._config):
            if node["NodeID"] in avoid:
                continue
            slots = _slots(free.get(node["NodeID"], {}), self._needs) + held[node["NodeID"]]
            most = _slots(node["Resources"], self._needs)
            nodes.append(Node(node["NodeID"], node["NodeManagerAddress"], min(slots, most)))
        return nodes

    def _hold(
        self, found: tuple[dict[Member, str], list[str]], placed: Mapping[Member, str]
    ) -> tuple[dict[Member, Bundle], list[Bundle]] | None:
        """Placement groups for what was ``found``; None if others took the room meanwhile."""
        where, spares = found
        takers: dict[str, list[Member | None]] = {}  # by node; None: a spare
        for me, node in where.items():
            if me not in placed:
                takers.setdefault(node, []).append(me)
        for node in spares:
            takers.setdefault(node, []).append(None)
        groups = {
            node: self._group([self._needs] * len(who), [{NODE_ID: node}] * len(who)) for node, who in takers.items()
        }
        deadline = time.monotonic() + HOLD_S
        if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups.values()):
            for group in groups.values():
                remove_placement_group(group)
            return None
        members: dict[Member, Bundle] = {}
        waiting: list[Bundle] = []
        for node, group in groups.items():
            self._groups.setdefault(node, []).append(group)
            for number, taker in enumerate(takers[node]):
                bundle = Bundle(group, number, node)
                if taker is None:
                    waiting.append(bundle)
                else:
                    members[taker] = bundle
        return members, waiting

    def _group(self, bundles: list[dict[str, float]], selectors: list[dict[str, str]]) -> PlacementGroup:
        name = f"{_group_prefix(self._config)}{self._number}"
        self._number += 1
        return placement_group(bundles, strategy="PACK", name=name, bundle_label_selector=selectors)

    def _lacking(self, missing: int, nodes: Sequence[Node]) -> str:
        """What is needed and what there is, in words."""
        free = sum(node.slots for node in nodes)
        each = ", ".join(f"{node.host} for {node.slots}" for node in nodes if node.slots) or "no node for any"
        return f"{missing} members of {amounts(self._needs)} each; free is room for {free} ({each}){_coming()}"


def needs(config: RunConfig) -> dict[str, float]:
    """The resources of a member's bundle, of a run whose device is known."""
    resources = config.resources
    return {"CPU": resources.cpus} | ({"GPU": resources.gpus} if resources.device == "cuda" else {})


def on_devices(config: RunConfig) -> RunConfig:
    """The run with its device and transport as they are on this cluster."""
    gpus = sum(node["Resources"].get("GPU", 0) for node in usable_nodes(config))
    return replace(config, resources=config.resources.on(config.parallel.members, gpus))


def check_room(config: RunConfig) -> None:
    """ConfigError if the cluster cannot hold the run, whatever else runs there, and is not known to grow.

    A cluster of ``ray up`` or KubeRay is: its nodes are labelled with their group. For one that grows by other means
    ``resources.wait_s`` says so.
    """
    config = on_devices(config)
    size, each, labels = config.parallel.members + config.recovery.spares, needs(config), config.resources.labels
    nodes = usable_nodes(config)
    slots = [_slots(node["Resources"], each) for node in nodes]
    if sum(slots) >= size or config.resources.wait_s or _scales():
        return
    have = {name: sum(node["Resources"].get(name, 0) for node in nodes) for name in each}
    fit = f", on nodes that hold {sum(slots)} members" if all(have[name] >= size * each[name] for name in each) else ""
    most = "gpus" if have.get("GPU", 0) < size * each.get("GPU", 0) else "cpus"
    raise ConfigError(
        f"resources.{most} = {getattr(config.resources, most):g}: {size} members need "
        f"{amounts({name: size * amount for name, amount in each.items()})} and the cluster has {amounts(have)}{fit}"
        + (f" on nodes with the labels {labels}" if labels else "")
        + f"; lower resources.{most}, parallel.stages, parallel.shards or parallel.replicas, or add nodes; to wait for "
        "them set resources.wait_s"
    )


def usable_nodes(config: RunConfig) -> list[dict[str, Any]]:
    """Nodes that members may go to, as Ray tells of them, in an order of their own: alive, not drained, labelled."""
    draining = ray._private.state.state.get_draining_nodes()
    return [
        node
        for node in sorted(ray.nodes(), key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        if node["Alive"]
        and node["NodeID"] not in draining
        and config.resources.labels.items() <= node["Labels"].items()
    ]


def amounts(resources: Mapping[str, float]) -> str:
    """``4 CPUs and 1 GPU``."""
    return " and ".join(f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in resources.items())


def remove_groups(config: RunConfig) -> None:
    """Those of a driver that died: Ray ends them with the job only."""
    for group in placement_group_table().values():
        if group["name"].startswith(_group_prefix(config)) and group["state"] != "REMOVED":
            with suppress(ValueError):  # that of another job, with another namespace
                remove_placement_group(ray.util.get_placement_group(group["name"]))


def _group_prefix(config: RunConfig) -> str:
    return f"zeropp-{config.run.name}-"


def _slots(resources: Mapping[str, float], each: Mapping[str, float]) -> int:
    """For how many members of ``each`` there is room."""
    return min(int(resources.get(name, 0) / amount + EPSILON) for name, amount in each.items())


def _scales() -> bool:
    """Whether something is there that adds nodes."""
    return any(NODE_GROUP in node["Labels"] for node in ray.nodes())


def _coming() -> str:
    """What the autoscaler says of nodes that are to come, in words; nothing if there is none, or an old one."""
    with suppress(Exception):  # whatever it is, the run needs no answer
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=1)
        starting = len(status.pending_nodes) + sum(launch.count for launch in status.pending_launches)
        failed = {launch.details for launch in status.failed_launches}
        return (f"; {starting} nodes start" if starting else "") + "".join(
            f"; failed to start: {why}" for why in failed
        )
    return ""
