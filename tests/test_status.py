"""``zeropp status``: what is read from a run's folder, whatever became of the run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from actors.events import append_end, append_event
from actors.locks import JOB, only_job
from jobs.cli import zeropp
from jobs.status import read_status

STEP = {"loss": 2.5, "tokens_per_s": 1000.0, "seconds": 0.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that was killed after step 40 of 100."""
    run = tmp_path / "runs" / "first"
    (run / "checkpoints" / "step-00000030").mkdir(parents=True)
    (run / "config.toml").write_text("[train]\nsteps = 100\n")
    lines = [{"step": step, **STEP} for step in range(1, 41)]
    lines.insert(30, {"step": 30, "validation_loss": 2.75})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 41, "lo')
    append_event(run, {"kind": "begin", "job": "", "step": 0, "time": 0.0})
    append_event(run, {"kind": "recovery", "cause": "death", "replayed": 3})
    append_event(run, {"kind": "recovery", "cause": "death", "replayed": 0})
    member = {"stage": 1, "shard": 0, "replica": 0, "pid": 77, "host": "10.0.0.1"}
    (run / "members.json").write_text(json.dumps([member]))
    held_by(run, gone())
    return run


def held_by(run: Path, pid: int, host: str = "", since: str = "") -> None:
    since = since or str(datetime.now() + timedelta(minutes=1))
    (run / JOB).write_text(f"process {pid} on {host or socket.gethostname()} since {since}")


def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_that_was_killed(folder: Path) -> None:
    found = read_status(folder)
    wanted: dict[str, Any] = {
        "state": "killed",
        "step": 40,
        "steps": 100,
        "loss": 2.5,
        "validation_loss": 2.75,
        "tokens_per_s": 1000.0,
        "recoveries": {"death": 2},
        "replayed_steps": 3,
        "checkpoint": "step-00000030",
    }
    assert {name: found[name] for name in wanted} == wanted


def test_a_run_that_goes_on(folder: Path) -> None:
    with only_job(folder):
        found = read_status(folder)
    assert found["state"] == "running"
    assert f"process {os.getpid()} " in found["why"]


def test_another_process_of_the_same_number_is_not_the_run(folder: Path) -> None:
    held_by(folder, os.getpid(), since=str(datetime.now() - timedelta(days=400)))
    assert read_status(folder)["state"] == "killed"


def test_a_run_on_another_machine_is_believed(folder: Path) -> None:
    held_by(folder, 1, host="elsewhere")
    found = read_status(folder)
    assert (found["state"], found["why"][:13]) == ("running", "by its record")


def test_a_run_that_ended_says_how(folder: Path) -> None:
    append_end(folder, "stopped", 75, "stopped after step 40, which is saved")
    found = read_status(folder)
    assert (found["state"], found["why"]) == ("stopped", "stopped after step 40, which is saved")


def test_a_run_that_is_resumed_starts(folder: Path) -> None:
    append_end(folder, "stopped", 75)
    with only_job(folder):
        assert read_status(folder)["state"] == "starting"


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    result = CliRunner().invoke(zeropp, ["status", "first"])
    assert result.exit_code == 0
    assert "step        40 of 100" in result.output
    assert "recoveries  2 death; 3 steps taken again" in result.output
    assert "next        zeropp train --resume runs/first" in result.output
    assert json.loads(CliRunner().invoke(zeropp, ["status", "first", "--json"]).output)["step"] == 40
    result = CliRunner().invoke(zeropp, ["status", "second"])
    assert (result.exit_code, result.output.startswith("error: second: neither")) == (2, True)


def test_a_run_without_a_step(tmp_path: Path) -> None:
    with only_job(tmp_path):
        found = read_status(tmp_path)
    assert (found["state"], found["step"], found["loss"]) == ("starting", 0, None)
