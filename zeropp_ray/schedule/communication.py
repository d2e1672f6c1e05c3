"""The third pass: what crosses between stages. Inserts ``RECV``, ``WAIT``, ``SEND`` and ``DRAIN``.

``SEND`` and ``RECV`` only post; an edge (source, destination, kind) is a FIFO, and its receiver posts in its sender's
order. A program states how many sends of each edge may be in flight: that many outputs a rank keeps, at most, beyond
its live activations.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from zeropp_ray.schedule.actions import Action, Op, Ranks
from zeropp_ray.schedule.replay import Timeline
from zeropp_ray.schedule.spec import Edge, Hop, ScheduleSpec

_SENDERS = (Op.F, Op.B)  # what they make goes to another stage

RECEIVE_WINDOW = 2
"""Receives of an edge that are posted ahead: one arrives while the one before it is used. Each is a buffer."""


def in_flight_bounds(ranks: Ranks, timeline: Timeline, spec: ScheduleSpec) -> dict[Edge, int]:
    """Sends in flight per edge under which the timed replay can happen: the most ever sent and not yet used, plus one.

    So a ``DRAIN`` never blocks in that replay, which shows that the bounds themselves cause no deadlock.
    """
    used = [
        {action: start for action, start in zip(actions, starts, strict=True) if action.op in _SENDERS}
        for actions, starts in zip(ranks, timeline.starts, strict=True)
    ]
    messages: dict[Edge, list[tuple[float, float]]] = {}  # when sent and when used, in the order sent
    for p, (actions, ends) in enumerate(zip(ranks, timeline.ends, strict=True)):
        hops = _hops(spec.outgoing, p, spec.chunks)
        for (op, v, m, _), end in zip(actions, ends, strict=True):
            if op in _SENDERS and (hop := hops[op][v]):
                use = used[hop.edge.destination][Action(op, hop.chunk, m)]
                messages.setdefault(hop.edge, []).append((end, use))
    return {edge: _most_unused(sent) + 1 for edge, sent in messages.items()}


def _hops(find: Callable[[int, int, str], Hop | None], rank: int, chunks: int) -> dict[Op, list[Hop | None]]:
    return {op: [find(rank, v, op.value) for v in range(chunks)] for op in _SENDERS}


def _most_unused(messages: Sequence[tuple[float, float]]) -> int:
    """The most messages that are sent and not yet used; one that is used at that very moment counts."""
    in_order = list(accumulate((use for _, use in messages), max))  # a message is done once all before it are, too
    return max(count - bisect_left(in_order, sent) for count, (sent, _) in enumerate(messages, start=1))


def add_communication(ranks: Ranks, spec: ScheduleSpec, in_flight: Mapping[Edge, int]) -> list[list[Action]]:
    """Add transfers to every rank's list.

    The first two receives of an edge are posted at the start, the next one after each ``WAIT``, which stands before the
    use. ``SEND`` follows the producer. The ``DRAIN`` of an edge's oldest send goes, as late as possible, ahead of the
    ``SEND`` that would exceed the bound of the edge; those that are left end the program. With one stage nothing is
    sent, and the lists stay as they are.
    """
    receives: dict[Edge, list[tuple[int, int]]] = {}  # chunk at the receiver and micro-batch, in the sender's order
    for p, actions in enumerate(ranks):
        targets = _hops(spec.outgoing, p, spec.chunks)
        for op, v, m, _ in actions:
            if op in _SENDERS and (hop := targets[op][v]):
                receives.setdefault(hop.edge, []).append((hop.chunk, m))
    shared = functools.cache(Action)  # by all ranks: a large program is then small in memory, and quick to push
    return [list(_lower(p, actions, spec, receives, in_flight, shared)) for p, actions in enumerate(ranks)]


def _lower(
    p: int,
    actions: Sequence[Action],
    spec: ScheduleSpec,
    receives: Mapping[Edge, Sequence[tuple[int, int]]],
    in_flight: Mapping[Edge, int],
    shared: Callable[[Op, int, int, str], Action],
) -> Iterator[Action]:
    sources, targets = _hops(spec.incoming, p, spec.chunks), _hops(spec.outgoing, p, spec.chunks)
    unposted = {edge: deque(keys) for edge, keys in receives.items() if edge.destination == p}
    posted: dict[Edge, set[tuple[int, int]]] = {edge: set() for edge in unposted}
    sends: dict[Edge, deque[Action]] = {edge: deque() for edge in receives if edge.source == p}

    def post(edge: Edge) -> Action:
        v, m = unposted[edge].popleft()
        posted[edge].add((v, m))
        return shared(Op.RECV, v, m, edge.kind)

    for edge in unposted:
        while unposted[edge] and len(posted[edge]) < RECEIVE_WINDOW:
            yield post(edge)
    for action in actions:
        op, v, m, _ = action
        if op not in _SENDERS:
            yield action
            continue
        if source := sources[op][v]:
            edge = source.edge
            while (v, m) not in posted[edge]:  # used in another order than sent: the window must reach that far
                yield post(edge)
            yield shared(Op.WAIT, v, m, edge.kind)
            posted[edge].remove((v, m))
            while unposted[edge] and len(posted[edge]) < RECEIVE_WINDOW:
                yield post(edge)
        yield action
        if target := targets[op][v]:
            edge = target.edge
            if len(sends[edge]) == in_flight[edge]:
                yield sends[edge].popleft()
            yield shared(Op.SEND, v, m, edge.kind)
            sends[edge].append(shared(Op.DRAIN, v, m, edge.kind))
    for left in sends.values():
        yield from left
