"""What a run leaves in writing, also where it learned nothing and where it cannot write."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.record import Record
from zeropp_ray.checkpoint.manifest import Progress
from zeropp_ray.vote import Decision

START = Progress(step=0, commits=0, samples=0, tokens=0)
RESUMED = Progress(step=1, commits=1, samples=1, tokens=1)


def finished(folder: Path, *losses: float, begin: Progress = START, error: str = "") -> dict[str, Any]:
    """The summary of a run with these losses, of which what is no number is skipped."""
    record = Record(folder, begin)
    for step, loss in enumerate(losses, begin.step + 1):
        record.begin_step()
        commit = math.isfinite(loss)
        decision = Decision(step, commit, 1.0, loss, 8, 1.0, "" if commit else f"loss is {loss}")
        list(record.committed(decision, 1e-3, 0.0, 9))
    return record.finish([], SimpleNamespace(saved_step=2, blocked_s=[]), error)  # type: ignore[arg-type]


def test_a_run_that_is_done_says_so(tmp_path: Path) -> None:
    summary = finished(tmp_path, 2.0, math.nan)
    assert (summary["outcome"], summary["error"], summary["skipped_steps"]) == ("done", None, 1)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_without_a_committed_step_has_failed(tmp_path: Path) -> None:
    summary = finished(tmp_path, math.nan, math.inf)
    assert summary["outcome"] == "failed"
    assert summary["error"].startswith("nothing was learned: all 2 steps were skipped, the last because loss is inf; ")
    assert finished(tmp_path, math.nan, error="not saved")["error"] == "not saved"
    assert finished(tmp_path, math.nan, begin=RESUMED)["outcome"] == "done", "one was committed before"


def test_the_summary_of_a_shorter_run_does_not_stay(tmp_path: Path) -> None:
    finished(tmp_path, 2.0)
    Record(tmp_path, RESUMED)
    assert not (tmp_path / "summary.json").exists()


def test_lines_wait_for_a_disk_that_is_full(tmp_path: Path) -> None:
    record = Record(tmp_path, START)
    file, taken = record._metrics, [OSError, 10, OSError]

    def write(data: bytes) -> int:
        if not taken:
            return file.write(data)
        now = taken.pop(0)
        if now is OSError:
            raise OSError
        return file.write(data[:now])

    record._metrics = SimpleNamespace(write=write)  # type: ignore[assignment]
    for step in range(1, 5):
        record.evaluated(step, 0.5 * step)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["validation_loss"] for line in lines] == [0.5, 1.0, 1.5, 2.0]


def test_a_summary_that_cannot_be_written_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any, **__: Any) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    record = Record(tmp_path, RESUMED)
    record.begin_step()
    list(record.committed(Decision(2, True, 1.0, 2.0, 8, 1.0), 1e-3, 0.0, 9))
    monkeypatch.setattr(Path, "write_text", full)
    summary = record.finish([], SimpleNamespace(saved_step=2, blocked_s=[]), "")  # type: ignore[arg-type]
    assert summary["outcome"] == "failed"
    assert summary["error"] == f"{tmp_path}/summary.json could not be written: No space left on device"
    assert not (tmp_path / "summary.json").exists()


def test_a_line_in_pieces_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    finished(tmp_path, 2.0)
    with (tmp_path / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"step": 3, "lo{"step": 9}\n\xff\n{"loss": 1.0}\n[]\n')
    finished(tmp_path, 1.5, begin=RESUMED)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_driver_that_comes_when_all_steps_are_done_only_says_so(tmp_path: Path) -> None:
    finished(tmp_path, 2.0)
    record = Record(tmp_path, RESUMED)
    record.evaluated(1, 1.5)
    again = Record(tmp_path, RESUMED)  # the driver died when all was saved
    summary = again.finish([], SimpleNamespace(saved_step=1, blocked_s=[]), "")  # type: ignore[arg-type]
    assert (summary["outcome"], summary["steps"], summary["validation_loss"]) == ("done", 1, 1.5)
    assert summary["driver_blocked_s_per_step"] is None
