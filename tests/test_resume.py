"""A run that was stopped, by whatever means, goes on as if it had not been."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.command import CommandRun
from zeropp_ray.checkpoint.reader import find

pytestmark = pytest.mark.ray

MODEL = ["model.dim=32", "model.heads=2", "model.seq_len=32", "train.eval_every=0", "train.eval_sequences=16"]
SMALL = [*MODEL, "parallel.microbatches=4", "parallel.microbatch_size=1", "train.steps=20", "checkpoint.keep=0"]


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len({line["step"] for line in steps}) == len(steps)
    return {line["step"]: line["loss"] for line in steps}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Twenty steps in one go."""
    run = CommandRun(tmp_path_factory.mktemp("straight"), *SMALL)
    code, output = run.end([], within_s=120)
    assert code == 0, output
    run.forget()
    return run.folder


def stop_with(number: int):
    def stop(run: CommandRun) -> None:
        run.wait_for_step(8)
        tree = run.tree()
        for _ in range(2):  # as GNU timeout and terminals do: to the whole group, and more than once
            os.killpg(run.process.pid, number)
            time.sleep(0.5)
        code, output = run.end(tree, within_s=20)
        assert code == 75, output
        last = output.splitlines()[-1]
        assert last.startswith("error: stopped after step ")
        assert last.endswith(f"which is saved; go on with: zeropp train --resume {run.folder}")
        step = max(losses(run.folder))
        assert 8 <= step < 20
        assert find(run.folder).step == step

    return stop


def kill_all(run: CommandRun) -> None:
    run.wait_for_step(9)
    tree = [*run.tree(), run.process]
    for process in tree:
        os.kill(process.pid, signal.SIGKILL)
    run.process.communicate(timeout=30)
    run.forget()


def test_a_full_disk_keeps_the_last_good_checkpoint_and_the_run_going(command):
    """A member that may write no more than a page is a member with a full disk, until it may again."""
    settings = ["parallel.shards=1", "parallel.microbatches=8", "train.steps=100000", "checkpoint.every_steps=2"]
    run = command(*SMALL, *settings)
    run.wait_for_checkpoint()
    process = psutil.Process(run.members()[1]["pid"])
    limits = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (4096, limits[1]))
    time.sleep(3)  # some saves fail
    good = find(run.folder).step
    failed = max(losses(run.folder))
    process.rlimit(psutil.RLIMIT_FSIZE, limits)
    run.wait_for_step(failed + 8)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end([], within_s=20)
    assert code == 75, output
    assert re.search(r"checkpoint of step \d+ failed: .*File too large.*; the run goes on without it", output)
    assert good < failed < find(run.folder).step
    assert not list((run.folder / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("stop", "change"),
    [
        pytest.param(stop_with(signal.SIGTERM), [], id="SIGTERM"),
        pytest.param(
            kill_all, ["parallel.stages=1", "parallel.shards=1", "parallel.microbatches=8"], id="kill-all-other"
        ),
        pytest.param(kill_all, [], id="kill-all", marks=pytest.mark.full),
        pytest.param(stop_with(signal.SIGINT), [], id="SIGINT", marks=pytest.mark.full),
        pytest.param(
            stop_with(signal.SIGTERM),
            ["parallel.stages=4", "parallel.chunks=1", "parallel.shards=1", "parallel.replicas=2", "parallel.unit=4"],
            id="SIGTERM-other",
            marks=pytest.mark.full,
        ),
    ],
)
def test_stopped_and_resumed(straight, command, stop, change):
    run = command(*SMALL, "checkpoint.every_steps=3")
    stop(run)
    saved = find(run.folder).step
    run.folder.rename(run.folder.with_name("a victim"))
    again = command(*change, resume=True, name="a victim")
    code, output = again.end([], within_s=120)
    assert code == 0, output
    assert find(again.folder).step == 20
    ours, theirs = losses(again.folder), losses(straight)
    assert saved < 20
    if change:
        assert list(ours) == list(theirs)
        assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=1e-5)
    else:
        assert ours == theirs
        assert find(again.folder).digest(state=True) == find(straight).digest(state=True)


@pytest.mark.full
def test_going_on_from_an_older_checkpoint_sets_the_later_ones_aside(straight, command):
    """And what was just saved is never the one that is removed."""
    run = command(*SMALL, "checkpoint.every_steps=5", "checkpoint.keep=2")
    code, output = run.end([], within_s=120)
    assert code == 0, output
    folder = run.folder / "checkpoints"
    older = find(folder / "step-00000015")
    again = command("checkpoint.keep=1", "train.steps=18", resume=True, checkpoint=older.path.name)
    code, output = again.end([], within_s=120)
    assert code == 0, output
    assert sorted(path.name for path in folder.iterdir()) == ["aside-1-step-00000020", "step-00000018"]
    assert find(run.folder).step == 18
    assert max(losses(run.folder)) == 18
