"""The policies: ZeroPP, whose order is made from the costs (order.py), and known orders that it is compared with.

A known order is fixed: what a rank runs follows from the numbers of the spec alone. Residency, communication, check,
replay and engine are the same for all, so parameters are gathered as ZeRO-3 must under that order, with one chunk
resident (two with prefetch). Where the backward is not split, each ``W`` follows its ``B``; what ``B`` gives goes out
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from zeropp_ray.schedule.actions import Action, Op, Ranks

if TYPE_CHECKING:
    from zeropp_ray.schedule.spec import ScheduleSpec

Order = Callable[["ScheduleSpec", int], Iterable[Action]]
"""``F``, ``B`` and ``W`` of one rank."""


class Policy(NamedTuple):
    """What a policy decides, and what it leaves to the configuration."""

    title: str
    order: Order | None = None  # None: that of order.py
    chunks: int = 0  # the V that it is made for; 0: any
    least_chunks: int = 1
    unit: str = "2P"  # the default size of a unit; "N": the only one
    shared: bool = True  # whether F and B blocks of one chunk, one after the other, share a residency
    placement: str = "looped"
    open_buffers: bool = False  # W of several chunks alternate, so that gradients are reduced once a step


def breadth_first(spec: ScheduleSpec, rank: int) -> Iterator[Action]:
    """All micro-batches of a chunk before the next chunk: GPipe (Huang et al., arXiv 1811.06965), and with several
    chunks a stage looped breadth-first (Lamy-Poirier, arXiv 2211.05953).
    """
    for v in range(spec.chunks):
        yield from (Action(Op.F, v, m) for m in range(spec.microbatches))
    for v in reversed(range(spec.chunks)):
        for m in range(spec.microbatches):
            yield Action(Op.B, v, m)
            yield Action(Op.W, v, m)


def _one_f_one_b(ramp: int, split: bool) -> Order:
    """After a warm-up a backward follows each forward, so that few activations are live.

    Narayanan et al., arXiv 2104.04473: a unit of micro-batches goes through one chunk, then through the next. The
    warm-up of a rank is a unit in each chunk but the last, and ``ramp`` forwards for each rank behind it. ``split``: on
    rank ``p`` ``W`` run ``p`` backwards late, and fill the gaps at the end (ZB-H1; Qi et al., arXiv 2401.10241).
    """

    def order(spec: ScheduleSpec, rank: int) -> Iterator[Action]:
        chunks = range(spec.chunks)
        forwards = [(v, m) for unit in spec.unit_bounds for v in chunks for m in range(*unit)]
        backwards = [(v, m) for unit in spec.unit_bounds for v in reversed(chunks) for m in range(*unit)]
        ahead = (spec.chunks - 1) * max(spec.units) + ramp * (spec.stages - 1 - rank)
        late = rank if split else 0
        yield from (Action(Op.F, *task) for task in forwards[:ahead])
        for k, task in enumerate(backwards):
            yield from (Action(Op.F, *following) for following in forwards[ahead + k : ahead + k + 1])
            yield Action(Op.B, *task)
            if k >= late:
                yield Action(Op.W, *backwards[k - late])
        yield from (Action(Op.W, *task) for task in backwards[max(len(backwards) - late, 0) :])

    return order


def zb_v(spec: ScheduleSpec, rank: int) -> Iterator[Action]:
    """ZB-V (Qi et al., arXiv 2405.15362): two chunks in a V, so that the rank that starts a micro-batch ends it too,
    and its backward comes back without a detour. All ranks hold ``2P`` chunk activations, as many as 1F1B's first.

    The order is that of ``2P-1`` micro-batches or more; of fewer, those that are not there are left out.
    """
    behind, enough = spec.stages - rank, max(spec.microbatches, 2 * spec.stages - 1)
    count = dict.fromkeys([(op, v) for op in (Op.F, Op.B, Op.W) for v in (0, 1)], 0)

    def following(*tasks: tuple[Op, int]) -> Iterator[Action]:
        for op, v in tasks:
            if count[op, v] < spec.microbatches:
                yield Action(op, v, count[op, v])
            count[op, v] += 1

    down, up = (Op.F, 0), (Op.F, 1)
    for _ in range(2 * behind - 1):
        yield from following(down)
    for _ in range(rank):
        yield from following(up, down)
    for _ in range(behind):
        yield from following(up, (Op.B, 1), (Op.W, 1))
    while count[up] < enough:
        yield from following(*[down] * (count[down] < enough), (Op.B, 0), (Op.W, 0), up, (Op.B, 1), (Op.W, 1))
    for _ in range(rank):
        yield from following((Op.B, 0), (Op.B, 1))
    for _ in range(behind):
        yield from following((Op.B, 0), (Op.W, 0))
    for v in (1, 0):
        while count[Op.W, v] < enough:
            yield from following((Op.W, v))


POLICIES = {
    "zeropp": Policy("ZeroPP"),
    "zeropp-published": Policy("ZeroPP as published", shared=False),
    "zeropp-one-unit": Policy("ZeroPP in one unit", unit="N"),
    "gpipe": Policy("GPipe", breadth_first, chunks=1, unit="N"),
    "1f1b": Policy("1F1B", _one_f_one_b(ramp=1, split=False), chunks=1, unit="N"),
    "interleaved": Policy("Interleaved 1F1B", _one_f_one_b(ramp=2, split=False), least_chunks=2, unit="P"),
    "bfs": Policy("Looped breadth-first", breadth_first, unit="N"),
    "zb-h1": Policy("ZB-H1", _one_f_one_b(ramp=1, split=True), chunks=1, unit="N"),
    "interleaved-zb": Policy("Interleaved ZB-H1", _one_f_one_b(ramp=1, split=True), least_chunks=2, unit="P"),
    "zb-v": Policy("ZB-V", zb_v, chunks=2, unit="N", placement="v", open_buffers=True),
}
"""By their name in ``parallel.policy``. ``zeropp-published`` gathers a chunk for a unit's forwards and again for its
backwards, ``2·V·K`` times in a step, as in Tang et al., arXiv 2402.03791. ``zeropp-one-unit`` gathers least.
"""


def fixed_order(spec: ScheduleSpec) -> list[list[Action]]:
    """The tasks of every rank under a policy whose order is fixed; ``RF`` of a recomputed chunk just ahead of ``B``."""
    order = POLICIES[spec.policy].order
    assert order is not None, f"{spec.policy} takes its order from the costs"
    return [list(_with_recomputation(order(spec, p), spec.recomputed)) for p in range(spec.stages)]


def _with_recomputation(order: Iterable[Action], recomputed: tuple[bool, ...]) -> Iterator[Action]:
    for action in order:
        if action.op is Op.B and recomputed[action.chunk]:
            yield Action(Op.RF, action.chunk, action.microbatch)
        yield action


def most_live(ranks: Ranks, recomputed: tuple[bool, ...]) -> int:
    """Most chunk activations that a rank holds: each from its ``F``, or ``RF``, to its ``W``."""

    def change(action: Action) -> int:
        return {Op.F: not recomputed[action.chunk], Op.RF: 1, Op.B: 0, Op.W: -1}[action.op]

    return max(max(accumulate(map(change, actions))) for actions in ranks)
