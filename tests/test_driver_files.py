"""What a driver keeps and counts in a run's folder when the run goes on. No Ray: the members' answers are made up."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from actors import checkpoints as module
from actors.checkpoints import Checkpoints
from actors.failure import MemberFault
from actors.record import Record
from tests.saved import saved_run
from zeropp_ray.checkpoint.manifest import Progress
from zeropp_ray.checkpoint.reader import latest
from zeropp_ray.config import RunConfig
from zeropp_ray.vote import Decision, Vote, decide

CONFIG = RunConfig.from_dict({"model": {"dim": 32, "heads": 2, "seq_len": 32}, "checkpoint": {"keep": 2}})


def progress(step: int, commits: int) -> Progress:
    return Progress(step=step, commits=commits, samples=step * 8, tokens=step * 100)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_only_a_run_s_own_checkpoints_are_counted_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = types.SimpleNamespace(wait=lambda files, **_: (files, []), get=lambda files: files)
    monkeypatch.setattr(module, "ray", answered)
    run, other = tmp_path / "run", tmp_path / "other"
    for step in (2, 4, 9):
        saved_run(run, CONFIG, step=step)
    for step in (3, 8):
        saved_run(other, CONFIG, step=step)
        (other / "checkpoints" / f"step-{step:08d}").rename(run / "checkpoints" / f"step-{step:08d}")
    damaged = run / "checkpoints" / "step-00000001"
    damaged.mkdir()

    kept = Checkpoints(CONFIG, run, [], {}, saved=4)
    stay = ["aside-1-step-00000008", "aside-1-step-00000009", damaged.name, "step-00000003"]
    assert names(run) == sorted([*stay, "step-00000002", "step-00000004"])
    for step in (5, 6):
        assert kept.begin(progress(step, step), lambda *_: [[]]) == []
        assert [event["kind"] for event in kept.poll(lambda files: None)] == ["checkpoint"]
    assert names(run) == sorted([*stay, "step-00000005", "step-00000006"])
    assert latest(run).manifest.progress == progress(6, 6)


def test_skipped_steps_are_counted_over_the_whole_run(tmp_path: Path) -> None:
    def train(record: Record, steps: range, skipped: set[int]) -> None:
        for step in steps:
            record.begin_step()
            list(record.committed(_decision(step, skipped), 1e-3, 0.0, 8))

    train(Record(tmp_path, progress(0, 0)), range(1, 7), {2, 3, 6})
    resumed = Record(tmp_path, progress(4, 2))  # the checkpoint after step 4; steps 5 and 6 are taken again
    train(resumed, range(5, 9), {7})
    saved = types.SimpleNamespace(saved_step=8, blocked_s=[])
    summary = resumed.finish([], saved, "")  # type: ignore[arg-type]
    assert (summary["steps"], summary["skipped_steps"]) == (8, 3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["skipped"]] == [2, 3, 7]


def _decision(step: int, skipped: set[int]) -> Decision:
    return decide(step, [Vote(loss_sum=5.0, tokens=0 if step in skipped else 10, squared_norm=1.0, seconds=0.0)], 1.0)


def test_a_save_that_a_fault_cut_off_is_due_again(tmp_path: Path) -> None:
    def lost(*_: object) -> list[object]:
        raise MemberFault("a member died", "death")

    run = tmp_path / "run"
    saved_run(run, CONFIG, step=4)
    every = RunConfig.from_dict({"checkpoint": {"every_steps": 3}})
    ours = Checkpoints(every, run, [], {}, saved=4)
    assert ours.due(6)
    with pytest.raises(MemberFault):
        ours.begin(progress(6, 6), lost)
    ours.give_up()
    assert ours.due(6)
    assert names(run) == ["step-00000004"], "and nothing is left of it"
