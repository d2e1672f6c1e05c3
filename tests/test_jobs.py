"""Runs as jobs of a Ray cluster that a person started: from ``zeropp submit`` to ``summary.json``, and other ends."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.user_cluster import UserCluster
from zeropp_ray.checkpoint.reader import find

pytest.importorskip("aiohttp_cors", reason="ray[default] is not installed; make test-all does")
pytestmark = [pytest.mark.full, pytest.mark.ray]

RUN = """
[model]
layers = 4
dim = 32
heads = 2
seq_len = 32

[parallel]
stages = 2
chunks = 1
shards = 1
microbatches = 4
microbatch_size = 1

[train]
steps = 20
eval_every = 0
eval_sequences = 16
"""
# A model of one's own, which notes the environment of each process that imports it.
MODEL = """
import json, os
from pathlib import Path
from torch import nn

Path("{folder}", f"{{os.getpid()}}.json").write_text(json.dumps(dict(os.environ)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 256)
"""
LONG = ("--set", "train.steps=100000")


@pytest.fixture(scope="module")
def cluster() -> Iterator[UserCluster]:
    cluster = UserCluster()
    yield cluster
    cluster.end()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder that a person works in."""
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def wait_for_step(run: Path, step: int) -> None:
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= step):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_from_submit_to_summary(cluster: UserCluster, here: Path) -> None:
    done = cluster.run("zeropp", "submit", "run.toml", "--name", "first", "--follow", cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^sends \d+ files, .*iB", done.stdout)
    assert re.search(r"^step 1/20  loss \d", done.stdout, re.MULTILINE)
    assert re.search(r"^step 20/20  loss \d", done.stdout, re.MULTILINE)
    assert "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[-2] == "exit code 0: done"
    assert re.fullmatch(r"job first-\w+: done", lines[-1])
    assert (summary(here / "runs" / "first")["outcome"], summary(here / "runs" / "first")["steps"]) == ("done", 20)
    listed = json.loads(cluster.run("zeropp", "jobs", "--json", cwd=here).stdout)[0]
    assert (listed["run"], listed["state"], listed["step"]) == ("first", "succeeded", "20/20")
    again = cluster.run("zeropp", "submit", "run.toml", "--name", "first", "--follow", cwd=here)
    assert again.returncode == 2
    assert "is not empty; choose another with --name" in again.stdout


def test_own_code_and_chosen_variables_reach_the_members(cluster: UserCluster, here: Path, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    noted.mkdir()
    (here / "mymodel.py").write_text(MODEL.format(folder=noted))
    options = (
        "--set",
        "model.factory=mymodel:Model",
        "--name",
        "own",
        "--env",
        "CHOSEN",
        "--env",
        "GIVEN=x y",
        "--follow",
    )
    shell = {"CHOSEN": "yes", "OF_THIS_SHELL": "secret"}
    done = cluster.run("zeropp", "submit", "run.toml", *options, cwd=here, **shell)
    assert done.returncode == 0, done.stdout + done.stderr
    for member in json.loads((here / "runs" / "own" / "members.json").read_text()):
        environment = json.loads((noted / f"{member['pid']}.json").read_text())
        assert (environment["CHOSEN"], environment["GIVEN"]) == ("yes", "x y")
        assert "OF_THIS_SHELL" not in environment


def test_a_run_that_fails(cluster: UserCluster, here: Path) -> None:
    options = ("--follow", "--set", "recovery.enabled=false", *LONG)
    submitted = cluster.start("zeropp", "submit", "run.toml", "--name", "bad", *options, cwd=here)
    run = here / "runs" / "bad"
    wait_for_step(run, 3)
    os.kill(json.loads((run / "members.json").read_text())[1]["pid"], signal.SIGKILL)
    output, _ = submitted.communicate(timeout=60)
    assert submitted.returncode == 1, output
    assert "exit code 1: failed" in output
    assert re.search(r"^error: .* died in step", output, re.MULTILINE)
    assert json.loads(cluster.run("zeropp", "jobs", "--json", cwd=here).stdout)[0]["state"] == "failed"


def test_a_run_outlives_who_submitted_it_and_is_stopped_and_resumed(cluster: UserCluster, here: Path) -> None:
    submitted = cluster.start("zeropp", "submit", "run.toml", "--name", "long", "--follow", *LONG, cwd=here)
    run = here / "runs" / "long"
    wait_for_step(run, 3)
    submitted.send_signal(signal.SIGINT)
    output, _ = submitted.communicate(timeout=60)
    assert submitted.returncode == 130, output
    assert "the job goes on; follow it again: zeropp logs long-" in output
    follower = cluster.start("zeropp", "logs", "long", "--follow", cwd=here)
    time.sleep(3)
    follower.kill()
    follower.communicate()
    wait_for_step(run, len((run / "metrics.jsonl").read_text().splitlines()) + 5)
    assert "state       running" in cluster.run("zeropp", "status", "long", cwd=here).stdout
    follower = cluster.start("zeropp", "logs", "long", "--follow", cwd=here)
    stopped = cluster.run("zeropp", "stop", "long", cwd=here)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    step = find(run).step
    assert f"stopped after step {step}, which is saved" in stopped.stdout
    output, _ = follower.communicate(timeout=60)
    assert follower.returncode == 75, output
    assert "exit code 75: stopped with a checkpoint" in output
    more = ("--resume", str(run), "--set", f"train.steps={step + 5}", "--follow")
    resumed = cluster.run("zeropp", "submit", *more, cwd=here)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert summary(run)["steps"] == step + 5


def test_plain_ray_job_submit(cluster: UserCluster, here: Path) -> None:
    command = ("ray", "job", "submit", "--address", cluster.address, "--working-dir", str(here), "--")
    done = cluster.run(*command, "python", "-m", "jobs.pretrain", "run.toml", "--name", "plain", cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^step 20/20  loss \d", done.stdout, re.MULTILINE)
    assert "\r" not in done.stdout
    assert "exit code 0: done" in done.stdout
    assert "the job's working folder goes with the job" in done.stdout
    assert summary(cluster.folder / "runs" / "plain")["outcome"] == "done"  # in the home folder


def test_a_token_is_asked_for_and_given(here: Path) -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}
    cluster = UserCluster(**token)
    try:
        for wrong in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "0" * 64}):
            refused = cluster.run("zeropp", "submit", "run.toml", cwd=here, **wrong)
            assert refused.returncode == 2, refused.stdout
            assert "the cluster asks for its token" in refused.stderr
            assert "0000" not in refused.stderr
        done = cluster.run("zeropp", "submit", "run.toml", "--name", "secret", "--follow", cwd=here)
        assert done.returncode == 0, done.stdout + done.stderr
        assert summary(here / "runs" / "secret")["outcome"] == "done"
        told = done.stdout + done.stderr
        told += "".join(path.read_text() for path in (here / "runs" / "secret").iterdir() if path.is_file())
        assert token["RAY_AUTH_TOKEN"] not in told
    finally:
        cluster.end()
