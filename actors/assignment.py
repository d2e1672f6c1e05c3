"""Which node each member of a run goes to: pure, from the room that the nodes have.

The shards of a stage gather its parameters from each other again and again, and are packed on a node, behind its fast
links. Between stages go activations alone: they are spread over nodes, so that the loss of one takes as few stages as
can be, and a member and its buddy, who has the copies of its state (``Layout.ring``), are on different ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeropp_ray.layout import Layout, Member


@dataclass(frozen=True)
class Node:
    """A node by Ray's id, and for how many members it has room."""

    id: str
    host: str
    slots: int


def assign(
    layout: Layout, nodes: Sequence[Node], placed: Mapping[Member, str] | None = None, spares: int = 0
) -> tuple[dict[Member, str], list[str]] | None:
    """The node of every member, by id, and those of so many ``spares``; None if there is no room for all.

    ``placed``: members that have a place already, which ``slots`` do not count. The same input gives the same answer;
    of nodes that are equally good the first is taken.
    """
    room = {node.id: node.slots for node in nodes}
    where = dict(placed or {})
    if not where:
        where |= _whole_stages(layout, room)
    for me in layout.members():
        if me in where:
            continue
        neighbours, mates = _on_nodes(_neighbours(layout, me), where), _on_nodes(_stage(layout, me), where)
        node = min(room, key=lambda n: (room[n] < 1, neighbours[n], -mates[n], -room[n]), default=None)
        if node is None or room[node] < 1:
            return None
        where[me] = node
        room[node] -= 1
    waiting = []
    for _ in range(spares):
        node = max(room, key=lambda n: room[n], default=None)
        if node is None or room[node] < 1:
            return None
        waiting.append(node)
        room[node] -= 1
    return where, waiting


def beside_their_buddies(layout: Layout, where: Mapping[Member, str]) -> list[Member]:
    """Members on the node of their buddy: the loss of that node loses their state with its copy."""
    return [me for me in layout.members() if (buddy := layout.buddy(me)) is not None and where[me] == where[buddy]]


def stages_across_nodes(layout: Layout, where: Mapping[Member, str]) -> list[tuple[int, int]]:
    """The stages (p, r) whose shards are on more than one node, so that gathers cross the network."""
    return [
        (p, r)
        for p in range(layout.stages)
        for r in range(layout.replicas)
        if len({where[Member(p, f, r)] for f in range(layout.shards)}) > 1
    ]


def _whole_stages(layout: Layout, room: dict[str, int]) -> dict[Member, str]:
    """Members of the stages that fit on a node as a whole; takes their ``room``.

    Nodes take turns, so that each gets about as many stages as the others. Those of one node are then chosen from far
    apart: a node that holds no more than half of a ring holds no two that are next to each other in it.
    """
    shards, stages = layout.shards, _far_apart(layout)
    count: Counter[str] = Counter()
    for _ in stages:
        fits = [node for node in room if room[node] >= (count[node] + 1) * shards]
        if not fits:
            break
        count[min(fits, key=lambda n: (count[n], -room[n]))] += 1
    turns = [node for node, number in count.most_common() for _ in range(number)]
    where: dict[Member, str] = {}
    for (p, r), node in zip(stages, turns, strict=False):
        where |= {Member(p, f, r): node for f in range(shards)}
        room[node] -= shards
    return where


def _far_apart(layout: Layout) -> list[tuple[int, int]]:
    """All stages (p, r), in an order in which those that are close are not next to each other in a ring of buddies.

    First every other one of each ring, then those between them. The last of a ring of odd length is a neighbour of the
    first, and goes between the two.
    """
    over_replicas = layout.mirrored or layout.stages == 1
    length, rings = (layout.replicas, layout.stages) if over_replicas else (layout.stages, layout.replicas)
    odd_one = [length - 1] if length % 2 and length > 1 else []
    classes = [range(0, length - len(odd_one), 2), odd_one, range(1, length - len(odd_one), 2)]
    order = [(ring, place) for places in classes for ring in range(rings) for place in places]
    return order if over_replicas else [(place, ring) for ring, place in order]


def _neighbours(layout: Layout, me: Member) -> set[Member]:
    """Who has copies of the state of ``me``, and whose copies it has."""
    ring = layout.ring(me)
    at = ring.index(me)
    return {ring[at - 1], ring[(at + 1) % len(ring)]} - {me}


def _stage(layout: Layout, me: Member) -> set[Member]:
    return {Member(me.p, f, me.r) for f in range(layout.shards)}


def _on_nodes(members: set[Member], where: Mapping[Member, str]) -> Counter[str]:
    return Counter(where[member] for member in members if member in where)
