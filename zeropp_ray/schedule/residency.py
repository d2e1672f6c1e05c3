"""The second pass: when parameters and gradient buffers are there. Inserts ``GATHER``, ``RELEASE`` and ``REDUCE``.

A maximal run of ``F``, ``RF`` and ``B`` of one chunk is one residency of its parameters; ``W`` needs saved inputs and
output gradients, not parameters, so it neither holds nor breaks one. This is where ZeroPP's blockwise order pays (Tang
et al., arXiv 2402.03791): a residency serves a whole unit, and ``F(V-1)+B(V-1)`` and ``B(0)+F(0 of the next unit)``
share one: ``(2V-2)·K + 1`` gathers per step. In the policy ``zeropp-published`` forwards and backwards do not share.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeropp_ray.schedule.actions import Action, Op, Ranks
from zeropp_ray.schedule.policies import POLICIES
from zeropp_ray.schedule.spec import ScheduleSpec


def add_residency(order: Ranks, spec: ScheduleSpec) -> list[list[Action]]:
    """Add parameter and gradient-buffer actions to the compute order of every rank.

    ``GATHER`` goes before the first task but ``W`` of a residency, ``RELEASE`` after the last. With ``spec.prefetch``
    the gather moves ahead of the last one of the residency before, so that two chunks are resident for that time.
    ``REDUCE`` follows the last ``W`` of a chunk and unit, or of a chunk and step, as ``spec.reduce`` says.
    """
    reduced_after = {stop - 1 for _, stop in spec.reduce_bounds}
    shared = POLICIES[spec.policy].shared
    return [_lower(rank, spec.prefetch, shared, reduced_after) for rank in order]


def _lower(order: Sequence[Action], prefetch: bool, shared: bool, reduced_after: set[int]) -> list[Action]:
    uses = [i for i, action in enumerate(order) if action.op is not Op.W]
    held = [(order[i].chunk, shared or order[i].op is Op.F) for i in uses]
    starts = [j for j, each in enumerate(held) if j == 0 or each != held[j - 1]]
    before: dict[int, list[Action]] = {}  # position in the order -> gathers that go ahead of it
    releases = {uses[j - 1] for j in starts[1:]} | {uses[-1]}
    for j in starts:
        place = uses[j - 1] if prefetch and j > 0 and held[j][0] != held[j - 1][0] else uses[j]
        before.setdefault(place, []).append(Action(Op.GATHER, order[uses[j]].chunk))
    result: list[Action] = []
    for i, action in enumerate(order):
        result += before.get(i, ())
        result.append(action)
        if i in releases:
            result.append(Action(Op.RELEASE, action.chunk))
        if action.op is Op.W and action.microbatch in reduced_after:
            result.append(Action(Op.REDUCE, action.chunk))
    return result
