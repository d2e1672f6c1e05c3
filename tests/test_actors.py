"""The Ray layer on real clusters of this machine: parity of whole runs, failures, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from actors.run import run_training
from actors.stopping import REPEAT_S
from tests import reference
from zeropp_ray.config import RunConfig
from zeropp_ray.data.corpus import load_corpus
from zeropp_ray.data.sampler import Batches
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.models import resolve_factory
from zeropp_ray.planner.plan import make_plan

pytestmark = pytest.mark.ray


def configuration(P: int, V: int, F: int, R: int, **more) -> RunConfig:
    values = {
        "run": {"name": f"test-{P}{V}{F}{R}"},
        "model": {"layers": 4, "dim": 32, "heads": 2, "seq_len": 32},
        "parallel": {"stages": P, "chunks": V, "shards": F, "replicas": R, "microbatches": 4, "microbatch_size": 2},
        "train": {"steps": 10, "lr": 1e-2, "warmup_steps": 3, "eval_every": 0, "eval_sequences": 16},
    }
    for section, settings in more.items():
        values[section] = values.get(section, {}) | settings
    return RunConfig.from_dict(values)


@pytest.mark.parametrize("layout", [(2, 2, 2, 1), (2, 1, 1, 2), (1, 2, 1, 1)], ids=str)
def test_a_run_over_actors_equals_the_plain_loop(layout, tmp_path):
    more = {"parallel": {"zero1": True}, "resources": {"measure_memory": True}}  # no difference without replicas; never
    config = configuration(*layout, **more)
    events = []
    summary = run_training(config, address=None, run_dir=tmp_path, on_event=events.append)

    # One member that reads all samples reads them in the same order: micro-batches of the whole step.
    alone = configuration(1, 1, 1, 1, parallel={"microbatches": config.parallel.global_batch // 2})
    batches = Batches(alone, load_corpus(alone), 0, 0)
    steps = [[batches.microbatch(step, m) for m in range(alone.parallel.microbatches)] for step in range(10)]
    theirs = reference.train(resolve_factory(config.model), steps, lr=1e-2, warmup=3)

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses == pytest.approx(theirs.losses, rel=1e-5)
    assert [event["kind"] for event in events].count("step") == 10
    assert_summary(config, summary, losses, lines)
    memory, (fullest,) = summary["memory"], [event for event in events if event["kind"] == "memory"]
    assert memory["step"] == fullest["step"] == 2
    assert [each["member"] for each in memory["members"]] == [str(me) for me in make_plan(config).layout.members()]
    totals = [(sum(each["measured"].values()), sum(each["predicted"].values())) for each in memory["members"]]
    assert all(predicted == pytest.approx(measured, rel=0.2) for measured, predicted in totals)  # a small model
    assert sum(fullest["measured"].values()) == max(measured for measured, _ in totals)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def assert_summary(config: RunConfig, summary: dict, losses: list[float], lines: list[dict]) -> None:
    p, members = config.parallel, config.parallel.members
    K = len(p.schedule().units)
    assert summary["steps"] == 10
    assert summary["tokens"] == 10 * p.global_batch * 32
    assert (summary["first_loss"], summary["last_loss"]) == (losses[0], losses[-1])
    assert summary["validation_loss"] == lines[-1]["validation_loss"] < summary["first_loss"]
    assert summary["gathers"] == 10 * members * ((2 * p.chunks - 2) * K + 1)
    assert summary["reduces"] == 10 * members * p.chunks * K
    traffic = summary["traffic"]
    boundaries = p.stages * p.chunks - 1 if p.stages > 1 else 0
    message = p.microbatch_size * 32 * 32 * 4
    assert traffic["sent_bytes"] == 10 * p.shards * p.replicas * p.microbatches * boundaries * 2 * message
    assert traffic["sent_bytes"] == traffic["received_bytes"]
    kinds = ("gathered_bytes", "reduced_bytes", "replica_reduced_bytes", "replica_gathered_bytes", "sent_bytes")
    assert summary["bytes"] == sum(traffic[kind] for kind in kinds)


@pytest.mark.parametrize("victim", [pytest.param(0, id="first", marks=pytest.mark.full), pytest.param(-1, id="last")])
def test_a_killed_member_ends_the_run_with_its_name_without_recovery(command, victim):
    run = command("train.steps=100000", "parallel.microbatch_size=1", "recovery.enabled=false")
    run.wait_for_step(3)
    member, tree = run.members()[victim], run.tree()
    os.kill(member["pid"], signal.SIGKILL)
    code, output = run.end(tree, within_s=5)
    assert code == 1
    cause = output.splitlines()[-1]
    assert cause.startswith(f"error: stage {member['stage']} shard {member['shard']} replica {member['replica']} ")
    assert f"process {member['pid']} on" in cause
    assert " died in step " in cause
    assert " (instruction " in cause


def test_a_member_killed_while_it_starts(command):
    run = command("parallel.microbatch_size=1")
    run.wait_for(run.folder / "members.json")
    member, tree = run.members()[2], run.tree()
    os.kill(member["pid"], signal.SIGKILL)
    code, output = run.end(tree, within_s=8)
    assert code == 1
    assert f"process {member['pid']} on" in output.splitlines()[-1]
    assert " died in its start, before the first step" in output.splitlines()[-1]


def test_a_killed_driver_ends_the_run_if_it_may_not_be_followed(command):
    run = command("train.steps=100000", "parallel.microbatch_size=1", "parallel.shards=1", "recovery.max_drivers=0")
    run.wait_for_step(2)
    tree = run.tree()
    (driver,) = [p for p in tree if "RunDriver" in " ".join(p.cmdline())]
    driver.kill()
    code, output = run.end(tree, within_s=8)
    assert code == 1
    assert "the driver of the run died" in output.splitlines()[-1]


def test_a_second_interrupt_ends_the_run_at_once(command):
    slow = ("model.factory=tests.user_models:Slow", "model.args.vocab=256", "model.seq_len=16")
    run = command("train.steps=100000", "parallel.shards=1", "parallel.chunks=1", *slow)  # steps of 8 s
    run.wait_for_step(1)
    tree = run.tree()
    run.process.send_signal(signal.SIGINT)
    time.sleep(REPEAT_S + 1.5)  # Ray looks for signals once a second
    run.process.send_signal(signal.SIGINT)
    code, output = run.end(tree, within_s=8)
    assert code == 1, output
    assert output.splitlines()[-1].startswith("error: stopped at once, before a checkpoint")


@pytest.mark.parametrize("when", ["log.txt", "members.json"])
def test_a_run_stopped_before_its_first_step_leaves_nothing(command, when):
    run = command("train.steps=100000", "parallel.shards=1")
    run.wait_for(run.folder / when)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end([], within_s=60)
    assert code == 1, output
    assert output.splitlines()[-1] == "error: stopped before the first step; nothing is left of the run"
    assert not run.folder.exists()


def test_a_run_whose_end_cannot_be_saved_has_failed_and_says_what_there_is(command):
    run = command("train.steps=4", "parallel.stages=1", "parallel.shards=1", "model.dim=32", "model.heads=2")
    run.wait_for(run.folder / "members.json")
    (run.folder / "checkpoints").touch()  # is in the way, also of one who may write everywhere
    code, output = run.end([], within_s=60)
    assert code == 1, output
    assert output.count("checkpoint of step 4 failed: ") == 3
    assert "the run goes on" not in output
    assert "4 steps" in output
    cause = output.splitlines()[-1]
    assert cause.startswith("error: step 4 could not be saved (")
    assert cause.endswith("), and the run has no good checkpoint: what it learned is lost")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["outcome"], f"error: {summary['error']}", summary["checkpoint"]) == ("failed", cause, None)


def test_an_error_in_the_model_names_member_and_instruction(tmp_path, capfd):
    model = {"factory": "tests.user_models:fails_when_trained", "seq_len": 16, "args": {"depth": 2}, "layers": 4}
    config = configuration(2, 1, 1, 1, model=model)
    with pytest.raises(ZeroppError, match=r"stage 1 shard 0 replica 0 failed in 0F0 .*the block is tired"):
        run_training(config, address=None, run_dir=tmp_path, on_event=lambda event: None)
    assert 'raise RuntimeError("the block is tired")' in capfd.readouterr().err  # the user's line, in the log


def test_a_cluster_that_does_not_answer(tmp_path):
    with pytest.raises(ConfigError, match=r"--address 127\.0\.0\.1:1: nothing answers there"):
        run_training(configuration(1, 1, 1, 1), address="127.0.0.1:1", run_dir=tmp_path, on_event=lambda event: None)
    for address in ("http://127.0.0.1:8265", "ray://127.0.0.1:10001"):  # as RAY_ADDRESS may have it
        with pytest.raises(ConfigError, match=r"is not one to join; give HOST:PORT"):
            run_training(configuration(1, 1, 1, 1), address=address, run_dir=tmp_path, on_event=lambda event: None)


def test_more_members_than_a_joined_cluster_holds(tmp_path):
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        config = configuration(2, 1, 2, 1)
        with pytest.raises(ConfigError, match=r"4 members need 4 CPUs and the cluster has 2"):
            run_training(config, address=cluster.address, run_dir=tmp_path, on_event=lambda event: None)
        small = configuration(2, 1, 1, 1, train={"steps": 2})
        summary = run_training(small, address=cluster.address, run_dir=tmp_path, on_event=lambda event: None)
        assert summary["steps"] == 2
        ray.init(address=cluster.address)
        states = [group["state"] for group in ray.util.placement_group_table().values()]
        assert states == ["REMOVED"]
        deadline = time.monotonic() + 5  # Ray tells what is free a little later
        while ray.available_resources().get("CPU", 0) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ray.available_resources()["CPU"] == 2
    finally:
        ray.shutdown()
        cluster.shutdown()
