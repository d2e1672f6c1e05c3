"""A run that has to leave: its node is drained, or the job it is of is stopped. It saves, says so, and can go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors import draining
from actors.draining import DrainWatch
from actors.events import EVENTS
from actors.run import run_training
from zeropp_ray.checkpoint.reader import find
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import Stopped

pytestmark = pytest.mark.ray

SMALL = {
    "model": {"layers": 4, "dim": 32, "heads": 2, "seq_len": 32},
    "parallel": {"stages": 2, "chunks": 1, "shards": 1, "microbatches": 4, "microbatch_size": 1},
    "train": {"steps": 100_000, "eval_every": 0, "eval_sequences": 16},
}
GRACE_S = 3.0  # between the SIGTERM and the SIGKILL of `ray job stop`


def last_event(run: Path) -> dict[str, Any]:
    return json.loads((run / EVENTS).read_text().splitlines()[-1])


@pytest.fixture
def two_nodes() -> Iterator[tuple[str, str]]:
    """A cluster with one CPU on each of two nodes: its address, and the id of the node that is not the head."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        worker = cluster.add_node(num_cpus=1)
        yield cluster.address, worker.node_id
    finally:
        ray.shutdown()
        cluster.shutdown()


def drain(node: str) -> None:
    """As the provider of a node that takes it back in a minute."""
    import ray
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    deadline_ms = int((time.time() + 60) * 1000)
    client = ray._private.worker.global_worker.gcs_client
    assert client.drain_node(node, reason, "preempted", deadline_ms) == (True, "")


def test_a_drained_node_stops_the_run_with_a_checkpoint(
    two_nodes: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, node = two_nodes
    noticed = []

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and not noticed:
            watch, other = DrainWatch(lambda: {node: "the other"}), DrainWatch(dict)
            noticed.append(watch.check())
            drain(node)
            watch._next = 0.0  # it asks now and then
            noticed.extend([watch.check(), watch.check(), other.check()])

    with pytest.raises(Stopped, match=rf"stopped because the cluster drains node .* \(id {node[:12]}\)") as caught:
        run_training(RunConfig.from_dict(SMALL), address=address, run_dir=tmp_path, on_event=on_event)
    assert noticed[0] == noticed[2] == noticed[3] == ""
    assert noticed[1].startswith(f"the cluster drains node the other (id {node[:12]}), which is to be gone in ")
    step = find(tmp_path).step
    assert f"after step {step}, which is saved; go on with: zeropp train --resume {tmp_path}" in str(caught.value)
    assert (last_event(tmp_path)["outcome"], last_event(tmp_path)["exit_code"]) == ("stopped", 75)


def test_a_cluster_that_does_not_say_drains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is asked less often: the time limit of a question is what a run pays for it."""
    import ray

    asked = []

    class Client:
        def get_draining_nodes(self, timeout: float) -> dict[str, int]:
            asked.append(timeout)
            raise TimeoutError

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(draining, "time", clock)
    monkeypatch.setattr(ray._private.worker.global_worker, "gcs_client", Client(), raising=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Context", (), {"get_node_id": lambda self: "here"})())
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "here")
    watch = DrainWatch(dict)
    for clock.now in range(1000):
        assert watch.check() == ""
    assert sum(asked) <= 0.01 * 1000


def test_a_stopped_job_saves_in_the_time_it_has(command) -> None:
    """What `ray job stop` does to the processes of a job, without its server."""
    run = command("model.dim=32", "model.heads=2", "model.seq_len=32", "parallel.shards=1", "train.steps=100000")
    run.wait_for_step(5)
    run.process.send_signal(signal.SIGTERM)
    try:
        run.process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        run.process.kill()
    code, output = run.end([], within_s=20)
    assert code == 75, output
    step = find(run.folder).step
    assert output.splitlines()[-1].startswith(f"error: stopped after step {step}, which is saved")
    end = last_event(run.folder)
    assert (end["outcome"], end["exit_code"]) == ("stopped", 75)
    assert end["error"].startswith(f"stopped after step {step}, which is saved")


@pytest.mark.full
def test_ray_job_stop(tmp_path: Path) -> None:
    """The real one, where Ray is installed with its dashboard."""
    pytest.importorskip("aiohttp_cors", reason="ray[default] is not installed; make test-all does")
    import ray
    from ray.job_submission import JobStatus, JobSubmissionClient

    ray.init(address="local", num_cpus=2, include_dashboard=True, dashboard_port=0)
    try:
        client = JobSubmissionClient(f"http://{ray._private.worker.global_worker.node.webui_url}")
        here = ["--address", ray.get_runtime_context().gcs_address]  # others may be on this machine
        settings = [f"{name}.{key}={value}" for name, section in SMALL.items() for key, value in section.items()]
        arguments = ["--name", "job", "--set", f"run.dir={tmp_path}", *here]
        arguments += [x for setting in settings for x in ("--set", setting)]
        job = client.submit_job(entrypoint=" ".join([sys.executable, "-m", "jobs.cli", "train", *arguments]))
        run, deadline = tmp_path / "job", time.monotonic() + 120
        metrics = run / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 5):
            assert client.get_job_status(job) in (JobStatus.PENDING, JobStatus.RUNNING), client.get_job_logs(job)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        client.stop_job(job)
        while client.get_job_status(job) == JobStatus.RUNNING and time.monotonic() < deadline:
            time.sleep(0.1)
        assert client.get_job_status(job) == JobStatus.STOPPED
        step = find(run).step
        assert f"error: stopped after step {step}, which is saved" in client.get_job_logs(job)
        assert (last_event(run)["outcome"], last_event(run)["exit_code"]) == ("stopped", 75)
    finally:
        ray.shutdown()
