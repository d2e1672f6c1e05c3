"""What a picture shows: the replay of a program, sorted into what runs, what is held and what is moved, by rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeropp_ray.schedule.actions import COMPUTE, Action, Op
from zeropp_ray.schedule.held import Curve, curve
from zeropp_ray.schedule.program import Program
from zeropp_ray.schedule.replay import Timeline, replay
from zeropp_ray.schedule.spec import ScheduleSpec


class Task(NamedTuple):
    """``F``, ``RF``, ``B`` or ``W`` from ``start`` to ``end``, and which unit its micro-batch belongs to."""

    start: float
    end: float
    op: Op
    chunk: int
    microbatch: int
    unit: int


class Collective(NamedTuple):
    """A ``GATHER`` or ``REDUCE`` of a chunk. It stands in the row of what it fills or empties."""

    start: float
    end: float
    op: Op
    chunk: int
    row: int


class Other(NamedTuple):
    """What a rank does besides tasks: the update of its weights, and the vote on the step."""

    start: float
    end: float
    name: str


class Held(NamedTuple):
    """From when to when a chunk's parameters are resident, or its gradient buffer is open.

    Those that are held at the same time have different rows.
    """

    start: float
    end: float
    chunk: int
    row: int


@dataclass(frozen=True)
class Lane:
    """A rank. ``live`` activations, those of them that are ``waiting`` for ``W`` after their ``B``, and kept ``inputs``
    are in whole-stage micro-batches, ``resident_chunks`` and ``open_buffers`` in chunks. ``held`` is by kind, in the
    unit of the costs' sizes, and empty where there are none.
    """

    tasks: list[Task]
    others: list[Other]
    collectives: list[Collective]
    resident: list[Held]
    buffers: list[Held]
    live: Curve
    waiting: Curve
    inputs: Curve
    resident_chunks: Curve
    open_buffers: Curve
    held: Mapping[str, Curve]

    @property
    def timed_exchanges(self) -> bool:
        """Whether gathers and reduces take time, and so have a lane."""
        return any(each.end > each.start for each in self.collectives)


def lanes(program: Program) -> tuple[Timeline, list[Lane]]:
    """The replay of a program without its transfers, and the same by rank."""
    ranks = program.without_transfers()
    timeline = replay(ranks, program.spec, program.forward_only)
    return timeline, [_lane(p, actions, program, timeline) for p, actions in enumerate(ranks)]


def _lane(p: int, actions: Sequence[Action], program: Program, timeline: Timeline) -> Lane:
    spec, forward_only = program.spec, program.forward_only
    first_of_units = [first for first, _ in spec.unit_bounds]
    tasks, collectives = [], []
    resident, buffers = _Rows(), _Rows()
    live: list[tuple[float, float]] = []
    waiting: list[tuple[float, float]] = []
    inputs: list[tuple[float, float]] = []
    part = 1 / spec.chunks  # of a whole-stage micro-batch
    for (op, v, m, _), start, end in zip(actions, timeline.starts[p], timeline.ends[p], strict=True):
        if op in COMPUTE:
            tasks.append(Task(start, end, op, v, m, bisect_right(first_of_units, m) - 1))
        if op is Op.GATHER:
            collectives.append(Collective(start, end, op, v, resident.take(v, start)))
        elif op is Op.RELEASE:
            resident.give(v, end)
        elif op is Op.REDUCE:
            collectives.append(Collective(start, end, op, v, buffers.give(v, end)))
        elif op is Op.W:
            buffers.take(v, start)
            live.append((end, -part))
            waiting.append((end, -part))
        elif op is Op.B:
            waiting.append((end, part))
        elif op is Op.F and spec.recomputed[v]:
            inputs.append((start, part))
        elif op is Op.F:
            live.append((start, part))
        elif op is Op.RF:
            inputs.append((start, -part))
            live.append((start, part))
    return Lane(
        tasks=tasks,
        others=[] if forward_only else _others(p, spec, timeline),
        collectives=collectives,
        resident=resident.held,
        buffers=buffers.held,
        live=curve([] if forward_only else live),
        waiting=curve(waiting),
        inputs=curve([] if forward_only else inputs),
        resident_chunks=curve(_changes(resident.held)),
        open_buffers=curve(_changes(buffers.held)),
        held=timeline.held[p] if timeline.held else {},
    )


def _others(p: int, spec: ScheduleSpec, timeline: Timeline) -> list[Other]:
    update = sum(spec.costs.optimizer[spec.model_chunk(p, v)] for v in range(spec.chunks))
    both = (
        Other(0.0, update, "update of the weights, as the vote before decided"),
        Other(timeline.makespan - spec.costs.vote, timeline.makespan, "vote"),
    )
    return [other for other in both if other.end > other.start]


class _Rows:
    """Gives each chunk that is held the lowest row that is free by then."""

    def __init__(self) -> None:
        self.held: list[Held] = []
        self._since: dict[int, tuple[float, int]] = {}  # by chunk: since when, and its row
        self._until: dict[int, float] = {}  # by row: up to when it has been given

    def take(self, chunk: int, start: float) -> int:
        """Hold a chunk, if it is not held yet; its row."""
        if chunk not in self._since:
            used = {row for _, row in self._since.values()}
            used |= {row for row, until in self._until.items() if until > start}
            self._since[chunk] = (start, min(set(range(len(used) + 1)) - used))
        return self._since[chunk][1]

    def give(self, chunk: int, end: float) -> int:
        """Hold it no longer from ``end`` on, which may be later than what comes next; the row that it had."""
        start, row = self._since.pop(chunk)
        self.held.append(Held(start, end, chunk, row))
        self._until[row] = end
        return row


def _changes(held: Sequence[Held]) -> list[tuple[float, float]]:
    return [change for span in held for change in ((span.start, 1.0), (span.end, -1.0))]
