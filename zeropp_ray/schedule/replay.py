"""What a program takes: times from the lists and the costs alone, and what is resident, live and open along the way.

Independent of the generator: it knows the task graph and the order of each rank, not the phases, and so can judge them.
Time passes as in the engine:

- A member first applies the update of the step before (``optimizer``), for the decision comes with the call.
- ``GATHER`` and ``REDUCE`` are posted. Those of a rank go over its exchange lane, one after the other, while tasks run
  on; without ``costs.overlap`` the rank itself is busy with them. ``F``, ``RF`` and ``B`` wait for the gather of their
  chunk, a ``REDUCE`` for the one before it, whose buffer comes next, and the end of the list for the last one.
- A message takes its hop from the end of the task that makes it, whatever else is on the way. Both ends are busy with
  it for ``post``, which counts to the task; a ``DRAIN`` is over with its message, which gives the receiver work: none
  ends a step.
- The step ends with the vote on it, which waits for the last rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeropp_ray.errors import ScheduleError
from zeropp_ray.schedule.actions import COMPUTE, Action, Op, Ranks
from zeropp_ray.schedule.held import Curve, memory_over_time
from zeropp_ray.schedule.spec import ScheduleSpec


@dataclass(frozen=True)
class Timeline:
    """Times of a step under the costs of its spec, in their unit of time, and counts per rank.

    ``starts[p][i]`` and ``ends[p][i]`` belong to action ``i`` of rank ``p``: those of ``GATHER`` and ``REDUCE`` to its
    exchange lane, all others to the rank itself. ``makespan`` is from the call of a step to the decision on it.
    ``exposed`` is what a rank waits for gathers and reduces. ``held`` is memory over time, by kind, if the costs have
    sizes (:mod:`zeropp_ray.schedule.held`).
    ``peak_activations`` is in whole-stage micro-batches (a chunk's activation counts ``1/V`` from its ``F`` to its
    ``W``, that of a recomputed chunk from its ``RF``); ``peak_inputs`` (of recomputed chunks, from ``F`` to ``RF``),
    ``peak_gradient_buffers`` and ``peak_resident`` (parameters) are in chunks. ``bubble`` is the part of the ranks'
    time in which neither a task nor the optimizer computes.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    lower_bound: float
    bubble: float
    peak_activations: tuple[float, ...]
    peak_inputs: tuple[int, ...]
    peak_gradient_buffers: tuple[int, ...]
    peak_resident: tuple[int, ...]
    gathers: tuple[int, ...]
    reduces: tuple[int, ...]
    exposed: tuple[float, ...]
    held: tuple[Mapping[str, Curve], ...] = ()


def lower_bound(spec: ScheduleSpec, forward_only: bool = False) -> float:
    """The least makespan of a synchronous step: a rank's whole work, after the first micro-batch's way to that rank.

    Of the exchanges only the first gather counts, which nothing can hide, and the vote.
    """
    cost = spec.costs.ticks()
    bound = arrival = 0
    for p in range(spec.stages):
        own = [spec.model_chunk(p, v) for v in range(spec.chunks)]
        work = sum(cost.F[c] for c in own)
        begin = cost.gather[p]
        if not forward_only:
            again = (cost.RF[c] for c, recomputed in zip(own, spec.recomputed, strict=True) if recomputed)
            work += sum(again) + sum(cost.B[c] + cost.W[c] for c in own)
            begin += sum(cost.optimizer[c] for c in own)
        arrival = max(arrival, begin)
        bound = max(bound, spec.microbatches * work + arrival)
        arrival += cost.F[p] + (cost.hops[p] if p + 1 < spec.stages else 0)
    return (bound + (0 if forward_only else cost.vote)) / cost.scale


def replay(ranks: Ranks, spec: ScheduleSpec, forward_only: bool = False) -> Timeline:
    """Run every rank's list as early as its order and the task graph allow. Takes the result of any pass.

    Raises:
        ScheduleError: when the lists cannot be run to their ends; the text names the first action that waits for ever.
    """
    run = _times(ranks, spec, forward_only)
    cost = spec.costs.ticks()
    scale = cost.scale
    busy = sum(
        e - s
        for actions, start, end in zip(ranks, run.starts, run.ends, strict=True)
        for action, s, e in zip(actions, start, end, strict=True)
        if action.op in COMPUTE
    )
    if not forward_only:
        busy += sum(cost.optimizer)
    makespan = _makespan(run, spec, forward_only)
    starts, ends = (tuple(tuple(t / scale for t in times) for times in each) for each in (run.starts, run.ends))
    kept = (True,) * spec.chunks if forward_only else tuple(not recomputed for recomputed in spec.recomputed)
    peaks = [_peaks(actions, kept) for actions in ranks]
    return Timeline(
        starts=starts,
        ends=ends,
        makespan=makespan / scale,
        lower_bound=lower_bound(spec, forward_only),
        bubble=1 - busy / (makespan * len(ranks)) if makespan else 0.0,
        peak_activations=tuple(0.0 if forward_only else live / spec.chunks for live, _, _, _ in peaks),
        peak_inputs=tuple(inputs for _, inputs, _, _ in peaks),
        peak_gradient_buffers=tuple(buffers for _, _, buffers, _ in peaks),
        peak_resident=tuple(resident for _, _, _, resident in peaks),
        gathers=tuple(sum(action.op is Op.GATHER for action in actions) for actions in ranks),
        reduces=tuple(sum(action.op is Op.REDUCE for action in actions) for actions in ranks),
        exposed=tuple(t / scale for t in run.exposed),
        held=memory_over_time(ranks, starts, ends, spec, forward_only) if spec.costs.sizes else (),
    )


def makespan(ranks: Ranks, spec: ScheduleSpec) -> float:
    """That of :func:`replay`, and nothing else: for a search through many programs."""
    return _makespan(_times(ranks, spec, False), spec, False) / spec.costs.ticks().scale


class _Run(NamedTuple):
    """Times in ticks: of every action, of a rank's end with its last reduce, and what it waits for exchanges."""

    starts: list[list[int]]
    ends: list[list[int]]
    over: list[int]
    exposed: list[int]


def _makespan(run: _Run, spec: ScheduleSpec, forward_only: bool) -> int:
    return max(run.over, default=0) + (0 if forward_only else spec.costs.ticks().vote)


def _times(ranks: Ranks, spec: ScheduleSpec, forward_only: bool) -> _Run:
    """Start and end of every action."""
    last, cost = spec.model_chunks - 1, spec.costs.ticks()
    held = [[spec.model_chunk(p, v) for v in range(spec.chunks)] for p in range(spec.stages)]
    owner = {c: p for p, own in enumerate(held) for c in own}
    hop = [cost.hops[c] if owner[c] != owner[c + 1] else 0 for c in range(last)]  # from a model chunk to the next
    overlap = spec.costs.overlap
    # A task with what its rank is busy with for messages: each of F and B has one over each boundary to another rank.
    ends_of = [sum(owner[c] != owner[d] for d in (c - 1, c + 1) if 0 <= d <= last) for c in range(last + 1)]
    forward, backward = (
        [each + cost.post * ends for each, ends in zip(column, ends_of, strict=True)] for column in (cost.F, cost.B)
    )
    # When the input of F, and of B, arrives, per model chunk and micro-batch; None: its producer has not run yet.
    f_input: list[list[int | None]] = [[None] * spec.microbatches for _ in range(last + 1)]
    b_input: list[list[int | None]] = [[None] * spec.microbatches for _ in range(last + 1)]
    f_input[0] = [0] * spec.microbatches
    f, rf, b, w, wait, gather, reduce = Op.F, Op.RF, Op.B, Op.W, Op.WAIT, Op.GATHER, Op.REDUCE  # looked up here, once
    starts: list[list[int]] = [[] for _ in ranks]
    ends: list[list[int]] = [[] for _ in ranks]
    begins = [0 if forward_only else sum(cost.optimizer[c] for c in own) for own in held]
    clock = begins[:]  # when a rank is done with what it has run
    lane = begins[:]  # when its exchanges are over, and its reduces
    reduced = begins[:]
    gathered = [[0] * spec.chunks for _ in ranks]
    exposed = [0] * len(ranks)
    todo, asleep = list(range(spec.stages)), set[int]()
    while todo:
        p = todo.pop()
        actions, start, end, own, there = ranks[p], starts[p], ends[p], held[p], gathered[p]
        now = clock[p]
        while len(end) < len(actions):
            op, v, m, kind = actions[len(end)]
            c = own[v]
            begin = now
            consumer = p
            if op is w:
                now += cost.W[c]
            elif op is rf:
                begin = max(now, there[v])
                exposed[p] += begin - now
                now = begin + cost.RF[c]
            elif op is f or op is b or op is wait:
                arrival = (f_input if op is f or kind == "F" else b_input)[c][m]
                if arrival is None:
                    asleep.add(p)
                    break
                now = max(now, arrival)
                if op is not wait:
                    begin = max(now, there[v])
                    exposed[p] += begin - now
                    now = begin + (forward[c] if op is f else backward[c])
                if op is f and c < last:
                    f_input[c + 1][m] = now + hop[c]
                    consumer = owner[c + 1]
                elif op is f:
                    b_input[c][m] = now
                elif op is b and c > 0:
                    b_input[c - 1][m] = now + hop[c - 1]
                    consumer = owner[c - 1]
                if consumer in asleep:
                    asleep.remove(consumer)
                    todo.append(consumer)
            elif op is gather or op is reduce:
                if op is reduce and reduced[p] > now:
                    exposed[p] += reduced[p] - now
                    now = reduced[p]
                begin = max(now, lane[p])
                lane[p] = begin + (cost.gather[c] if op is gather else cost.reduce[c])
                if op is gather:
                    there[v] = lane[p]
                else:
                    reduced[p] = lane[p]
                start.append(begin)
                end.append(lane[p])
                if not overlap:
                    exposed[p] += lane[p] - now
                    now = lane[p]
                continue
            start.append(begin)
            end.append(now)
        clock[p] = now
    for p, (actions, end) in enumerate(zip(ranks, ends, strict=True)):
        if len(end) < len(actions):
            raise ScheduleError(
                f"rank {p}, position {len(end)}: {actions[len(end)]} waits for an input that is never made"
            )
        exposed[p] += max(reduced[p] - clock[p], 0)
    return _Run(starts, ends, [max(times) for times in zip(clock, reduced, strict=True)], exposed)


def _peaks(actions: Sequence[Action], kept: Sequence[bool]) -> tuple[int, int, int, int]:
    """Most chunk activations, chunk inputs, gradient buffers and chunks' parameters held at once by a rank.

    ``kept``: of each chunk whether its ``F`` makes an activation, or leaves an input for ``RF``.
    """
    live = most_live = inputs = most_inputs = most_open = most_resident = 0
    opened: set[int] = set()
    resident: set[int] = set()
    for op, v, _, _ in actions:
        if op is Op.F and not kept[v]:
            inputs += 1
            most_inputs = max(most_inputs, inputs)
        elif op is Op.F or op is Op.RF:
            inputs -= op is Op.RF
            live += 1
            most_live = max(most_live, live)
        elif op is Op.W:
            live -= 1
            opened.add(v)
            most_open = max(most_open, len(opened))
        elif op is Op.REDUCE:
            opened.discard(v)
        elif op is Op.GATHER:
            resident.add(v)
            most_resident = max(most_resident, len(resident))
        elif op is Op.RELEASE:
            resident.discard(v)
    return most_live, most_inputs, most_open, most_resident
