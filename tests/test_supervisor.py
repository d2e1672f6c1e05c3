"""The driver of a run dies: another one goes on from disk. Decisions without Ray; one run with it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors import locks
from actors import supervisor as module
from actors.events import EVENTS
from actors.folder import RunFolder
from actors.locks import DRIVER, holder, only_driver, only_job
from actors.run import _follow
from actors.stopping import StopSignals
from actors.supervisor import EVIDENCE, Supervisor
from tests.command import CommandRun
from tests.saved import saved_run
from zeropp_ray.checkpoint.reader import find
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import NoProgress, Stopped, ZeroppError


def config(**recovery: Any) -> RunConfig:
    return RunConfig.from_dict({"model": {"dim": 32, "heads": 2, "seq_len": 32}, "recovery": recovery})


class Deaths:
    """A run whose drivers die, without drivers: what one would leave is written here."""

    def __init__(self, folder: Path, *, resume: Path | None = None, begun: int = 0, **recovery: Any) -> None:
        self.run, self.told = folder / "run", []
        scratch = folder / "scratch"
        scratch.mkdir()
        self.folder = RunFolder(self.run, scratch, "", resume)
        self.supervisor = Supervisor(config(**recovery), self.folder, begun, self.told.append)

    def reach(self, step: int) -> None:
        """A driver begins with its steps, and dies in the one after ``step``."""
        self.supervisor.started()
        lines = [{"step": s, "loss": 1.0} for s in range(1, step + 1)]
        (self.run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def goes_on_from(self) -> str | None:
        self.supervisor.died(EVIDENCE)
        resume = self.supervisor.folder.resume
        return None if resume is None else resume.name

    def texts(self) -> str:
        return "\n".join(event["text"] for event in self.told if event["kind"] == "log")


@pytest.fixture
def deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Supervisor, "_clear", lambda self: None)  # of what is in a cluster
    monkeypatch.setattr(module, "_cluster_answers", lambda: True)
    return lambda **more: Deaths(tmp_path, **more)


def test_the_next_driver_goes_on_from_the_newest_good_checkpoint(deaths) -> None:
    ours = deaths()
    for step in (5, 10, 15):
        saved_run(ours.run, config(), step=step)
    ours.reach(17)
    (ours.run / DRIVER).write_text("driver (process 7 on here)")
    torn = ours.run / "checkpoints" / "step-00000015" / "weights-000-000.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    altered = ours.run / "checkpoints" / "step-00000010" / "weights-000-000.safetensors"
    altered.write_bytes(altered.read_bytes()[:-1] + b"?")
    assert ours.goes_on_from() == "step-00000005"
    warnings = [line for line in ours.texts().splitlines() if line.startswith("warning: ")]
    assert [str(path.parent) in line for path, line in zip((torn, altered), warnings, strict=True)] == [True, True]
    assert "died in step 18" in ours.texts()
    assert ours.texts().endswith("another one goes on from the checkpoint of step 5")
    assert not (ours.run / EVENTS).exists()  # it is not there yet
    ours.supervisor.started()
    event = json.loads((ours.run / EVENTS).read_text())
    assert event == ours.told[-1]
    expected = {"kind": "recovery", "cause": "driver", "member": "driver (process 7 on here)", "at": "step 18"}
    expected |= {"step": 18, "action": "restart", "from_step": 5, "replayed": 12}
    assert {key: event[key] for key in expected} == expected
    assert event["resumed_s"] >= 0


def test_a_run_without_a_checkpoint_begins_again(deaths) -> None:
    ours = deaths()
    saved_run(ours.run, config())
    (ours.run / "checkpoints" / "step-00000010" / "manifest.json").unlink()
    ours.reach(12)
    assert ours.goes_on_from() is None
    assert "from the start: there is no good checkpoint" in ours.texts()


def test_a_driver_that_dies_before_the_first_step_ends_the_run(deaths) -> None:
    ours = deaths()
    saved_run(ours.run, config(), step=5)  # may be one that the user gives up, and is not set aside yet
    with pytest.raises(ZeroppError, match=r"the driver of the run died in its start: its process"):
        ours.goes_on_from()


def test_budgets(deaths) -> None:
    ours = deaths(max_drivers=2)
    saved_run(ours.run, config(), step=5)
    for reached in (6, 7):
        ours.reach(reached)
        ours.goes_on_from()
    ours.reach(8)
    with pytest.raises(ZeroppError, match=r"the driver of the run died in step 9.*recovery\.max_drivers = 2") as caught:
        ours.goes_on_from()
    assert caught.value.exit_code == 1


def test_deaths_without_a_new_step_end_the_run(deaths) -> None:
    ours = deaths(max_drivers=100, max_stuck=2)
    saved_run(ours.run, config(), step=5)
    for reached in (6, 6, 7, 5):
        ours.reach(reached)
        ours.goes_on_from()
    ours.reach(7)
    with pytest.raises(NoProgress, match="no new step over 2 recoveries in a row") as caught:
        ours.goes_on_from()
    assert caught.value.exit_code == 70


def test_a_run_that_was_asked_to_stop_is_not_begun_again(deaths) -> None:
    ours = deaths()
    saved_run(ours.run, config(), step=5)
    ours.reach(8)
    ours.folder.stop.touch()
    with pytest.raises(Stopped, match=f"stopped; .*checkpoint is of step 5, go on with: zeropp .* {ours.run}$"):
        ours.goes_on_from()


def test_a_stop_while_a_recovery_waits_for_room_leaves_a_run_to_go_on_with(deaths, monkeypatch) -> None:
    monkeypatch.setattr("ray.get", lambda batch: batch)
    ours = deaths()
    last = {"kind": "failed", "error": "it waited for room: 1 member", "trace": "", "exit_code": 75, "early": False}
    with pytest.raises(ZeroppError, match="room: 1 member, before there was a checkpoint") as early:
        _follow([[last]], ours.folder, ours.told.append, StopSignals(), ours.supervisor)
    assert early.value.exit_code == 1
    saved_run(ours.run, config(), step=5)
    with pytest.raises(Stopped, match="it waited for room: 1 member; the newest checkpoint is of step 5, go on with"):
        _follow([[last]], ours.folder, ours.told.append, StopSignals(), ours.supervisor)


def test_a_cluster_that_is_gone_gets_no_other_driver(deaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cluster_answers", lambda: False)
    ours = deaths()
    saved_run(ours.run, config(), step=5)
    ours.reach(8)
    with pytest.raises(ZeroppError, match="the Ray cluster that it ran on does not answer any more"):
        ours.goes_on_from()


def test_a_second_driver_is_refused_while_the_first_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LATE_S", 0.2)
    first = "import sys; from pathlib import Path; from actors.locks import only_driver\n"
    first += "with only_driver(Path(sys.argv[1]), sys.argv[2]): print(flush=True); sys.stdin.read()"
    with only_job(tmp_path):
        job = holder(tmp_path)
        command = [sys.executable, "-c", first, str(tmp_path), job]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        named = rf"is trained by another driver \(driver \(process {process.pid} on "
        with pytest.raises(ZeroppError, match=named), only_driver(tmp_path, job):
            pass
        process.kill()
        process.communicate()
        with only_driver(tmp_path, job):
            pass


def driver_of(run: CommandRun) -> psutil.Process:
    (driver,) = [process for process in run.tree() if "RunDriver" in " ".join(process.cmdline())]
    return driver


@pytest.mark.ray
def test_a_run_whose_driver_dies_ends_as_if_it_had_not(command) -> None:
    """Once in its steps, and once more while the next one starts."""
    settings = ["model.dim=32", "model.heads=2", "model.seq_len=32", "parallel.microbatch_size=1", "train.steps=60"]
    settings += ["parallel.shards=1", "train.eval_every=0", "train.eval_sequences=16", "checkpoint.every_steps=10"]
    twin = command(*settings, name="twin")
    assert twin.end([], within_s=120)[0] == 0
    run = command(*settings)
    run.wait_for_step(12)
    killed, members = driver_of(run), [psutil.Process(member["pid"]) for member in run.members()]
    killed.kill()
    while f'"pid": {members[0].pid},' in (run.folder / "members.json").read_text():
        time.sleep(0.05)
    driver_of(run).kill()
    code, output = run.end(members, within_s=120)
    assert code == 0, output
    assert output.count("another one goes on from") == 2
    assert find(run.folder).digest(state=True) == find(twin.folder).digest(state=True)
    assert losses(run) == losses(twin)
    events = [json.loads(line) for line in (run.folder / EVENTS).read_text().splitlines()]
    assert [event["kind"] for event in events if event["kind"] in ("recovery", "end")] == ["recovery", "end"]
    (first,), end = [event for event in events if event["kind"] == "recovery"], events[-1]
    assert first["member"].startswith(f"driver (process {killed.pid} on ")
    assert (first["at"], first["action"]) == (f"step {first['step']}", "restart")
    assert first["replayed"] == first["step"] - 1 - first["from_step"]
    assert (end["kind"], end["outcome"], end["exit_code"]) == ("end", "done", 0)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["recoveries"], summary["replayed_steps"]) == ({"driver": 1}, first["replayed"])


def losses(run: CommandRun) -> dict[int, float]:
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, 61))
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
