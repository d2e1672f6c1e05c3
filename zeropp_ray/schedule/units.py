"""Scheduling units: how a step's micro-batches are grouped, and what a grouping needs.

ZeroPP's "adaptive scheduling unit" (Tang et al., arXiv 2402.03791): inside a unit a rank runs all micro-batches of a
chunk before it moves on, so parameters are gathered once per chunk and unit, and activations are bounded by the unit.
"""

from __future__ import annotations

from collections.abc import Sequence


def split_units(microbatches: int, unit: int) -> list[int]:
    """Sizes of the ``K = floor(N/U)`` units: near-equal, larger first, none below ``U`` (a short last unit stalls)."""
    count = microbatches // unit
    small, larger = divmod(microbatches, count)
    return [small + 1] * larger + [small] * (count - larger)


def default_unit(microbatches: int, stages: int) -> int:
    """``min(N, 2P)``: room for uneven costs and slow links at moderate memory."""
    return min(microbatches, 2 * stages)


def default_limit(units: Sequence[int], stages: int, chunks: int, recompute: bool = False) -> float:
    """Live activations in whole-stage micro-batches: ``u + P/V``, a unit and the ramp into the next one.

    One stage has no bubble that a ``W`` could fill: the least limit, under which it follows its ``B``, costs nothing.

    With recomputation no unit is kept, and ``2P/V`` last for a gradient's way through the stages and back. By replay
    (``full`` and ``selective``; P 2, 4, 8; V 1 to 4; costs (1,1,1,0), (1,1.3,.7,.25), (1,2,1,.1)) the makespan is then
    within 0.006 of that without a limit for units of 2P, the default, and within 0.026 for units of P and 4P; at P/V it
    is up to 0.15 more.
    """
    if stages == 1:
        return least_limit(units, chunks, recompute)
    return 2 * stages / chunks if recompute else max(units) + stages / chunks


def least_limit_chunks(units: Sequence[int], chunks: int, recompute: bool = False) -> int:
    """The least limit at which a schedule exists, in chunk activations: ``u·(V-1) + 1``, with recomputation 1.

    A rank holds the unit's activations of all chunks but the last when the last one's forwards start, and needs one
    more. Of recomputed chunks it holds the inputs alone.
    """
    return 1 if recompute else max(units) * (chunks - 1) + 1


def least_limit(units: Sequence[int], chunks: int, recompute: bool = False) -> float:
    """:func:`least_limit_chunks` in whole-stage micro-batches: ``(u·(V-1) + 1) / V``."""
    return least_limit_chunks(units, chunks, recompute) / chunks
