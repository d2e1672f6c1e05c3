"""Cutting by cost: against brute force, and what a chunk then costs."""

from __future__ import annotations

from functools import partial
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp_ray.errors import ConfigError
from zeropp_ray.models import chunk_costs, cut, cut_model, describe
from zeropp_ray.models.llama import Llama


def score(costs: list[int], embed: int, head: int, ranges: list[range]) -> tuple[int, int]:
    sums = [sum(costs[i] for i in r) for r in ranges]
    sums[0] += embed
    sums[-1] += head
    return max(sums), sum(x * x for x in sums)


@given(st.data())
def test_no_other_cut_is_better(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    embed, head = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 20))
    chunks = data.draw(st.integers(1, len(costs)))
    ranges = cut(costs, embed, head, chunks)
    assert [i for r in ranges for i in r] == list(range(len(costs)))
    assert len(ranges) == chunks
    assert all(ranges)
    every = (
        [range(a, b) for a, b in pairwise((0, *inner, len(costs)))]
        for inner in combinations(range(1, len(costs)), chunks - 1)
    )
    assert score(costs, embed, head, ranges) == min(score(costs, embed, head, other) for other in every)


def test_a_heavy_head_gets_fewer_blocks() -> None:
    assert [len(r) for r in cut([1.0] * 8, 0, 0, 4)] == [2, 2, 2, 2]
    assert [len(r) for r in cut([1.0] * 8, 0, 2, 4)] == [2, 2, 3, 1]


def test_fewer_blocks_than_chunks_is_refused_with_what_works() -> None:
    with pytest.raises(
        ConfigError, match=r"stages x parallel.chunks = 8.*has 6.*stages x chunks <= 6.*at least 8"
    ) as caught:
        cut([1.0] * 6, 0, 0, 8)
    assert "\n" not in str(caught.value)


def test_chunk_costs_are_in_mean_forwards_and_sum_up() -> None:
    description = describe(partial(Llama, layers=5, dim=32, heads=2, vocab_size=64), 16)
    ranges = cut_model(description, 3)
    f, b, w = chunk_costs(description, ranges)
    assert sum(f) / 3 == pytest.approx(1)
    assert [x + y for x, y in zip(b, w, strict=True)] == pytest.approx([2 * x for x in f])
    flops = [sum(part.flops for part in description.parts_of(ranges, c)) for c in range(3)]
    assert f == pytest.approx([3 * x / sum(flops) for x in flops])
    assert b[0] / w[0] > 1  # attention has no weights: more to do in B than in W
