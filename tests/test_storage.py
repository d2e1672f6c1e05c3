"""Storage that is full, read-only or slow: the run goes on, says so, and keeps the last good checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from actors import checkpoints as module
from actors.checkpoints import SLOW_S, Checkpoints
from tests.command import CommandRun
from tests.saved import saved_run
from zeropp_ray.checkpoint.manifest import Progress
from zeropp_ray.checkpoint.reader import find
from zeropp_ray.config import RunConfig


@pytest.fixture
def storage(tmp_path: Path):
    """Mounts storage of its own, of 4 MiB, for what a run saves."""
    mounted = []

    def mount(folder: Path) -> Path:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=4m", "zeropp-test", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs the right to mount a tmpfs, as root has it")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.ray
def test_a_full_and_then_read_only_storage(command, storage: Callable[[Path], Path]) -> None:
    model = ["model.dim=32", "model.heads=2", "model.seq_len=32", "parallel.shards=1", "parallel.microbatch_size=1"]
    run = command(*model, "train.steps=100000", "train.eval_every=0", "checkpoint.every_steps=5", "checkpoint.keep=2")
    run.wait_for(run.folder / "members.json")
    saved = storage(run.folder / "checkpoints")
    run.wait_for_checkpoint()
    ballast = saved / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=64k"], capture_output=True)  # until it is full
    good = find(run.folder).step
    wait_for_steps(run, 20)
    assert find(run.folder).step == good
    ballast.unlink()
    later = wait_for_newer(run, good)
    subprocess.run(["mount", "-o", "remount,ro", str(saved)], check=True)
    later = find(run.folder).step
    wait_for_steps(run, 20)
    assert find(run.folder).step == later
    subprocess.run(["mount", "-o", "remount,rw", str(saved)], check=True)
    wait_for_newer(run, later)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end([], within_s=30)
    assert code == 75, output
    for cause in ("No space left on device", "Read-only file system"):
        assert re.search(rf"checkpoint of step \d+ failed: .*{cause}.*; the run goes on without it", output)


def wait_for_steps(run: CommandRun, more: int) -> None:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    run.wait_for_step(len(lines) + more)


def wait_for_newer(run: CommandRun, step: int) -> int:
    for _ in range(100):
        wait_for_steps(run, 5)
        if (newest := find(run.folder).step) > step:
            return newest
    raise AssertionError(f"no checkpoint after step {step}")


def test_a_slow_save_is_told_once_and_the_next_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.from_dict({"model": {"dim": 32, "heads": 2, "seq_len": 32}, "checkpoint": {"every_steps": 5}})
    saved_run(tmp_path / "run", config)
    written = []
    answers = types.SimpleNamespace(wait=lambda files, **_: ([], [] if written else files), get=lambda files: files)
    clock = types.SimpleNamespace(now=0.0, perf_counter=lambda: 0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(module, "ray", answers)
    monkeypatch.setattr(module, "time", clock)
    ours = Checkpoints(config, tmp_path / "run", [], {}, saved=10)
    assert ours.due(15)
    assert ours.begin(Progress(15, 15, 15, 15), lambda *_: [[]]) == []
    told = []
    for step in range(16, 40):
        clock.now += SLOW_S / 8
        assert not ours.due(step)
        told += ours.poll()
    assert [event["text"] for event in told] == [
        "checkpoint of step 15 is still being written after 10 s: the next one waits"
    ]
    written.append(True)
    assert [event["kind"] for event in ours.poll()] == ["checkpoint"]
    assert ours.due(40)
    assert json.loads((tmp_path / "run" / "checkpoints" / "step-00000015" / "manifest.json").read_text())
