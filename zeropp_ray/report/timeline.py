"""What a picture shows: the replay of a program, sorted into what runs, what is held and what is moved, by rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeropp_ray.schedule.actions import COMPUTE, Action, Op
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


class Held(NamedTuple):
    """From when to when a chunk's parameters are resident, or its gradient buffer is open.

    Those that are held at the same time have different rows.
    """

    start: float
    end: float
    chunk: int
    row: int


Curve = list[tuple[float, float]]
"""Times, in order, and the value from each on; it starts at 0."""


@dataclass(frozen=True)
class Lane:
    """A rank. ``live`` activations and kept ``inputs`` are in whole-stage micro-batches, the other curves in chunks."""

    tasks: list[Task]
    collectives: list[Collective]
    resident: list[Held]
    buffers: list[Held]
    live: Curve
    inputs: Curve
    resident_chunks: Curve
    open_buffers: Curve


def lanes(program: Program) -> tuple[Timeline, list[Lane]]:
    """The replay of a program without its transfers, and the same by rank."""
    ranks = program.without_transfers()
    timeline = replay(ranks, program.spec, program.forward_only)
    each = zip(ranks, timeline.starts, timeline.ends, strict=True)
    return timeline, [_lane(*rank, program.spec, program.forward_only) for rank in each]


def _lane(
    actions: Sequence[Action], starts: Sequence[float], ends: Sequence[float], spec: ScheduleSpec, forward_only: bool
) -> Lane:
    first_of_units = [first for first, _ in spec.unit_bounds]
    tasks, collectives = [], []
    resident, buffers = _Rows(), _Rows()
    live: list[tuple[float, float]] = []
    inputs: list[tuple[float, float]] = []
    part = 1 / spec.chunks  # of a whole-stage micro-batch
    for (op, v, m, _), start, end in zip(actions, starts, ends, strict=True):
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
        elif op is Op.F and spec.recomputed[v]:
            inputs.append((start, part))
        elif op is Op.F:
            live.append((start, part))
        elif op is Op.RF:
            inputs.append((start, -part))
            live.append((start, part))
    return Lane(
        tasks=tasks,
        collectives=collectives,
        resident=resident.held,
        buffers=buffers.held,
        live=_curve([] if forward_only else live),
        inputs=_curve([] if forward_only else inputs),
        resident_chunks=_curve(_changes(resident.held)),
        open_buffers=_curve(_changes(buffers.held)),
    )


class _Rows:
    """Gives each chunk that is held the lowest row that is free."""

    def __init__(self) -> None:
        self.held: list[Held] = []
        self._since: dict[int, tuple[float, int]] = {}  # by chunk: since when, and its row

    def take(self, chunk: int, start: float) -> int:
        """Hold a chunk, if it is not held yet; its row."""
        if chunk not in self._since:
            used = {row for _, row in self._since.values()}
            self._since[chunk] = (start, min(set(range(len(used) + 1)) - used))
        return self._since[chunk][1]

    def give(self, chunk: int, end: float) -> int:
        """Hold it no longer; the row that it had."""
        start, row = self._since.pop(chunk)
        self.held.append(Held(start, end, chunk, row))
        return row


def _changes(held: Sequence[Held]) -> list[tuple[float, float]]:
    return [change for span in held for change in ((span.start, 1.0), (span.end, -1.0))]


def _curve(changes: Sequence[tuple[float, float]]) -> Curve:
    """Sums up changes. What goes and comes at one time is no dent, and what comes and goes at one time no peak."""
    total: dict[float, float] = {0.0: 0.0}
    for time, change in sorted(changes):
        total[time] = total.get(time, 0.0) + change
    curve, value = [], 0.0
    for time, change in total.items():
        value += change
        curve.append((time, round(value, 9)))
    return curve
