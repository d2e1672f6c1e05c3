"""What a program takes: times from the lists and the costs alone, and what is resident, live and open along the way.

Independent of the generator: it knows the task graph and the order of each rank, not the phases, and so can judge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeropp_ray.errors import ScheduleError
from zeropp_ray.schedule.actions import Action, Op, Ranks
from zeropp_ray.schedule.spec import ScheduleSpec


@dataclass(frozen=True)
class Timeline:
    """Times of a step under the costs of its spec, in their unit of time, and counts per rank.

    ``starts[p][i]`` and ``ends[p][i]`` belong to action ``i`` of rank ``p``. Only tasks and waiting for them take time:
    collectives are counted, not timed, and a transfer takes ``costs.comm`` from the end of its producer.
    ``peak_activations`` is in whole-stage micro-batches (a chunk's activation counts ``1/V`` from its ``F`` to its
    ``W``, that of a recomputed chunk from its ``RF``); ``peak_inputs`` (of recomputed chunks, from ``F`` to ``RF``),
    ``peak_gradient_buffers`` and ``peak_resident`` (parameters) are in chunks. ``bubble`` is the part of the ranks'
    time in which nothing is computed.
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


def lower_bound(spec: ScheduleSpec, forward_only: bool = False) -> float:
    """The least makespan of a synchronous step: a rank's whole work, after the first micro-batch's way to that rank."""
    cost = spec.costs.ticks()
    bound = arrival = 0
    for p in range(spec.stages):
        own = [spec.model_chunk(p, v) for v in range(spec.chunks)]
        work = sum(cost.F[c] for c in own)
        if not forward_only:
            again = (cost.F[c] for c, recomputed in zip(own, spec.recomputed, strict=True) if recomputed)
            work += sum(again) + sum(cost.B[c] + cost.W[c] for c in own)
        bound = max(bound, spec.microbatches * work + arrival)
        arrival += cost.F[p] + cost.comm
    return bound / cost.scale


def replay(ranks: Ranks, spec: ScheduleSpec, forward_only: bool = False) -> Timeline:
    """Run every rank's list as early as its order and the task graph allow. Takes the result of any pass.

    Raises:
        ScheduleError: when the lists cannot be run to their ends; the text names the first action that waits for ever.
    """
    starts, ends = _times(ranks, spec)
    scale = spec.costs.ticks().scale
    busy = sum(
        e - s
        for actions, start, end in zip(ranks, starts, ends, strict=True)
        for action, s, e in zip(actions, start, end, strict=True)
        if action.op is not Op.WAIT
    )
    makespan = max((end[-1] for end in ends if end), default=0)
    kept = (True,) * spec.chunks if forward_only else tuple(not recomputed for recomputed in spec.recomputed)
    peaks = [_peaks(actions, kept) for actions in ranks]
    return Timeline(
        starts=tuple(tuple(t / scale for t in start) for start in starts),
        ends=tuple(tuple(t / scale for t in end) for end in ends),
        makespan=makespan / scale,
        lower_bound=lower_bound(spec, forward_only),
        bubble=1 - busy / (makespan * len(ranks)) if makespan else 0.0,
        peak_activations=tuple(0.0 if forward_only else live / spec.chunks for live, _, _, _ in peaks),
        peak_inputs=tuple(inputs for _, inputs, _, _ in peaks),
        peak_gradient_buffers=tuple(buffers for _, _, buffers, _ in peaks),
        peak_resident=tuple(resident for _, _, _, resident in peaks),
        gathers=tuple(sum(action.op is Op.GATHER for action in actions) for actions in ranks),
        reduces=tuple(sum(action.op is Op.REDUCE for action in actions) for actions in ranks),
    )


def _times(ranks: Ranks, spec: ScheduleSpec) -> tuple[list[list[int]], list[list[int]]]:
    """Start and end of every action, in ticks."""
    last, cost = spec.model_chunks - 1, spec.costs.ticks()
    held = [[spec.model_chunk(p, v) for v in range(spec.chunks)] for p in range(spec.stages)]
    owner = {c: p for p, own in enumerate(held) for c in own}
    comm = [cost.comm if owner[c] != owner[c + 1] else 0 for c in range(last)]  # from a model chunk to the next
    # When the input of F, and of B, arrives, per model chunk and micro-batch; None: its producer has not run yet.
    f_input: list[list[int | None]] = [[None] * spec.microbatches for _ in range(last + 1)]
    b_input: list[list[int | None]] = [[None] * spec.microbatches for _ in range(last + 1)]
    f_input[0] = [0] * spec.microbatches
    f, rf, b, w, wait = Op.F, Op.RF, Op.B, Op.W, Op.WAIT  # looked up here, not a million times below
    starts: list[list[int]] = [[] for _ in ranks]
    ends: list[list[int]] = [[] for _ in ranks]
    todo, asleep = list(range(spec.stages)), set[int]()
    while todo:
        p = todo.pop()
        actions, start, end, own = ranks[p], starts[p], ends[p], held[p]
        now = end[-1] if end else 0
        while len(end) < len(actions):
            op, v, m, kind = actions[len(end)]
            c = own[v]
            begin = now
            consumer = p
            if op is w:
                now += cost.W[c]
            elif op is rf:
                now += cost.F[c]
            elif op is f or op is b or op is wait:
                arrival = (f_input if op is f or kind == "F" else b_input)[c][m]
                if arrival is None:
                    asleep.add(p)
                    break
                now = max(now, arrival)
                if op is not wait:
                    begin = now
                    now += cost.F[c] if op is f else cost.B[c]
                if op is f and c < last:
                    f_input[c + 1][m] = now + comm[c]
                    consumer = owner[c + 1]
                elif op is f:
                    b_input[c][m] = now
                elif op is b and c > 0:
                    b_input[c - 1][m] = now + comm[c - 1]
                    consumer = owner[c - 1]
                if consumer in asleep:
                    asleep.remove(consumer)
                    todo.append(consumer)
            start.append(begin)
            end.append(now)
    for p, (actions, end) in enumerate(zip(ranks, ends, strict=True)):
        if len(end) < len(actions):
            raise ScheduleError(
                f"rank {p}, position {len(end)}: {actions[len(end)]} waits for an input that is never made"
            )
    return starts, ends


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
