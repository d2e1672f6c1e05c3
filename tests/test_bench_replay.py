"""The benchmark of the replay runs, and would notice a replay that leaves something out."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from bench import replay
from bench.sleep import Size

SMALL = Size(stages=2, chunks=2, microbatches=4)


def test_sleeping_members_take_what_the_replay_says():
    """Nothing is asserted of speed: but a step takes no less than its naps, which the replay has counted."""
    rows = list(replay.sleeping(2, 2.0, SMALL, ("zeropp", "1f1b", "zb-v")))
    assert [row.name for row in rows] == ["zeropp", "1f1b", "zb-v"]
    for row in rows:
        assert len(row.seconds) == 2
        assert row.error > -0.2
    text = replay.table(rows)
    assert all(row.name in text for row in rows)
    halved = dataclasses.replace(rows[0], predicted_s=statistics.median(rows[0].seconds) / 2)
    assert halved.error == pytest.approx(1.0)
    assert "+100.0%" in replay.table([halved])


@pytest.mark.full
@pytest.mark.ray
def test_a_run_says_its_step_time():
    small = ("model.dim=32", "model.heads=2", "model.layers=4", "model.seq_len=32", "parallel.shards=1")
    (row,) = replay.training(small, steps=8)
    assert 0 < row.predicted_s < 60
    assert len(row.seconds) == 4
