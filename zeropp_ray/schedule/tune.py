"""The unit that suits the costs: ``unit = "auto"``.

Larger units hide uneven costs and slow links better and gather less often; smaller ones leave more of a memory limit to
the ramps between them. Which is best follows from a replay of each: the "adaptive scheduling unit" of Tang et al.,
ZeroPP, arXiv 2402.03791.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from zeropp_ray.schedule.order import phases, zeropp_makespan, zeropp_order
from zeropp_ray.schedule.policies import POLICIES, most_live
from zeropp_ray.schedule.replay import lower_bound, makespan
from zeropp_ray.schedule.residency import add_residency
from zeropp_ray.schedule.spec import ScheduleSpec, limits
from zeropp_ray.schedule.units import split_units

_NEAR = 1.005  # a plan whose makespan is within 0.5% of the best one's is as good


def tune(spec: ScheduleSpec, memory_limit: float = 0.0) -> ScheduleSpec:
    """The spec with the unit that suits its costs, and the memory limit that suits the unit.

    Of all numbers of units that are within 0.5% of the best makespan under ``memory_limit``, the one with the fewest
    gathers, that is the fewest units; then a limit that keeps its makespan and that, one chunk activation less, would
    not. 0 takes ``2P``, or ``2P/V`` with recomputation.

    ``spec``: resolved with ``unit = "auto"`` and the same limit. A policy that leaves no choice gets it back.
    """
    if POLICIES[spec.policy].unit != "2P":
        return spec
    chosen, best = _fewest_units(spec, memory_limit or default(spec))
    # Limits in chunk activations: below ``least`` there is no schedule, and above ``enough`` it is the same one.
    least, enough = limits(chosen)[0], most_live(zeropp_order(chosen), chosen.recomputed)
    while least < enough:
        middle = (least + enough) // 2
        if _makespan(replace(chosen, memory_limit=middle / spec.chunks), best) <= best:
            enough = middle
        else:
            least = middle + 1
    return replace(chosen, memory_limit=enough / spec.chunks)


def default(spec: ScheduleSpec) -> float:
    """The limit under which units are compared, in whole-stage micro-batches: one that does not depend on them."""
    return 2 * spec.stages / (spec.chunks if any(spec.recomputed) else 1)


def _fewest_units(spec: ScheduleSpec, memory_limit: float) -> tuple[ScheduleSpec, float]:
    """The fewest units that are near the best makespan, and theirs."""
    bound = lower_bound(spec)
    tried: list[tuple[ScheduleSpec, float]] = []
    near, most = 0, float("inf")  # the place of the fewest units that are near the best so far, and their makespan
    for one in _candidates(spec, memory_limit):
        tried.append((one, _makespan(one, most)))
        best = min(taken for _, taken in tried)
        near = next(place for place, (_, taken) in enumerate(tried) if taken <= best * _NEAR)
        if tried[near][1] <= bound * _NEAR:  # whatever comes
            break
        most = tried[near][1]  # more units that take longer are never the choice
    return tried[near]


def _makespan(spec: ScheduleSpec, most: float) -> float:
    """What a step takes; infinity if its tasks and messages alone take more than ``most``."""
    if spec.costs.tasks_alone:
        return zeropp_makespan(spec, most)
    order = zeropp_order(spec, most)
    return makespan(add_residency(order, spec), spec) if order else math.inf


def _candidates(spec: ScheduleSpec, memory_limit: float) -> Iterator[ScheduleSpec]:
    """All unit sizes that differ in their order and have one under the limit, the fewest units first."""
    before = None
    for count in range(1, spec.microbatches // spec.stages + 1):
        unit = spec.microbatches // count
        if spec.microbatches // unit != count:
            continue  # no unit size gives so many
        units = tuple(split_units(spec.microbatches, unit))
        one = replace(spec, unit=unit, units=units, memory_limit=memory_limit)
        if one.live_chunks >= limits(one)[0] and phases(one) != before:
            before = phases(one)
            yield one
