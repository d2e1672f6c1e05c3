"""What a rank of a running program holds over time, by kind of memory: curves from the times of a replay.

An activation counts whole up to its ``B``, which frees most of it, and from there to its ``W`` as what that still
needs. A limit of live activations counts it whole up to ``W`` instead: it is a count, and never less than the truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeropp_ray.metrics import kinds
from zeropp_ray.schedule.actions import Op, Ranks
from zeropp_ray.schedule.spec import ScheduleSpec

Curve = list[tuple[float, float]]
"""Times, in order, and the value from each on; it starts at 0."""

KINDS = (kinds.RESIDENT, kinds.GRADIENT_BUFFERS, kinds.ACTIVATIONS, kinds.WEIGHT_INPUTS, kinds.CHUNK_INPUTS)
"""What comes and goes in a step."""


def curve(changes: Sequence[tuple[float, float]]) -> Curve:
    """Sums up changes. What goes and comes at one time is no dent, and what comes and goes at one time no peak."""
    total: dict[float, float] = {0.0: 0.0}
    for time, change in sorted(changes):
        total[time] = total.get(time, 0.0) + change
    summed, value = [], 0.0
    for time, change in total.items():
        value += change
        summed.append((time, round(value, 9)))
    return summed


def memory_over_time(
    ranks: Ranks,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    spec: ScheduleSpec,
    forward_only: bool = False,
) -> tuple[Mapping[str, Curve], ...]:
    """A curve for each of :data:`KINDS` and rank, in the unit of ``spec.costs.sizes``, which are there."""
    sizes = spec.costs.sizes
    assert sizes is not None, "costs without sizes"
    result = []
    for p, actions in enumerate(ranks):
        changes: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        opened: set[int] = set()
        for (op, v, _, _), start, end in zip(actions, starts[p], ends[p], strict=True):
            c = spec.model_chunk(p, v)
            if op is Op.GATHER:
                changes[kinds.RESIDENT].append((start, sizes.parameters[c]))
            elif op is Op.RELEASE:
                changes[kinds.RESIDENT].append((end, -sizes.parameters[c]))
            elif op is Op.REDUCE:
                changes[kinds.GRADIENT_BUFFERS].append((end, -sizes.gradients[c]))
                opened.discard(v)
            elif forward_only:
                continue
            elif op is Op.F and spec.recomputed[v]:
                changes[kinds.CHUNK_INPUTS].append((start, sizes.inputs[c]))
            elif op is Op.F or op is Op.RF:
                changes[kinds.ACTIVATIONS].append((start, sizes.saved[c]))
                if op is Op.RF:
                    changes[kinds.CHUNK_INPUTS].append((start, -sizes.inputs[c]))
            elif op is Op.B:
                changes[kinds.ACTIVATIONS].append((end, -sizes.saved[c]))
                changes[kinds.WEIGHT_INPUTS].append((end, sizes.stashed[c]))
            elif op is Op.W:
                changes[kinds.WEIGHT_INPUTS].append((end, -sizes.stashed[c]))
                if v not in opened:
                    opened.add(v)
                    changes[kinds.GRADIENT_BUFFERS].append((start, sizes.gradients[c]))
        result.append({kind: curve(each) for kind, each in changes.items()})
    return tuple(result)


def fullest(curves: Mapping[str, Curve]) -> dict[str, float]:
    """What is held of each kind at the moment when all of it together is most."""
    times = sorted({time for each in curves.values() for time, _ in each})
    at = dict.fromkeys(curves, 0.0)
    position = dict.fromkeys(curves, 0)
    best = dict(at)
    for time in times:
        for kind, each in curves.items():
            while position[kind] < len(each) and each[position[kind]][0] <= time:
                at[kind] = each[position[kind]][1]
                position[kind] += 1
        if sum(at.values()) > sum(best.values()):
            best = dict(at)
    return best
