"""Cut a model's blocks into consecutive chunks by cost, not by count.

The embedding goes with the first chunk and the head with the last, so these get fewer blocks where that balances them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from zeropp_ray.errors import ConfigError
from zeropp_ray.models.describe import ModelDescription


def cut(block_costs: Sequence[float], embed_cost: float, head_cost: float, chunks: int) -> list[range]:
    """The blocks of each of `chunks` chunks, at least one each, so that the largest chunk cost is the least possible.

    Of the cuts that reach it, the most even one (least sum of squares). Costs >= 0, in any one unit.
    `ConfigError` if there are fewer blocks than chunks.
    """
    n = len(block_costs)
    if n < chunks:
        raise ConfigError(
            f"parallel.stages x parallel.chunks = {chunks}: each chunk needs a block and the model has {n}; "
            f"use stages x chunks <= {n}, or a model of at least {chunks} blocks"
        )
    upto = [float(total) for total in accumulate(block_costs, initial=0)]  # cost of the first i blocks
    upto = [total + embed_cost * (i > 0) + head_cost * (i == n) for i, total in enumerate(upto)]
    largest, _ = _best(upto, chunks, max)
    limit = largest * (1 + 1e-12)
    _, ranges = _best(upto, chunks, lambda squares, cost: squares + cost * cost if cost <= limit else inf)
    return ranges


def _best(upto: list[float], chunks: int, add: Callable[[float, float], float]) -> tuple[float, list[range]]:
    """The cut with the least score, by dynamic programming. `add(score so far, cost of the next chunk)` grows."""
    scores = [0.0] + [inf] * (len(upto) - 1)  # of the first j blocks, cut in as many chunks as were placed so far
    starts = []  # for each chunk: where it starts if it ends before block j
    for _ in range(chunks):
        options = [
            min(((add(scores[i], upto[j] - upto[i]), i) for i in range(j)), default=(inf, 0)) for j in range(len(upto))
        ]
        scores = [score for score, _ in options]
        starts.append([start for _, start in options])
    ranges, end = [], len(upto) - 1
    for start in reversed(starts):
        ranges.append(range(start[end], end))
        end = start[end]
    return scores[-1], ranges[::-1]


def cut_model(description: ModelDescription, chunks: int) -> list[range]:
    """`cut` by the FLOPs of the parts."""
    embed, *blocks, head = (part.flops for part in description.parts)
    return cut(blocks, embed, head, chunks)


def chunk_costs(
    description: ModelDescription, ranges: Sequence[range]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """(F, B, W) of every model chunk by FLOPs, in units in which the mean F is 1."""
    costs = [[part.cost for part in description.parts_of(ranges, c)] for c in range(len(ranges))]
    f, b, w = ([float(sum(cost[task] for cost in parts)) for parts in costs] for task in range(3))
    unit = sum(f) / len(f) or 1.0
    return tuple(x / unit for x in f), tuple(x / unit for x in b), tuple(x / unit for x in w)
