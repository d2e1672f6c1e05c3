"""The first pass: in which order each rank runs its tasks. Made by replaying the costs, then static.

ZeroPP's blockwise, task-interleaved order (Tang et al., arXiv 2402.03791). The phases of a unit are ::

    F(0) | F(1) | … | F(V-2) | F(V-1)+B(V-1) | B(V-2) | … | B(1) | B(0)+F(0 of the next unit)

where ``+`` marks blocks of the same chunk: they share one residency of its parameters and interleave freely. The ``RF``
of a recomputed chunk run in the phase of its ``B``. As published every block is a phase of its own, ``2V·K`` in all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from zeropp_ray.schedule.actions import Action, Op
from zeropp_ray.schedule.policies import POLICIES
from zeropp_ray.schedule.replay import lower_bound
from zeropp_ray.schedule.spec import ScheduleSpec


class Rule(NamedTuple):
    """How a rank chooses among tasks, where the greedy choice may cost time: the fields are deviations from it.

    ``hold``: a ``W`` does not start if the input of an ``F`` or ``B`` arrives within so many quarters of its duration:
    that task would wait for it, and other ranks with it. ``forward_first``: where ``F`` and ``B`` of chunk 0 meet in a
    phase, ``F`` goes first: all ranks behind wait for it, and only the ranks before wait for that ``B``.
    """

    hold: int = 0
    forward_first: bool = False


RULES = (Rule(), Rule(hold=2), Rule(hold=3, forward_first=True), Rule(hold=1, forward_first=True))
"""The greedy choice, and what gave most beside it, one after the other, over 34 settings of P from 2 to 16, V from 1 to
4, costs and transfers, at limits from P to 2P.
"""
GREEDY = RULES[:1]

_NEAR = 1.001  # of the lower bound: then no other rule is tried


class Phase(NamedTuple):
    """One residency of a chunk: the micro-batches whose ``F`` and whose ``B`` run in it (first, past-the-last)."""

    chunk: int
    forward: tuple[int, int]
    backward: tuple[int, int]


_NONE = (0, 0)
_NEVER = 1 << 200  # later than any time


def phases(spec: ScheduleSpec) -> list[Phase]:
    """The phases of a step, the same for every rank: ``(2V-2)·K + 1`` of them, and one when ``V = 1``."""
    last = spec.chunks - 1
    if not POLICIES[spec.policy].shared:
        order = range(spec.chunks)
        return [
            phase
            for unit in spec.unit_bounds
            for phase in (*(Phase(v, unit, _NONE) for v in order), *(Phase(v, _NONE, unit) for v in reversed(order)))
        ]
    if last == 0:  # the one chunk stays: forwards and backwards of all units in one phase
        whole = (0, spec.microbatches)
        return [Phase(0, whole, whole)]
    bounds = spec.unit_bounds
    result = [Phase(0, bounds[0], _NONE)]
    for unit, following in zip(bounds, [*bounds[1:], _NONE], strict=True):
        result += [Phase(chunk, unit, _NONE) for chunk in range(1, last)]
        result += [Phase(last, unit, unit)]
        result += [Phase(chunk, _NONE, unit) for chunk in range(last - 1, 0, -1)]
        result += [Phase(0, following, unit)]
    return result


def zeropp_order(spec: ScheduleSpec, most: float = math.inf) -> list[list[Action]]:
    """Compute actions per rank, from a replay of the costs: the best of :data:`RULES`. The same input gives the same
    order, and none is worse than the greedy one. Nothing if its tasks take more than ``most``.

    ``F``, ``RF`` and ``B`` run only in their phase, in micro-batch order. Of what can run, ``B`` goes before ``RF``,
    ``RF`` before ``F`` and ``F`` before ``W``: a ``W`` fills time in which none of the others can run, or makes room
    when the live-activation limit holds back an ``F``. Of a recomputed chunk this limit holds back the ``RF``, and that
    of kept inputs the ``F``. The ``W`` of a rank run in the order of their ``B``, so at most one gradient buffer is
    open if every unit is reduced. A :class:`Rule` deviates from this choice, never from the phases.

    The replay is event-driven: a rank decides when it becomes free, or when what it waits for arrives.
    """
    return [rank.order for rank in _best(spec, _in_ticks(spec, most)) or ()]


def zeropp_makespan(spec: ScheduleSpec, most: float = math.inf, rules: Sequence[Rule] = RULES) -> float:
    """What the tasks of a step in this order take, as a replay of its program would find if exchanges, optimizer and
    vote took no time; infinity if it is more than ``most``, which is known before the end of the step.
    """
    ranks = _best(spec, _in_ticks(spec, most), rules)
    return _end(ranks) / spec.costs.ticks().scale if ranks else math.inf


def _in_ticks(spec: ScheduleSpec, most: float) -> int:
    return math.floor(most * spec.costs.ticks().scale * (1 + 1e-12)) if most < math.inf else _NEVER


def _best(spec: ScheduleSpec, most: int, rules: Sequence[Rule] = RULES) -> list[_Rank] | None:
    """The ranks at the end of the step under the first of the best rules; None if it takes more than ``most`` ticks."""
    # Other costs are in the bound and not in this replay: then all rules are tried.
    near = math.floor(lower_bound(spec) * spec.costs.ticks().scale * _NEAR) if spec.costs.tasks_alone else 0
    best = None
    for rule in rules:
        # Up to ``near`` in any case: whether other rules are tried may not depend on ``most``.
        ranks = _run(spec, rule, max(most, near))
        if ranks:
            best, most = ranks if _end(ranks) <= most else None, min(most, _end(ranks) - 1)
            if _end(ranks) <= near:
                break
    return best


def _end(ranks: list[_Rank]) -> int:
    return max(rank.free_at for rank in ranks)


def _run(spec: ScheduleSpec, rule: Rule, most: int) -> list[_Rank] | None:
    """The ranks at the end of the step, which takes at most ``most`` ticks; else None."""
    stages, last, limit = spec.stages, spec.model_chunks - 1, spec.live_chunks
    cost = spec.costs.ticks()
    hops = cost.hops if stages > 1 else (0,) * last  # from a model chunk to the next
    # The ranks share the actions: a large program is then small in memory, and quick to make.
    forward, again, backward, weight = (
        [[Action(op, v, m) for m in range(spec.microbatches)] for v in range(spec.chunks)]
        for op in (Op.F, Op.RF, Op.B, Op.W)
    )
    # When the input of each F and B is there, per model chunk and micro-batch.
    f_ready = [[_NEVER] * spec.microbatches for _ in range(spec.model_chunks)]
    b_ready = [[_NEVER] * spec.microbatches for _ in range(spec.model_chunks)]
    f_ready[0] = [0] * spec.microbatches

    ranks = [_Rank(phases(spec), spec.recomputed) for _ in range(stages)]
    for c in range(last + 1):
        each = cost.F[c] + cost.RF[c] * spec.recomputed[c // stages] + cost.B[c] + cost.W[c]
        ranks[c % stages].left += each * spec.microbatches
    events = [(0, p) for p in range(stages)]  # sorted, hence a heap
    while events:
        now, p = heappop(events)
        rank = ranks[p]
        if rank.free_at > now:
            continue  # woken before, and busy since
        v = rank.chunk
        c = v * stages + p
        recomputed = spec.recomputed[v]
        room = rank.live < limit
        f_room = rank.inputs < spec.input_limit if recomputed else room
        b_at = b_ready[c][rank.b] if rank.b < rank.graphs else _NEVER
        f_at = f_ready[c][rank.f] if rank.f < rank.f_end and f_room else _NEVER
        if b_at <= now and not (rule.forward_first and v == 0 and f_at <= now):
            m = rank.b
            end = now + cost.B[c]
            rank.order.append(backward[v][m])
            rank.pending.append((v, m))
            rank.b += 1
            if c > 0:
                b_ready[c - 1][m] = end + hops[c - 1]
                heappush(events, (b_ready[c - 1][m], (p - 1) % stages))
        elif room and rank.graphs < min(rank.b_end, rank.forwards[v]):
            end = now + cost.RF[c]
            rank.order.append(again[v][rank.graphs])
            rank.inputs -= 1
            rank.live += 1
            rank.graphs += 1
        elif f_at <= now:
            m = rank.f
            end = now + cost.F[c]
            rank.order.append(forward[v][m])
            if recomputed:
                rank.inputs += 1
            else:
                rank.live += 1
            rank.f += 1
            rank.forwards[v] += 1
            if c < last:
                f_ready[c + 1][m] = end + hops[c]
                heappush(events, (f_ready[c + 1][m], (p + 1) % stages))
            else:
                b_ready[c][m] = end
        elif rank.pending:
            v, m = rank.pending[0]
            if 4 * (min(b_at, f_at) - now) < rule.hold * cost.W[v * stages + p]:
                continue  # what arrives has an event of its own
            rank.pending.popleft()
            end = now + cost.W[v * stages + p]
            rank.order.append(weight[v][m])
            rank.live -= 1
        else:
            continue  # every input that arrives has an event of its own
        rank.free_at = end
        rank.left -= end - now
        if end + rank.left > most:
            return None
        heappush(events, (end, p))
        if rank.f == rank.f_end and rank.b == rank.b_end:
            rank.next_phase()
    return ranks


class _Rank:
    """Where a rank is: its phase, the next ``F``, ``RF`` and ``B`` in it, and what it holds."""

    __slots__ = (
        "b", "b_end", "chunk", "f", "f_end", "forwards", "free_at", "graphs", "inputs", "left", "live", "order",
        "pending", "phases", "recomputed",
    )  # fmt: skip

    def __init__(self, phases: list[Phase], recomputed: Sequence[bool]) -> None:
        self.phases, self.recomputed = iter(phases), recomputed
        self.order: list[Action] = []
        self.pending: deque[tuple[int, int]] = deque()  # chunk and micro-batch of each B whose W has not run
        self.forwards = [0] * len(recomputed)  # F done, per chunk
        self.inputs = 0  # of recomputed chunks, each from its F to its RF
        self.live = 0  # chunk activations, each from its F or RF to its W
        self.free_at = 0
        self.left = 0  # what all its tasks that have not run take
        self.chunk = 0
        self.next_phase()

    def next_phase(self) -> None:
        self.chunk, (self.f, self.f_end), (self.b, self.b_end) = next(self.phases, Phase(self.chunk, _NONE, _NONE))
        # Up to which micro-batch there is a graph for B once there is an F: RF makes it, or F itself did.
        self.graphs = self.b if self.recomputed[self.chunk] else self.b_end


def forward_order(spec: ScheduleSpec) -> list[list[Action]]:
    """Forwards only, for evaluation: ``F(0) | F(1) | … | F(V-1)`` per unit. Nothing to trade: no replay is needed."""
    order = [
        Action(Op.F, chunk, m)
        for start, stop in spec.unit_bounds
        for chunk in range(spec.chunks)
        for m in range(start, stop)
    ]
    return [order[:] for _ in range(spec.stages)]
