"""The benchmarks of sleeping layers and of growth run, and notice a contestant that cheats."""

from __future__ import annotations

import json
import time

import pytest

from bench import growth, sleep
from bench.sleeping import SentTimes

SMALL = sleep.Size(stages=2, chunks=2, microbatches=4)
CASE = ((1.0, 1.3, 0.7), 0.5)


def test_all_contestants_sleep_alike_and_reach_one_loss(tmp_path):
    rows = sleep.run(2, False, tmp_path, unit_ms=1.0, size=SMALL, cases=[CASE])
    rows = {row["name"]: row for row in json.loads(json.dumps(rows))}
    assert rows.keys() == {*sleep.OURS, *sleep.THEIRS}
    assert rows["ours"]["gathers"] == 3  # (2V-2)·K + 1 in one unit of 4 micro-batches
    assert rows["ours, memory P"]["gathers"] == 5
    assert rows["ours"]["to_ours"] == [1, 1, 1]
    for name, row in rows.items():
        assert row["ratio_to_bound"] > 1
        assert len(row["seconds"]) == 2
        assert row["live_activations"] <= 4
        assert name in (tmp_path / "sleep.md").read_text()


def test_a_contestant_that_does_other_work_is_noticed(monkeypatch):
    monkeypatch.setattr(sleep, "OURS", {"ours": 2})
    monkeypatch.setattr(sleep, "THEIRS", {"Interleaved1F1B": "ScheduleInterleaved1F1B"})
    with sleep._race(SMALL, 1e-4) as race:
        race.rows(*CASE, rounds=1)
        race._decisions["ours"] = None  # the last update is lost
        with pytest.raises(RuntimeError, match="different losses"):
            race._round(1)


def test_a_message_is_usable_only_after_the_delay():
    sent = SentTimes([0.0] * 4)
    sent.delay = 0.05
    start = time.monotonic()
    sent.stamp(2)
    sent.wait(1)  # sent long ago
    assert time.monotonic() < start + 0.05
    sent.wait(2)
    assert time.monotonic() >= start + 0.05


def test_growth_of_a_step_and_of_a_program():
    (row,) = growth.steps("microbatches", [4], rounds=1)
    assert row.median > 0
    assert row.more["instructions"] < 100  # the 8 micro-batches of the base have 158
    (row,) = growth.compiling([(4, 16)], rounds=1)
    assert row.more["instructions"] > 1000  # one chunk a stage has half as many
    assert "| compile | stages" in growth.table([row])


@pytest.mark.ray
def test_the_control_plane_over_actors_that_only_vote():
    (row,) = growth.control([2], rounds=3)
    assert (row.at, len(row.values)) == (2, 3)


@pytest.mark.full
@pytest.mark.ray
def test_the_start_of_a_run_taken_apart():
    parts = {row.x: row.median for row in growth.starting(1)}
    assert list(parts)[-3:] == ["first step", "a later step", "all of it"]
    assert parts["all of it"] > parts["first step"] > 0
