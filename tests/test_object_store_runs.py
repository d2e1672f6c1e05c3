"""Whole runs in an object store: stopped, gone on with elsewhere, and with a store that fails in between."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.command import CommandRun
from tests.object_store import KEYS, ObjectStore
from zeropp_ray import uri
from zeropp_ray.checkpoint.manifest import folders
from zeropp_ray.checkpoint.reader import find, latest
from zeropp_ray.uri import Place, UriPath

pytestmark = [pytest.mark.ray, pytest.mark.full]

MODEL = ["model.dim=32", "model.heads=2", "model.seq_len=32", "train.eval_every=0", "train.eval_sequences=16"]
SMALL = [
    *MODEL,
    "parallel.shards=1",
    "parallel.microbatches=4",
    "parallel.microbatch_size=1",
    "train.schedule=constant",
]


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    uri._file_system.cache_clear()
    server = ObjectStore(tmp_path_factory.mktemp("object-store") / "data")
    try:
        yield server
    finally:
        server.stop()
        uri._file_system.cache_clear()


def losses(run: Place) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def wait_for_checkpoint(run: CommandRun) -> None:
    deadline = time.monotonic() + 120
    while next(folders(run.run), None) is None:
        assert run.process.poll() is None, run.process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def newest(run: CommandRun) -> int:
    return int(next(folders(run.run)).name.removeprefix("step-"))


def test_a_run_goes_on_elsewhere_as_if_it_had_not_been_stopped(
    store: ObjectStore, command: Callable[..., CommandRun], tmp_path: Path
) -> None:
    runs = UriPath.parse(store.uri("team/runs"))
    first = command(*SMALL, "checkpoint.every_steps=50", "train.steps=100000", runs=runs)
    wait_for_checkpoint(first)
    rival = command("train.steps=200000", resume=True, runs=runs)
    code, output = rival.end([], within_s=60)
    assert code == 2, output
    assert "another process trains this run" in output
    first.process.send_signal(signal.SIGTERM)
    code, output = first.end(first.tree(), within_s=60)
    assert code == 75, output
    assert output.endswith(f"which is saved; go on with: zeropp train --resume '{first.run}'\n")
    assert not (tmp_path / "runs" / "victim").exists()
    stopped = latest(first.run).step
    assert losses(first.run)[-1][0] == stopped

    again = command(f"train.steps={stopped + 6}", resume=True, runs=runs)  # another folder for temporary files
    code, output = again.end([], within_s=120)
    assert code == 0, output
    twin = command(*SMALL, f"train.steps={stopped + 6}", name="twin")  # in one go, on the disk
    code, output = twin.end([], within_s=240)
    assert code == 0, output
    assert losses(again.run) == losses(twin.run)
    assert latest(again.run).digest(state=True) == latest(twin.run).digest(state=True)
    assert json.loads((again.run / "summary.json").read_text())["outcome"] == "done"
    for name in ("config.toml", "events.jsonl", "run-id"):
        assert (again.run / name).read_bytes(), name
    assert not (again.run / ".lease").exists()
    for path in (first.temporary, again.temporary):
        assert not list(path.glob("zeropp-*"))


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(
    store: ObjectStore, command: Callable[..., CommandRun]
) -> None:
    runs = UriPath.parse(store.uri("runs"))
    run = command(*SMALL, "checkpoint.every_steps=4", "train.steps=100000", runs=runs)
    wait_for_checkpoint(run)
    for process in [*run.tree(), run.process]:
        process.send_signal(signal.SIGKILL)
    run.process.communicate(timeout=30)
    run.forget()
    step = latest(run.run).step
    again = command(f"train.steps={step + 4}", resume=True, runs=runs)
    code, output = again.end([], within_s=150)
    assert code == 0, output
    assert re.search(r"is held by process \d+ on .*; waiting up to \d+ s to see whether that lives", output)
    assert [number for number, _ in losses(again.run)] == list(range(1, step + 5))
    assert find(again.run).step == step + 4


def test_a_store_that_fails_in_the_middle_of_a_save(store: ObjectStore, command: Callable[..., CommandRun]) -> None:
    run = command(*SMALL, "checkpoint.every_steps=3", "train.steps=100000", runs=UriPath.parse(store.uri("runs")))
    run.wait_for_step(8)
    store.stop()
    steps = len(run.metrics().read_text().splitlines())
    time.sleep(10)  # saves fail, after they have been tried again
    run.wait_for_step(steps + 10)
    store.start()
    good = newest(run)
    deadline = time.monotonic() + 60
    while newest(run) <= good:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end([], within_s=60)
    assert code == 75, output
    failed = re.findall(r"checkpoint of step (\d+) failed: (.*); the run goes on without it", output)
    assert failed
    assert all(str(store.query) in text and "\n" not in text for _, text in failed)
    saved = {int(path.name.removeprefix("step-")) for path in folders(run.run)}
    assert max(saved) == latest(run.run).step
    left = {path.name for path in (run.run / "checkpoints").iterdir() if list(path.iterdir())}
    assert left == {path.name for path in folders(run.run)}, "what was half written is gone"


def test_a_store_that_is_gone_at_the_end(store: ObjectStore, command: Callable[..., CommandRun]) -> None:
    run = command(*SMALL, "checkpoint.every_steps=3", "train.steps=60", runs=UriPath.parse(store.uri("runs")))
    run.wait_for_step(8)
    store.stop()
    output, _ = run.process.communicate(timeout=200)
    assert run.process.returncode == 1, output
    assert re.search(r"error: step 60 could not be saved .*go on with: zeropp train --resume", output), output
    kept = re.search(r"what the run recorded is kept in (\S+)", output)
    assert kept is not None
    assert losses(Path(kept[1]))[-1][0] == 60
    assert not list(run.temporary.glob(f"zeropp-{run.process.pid}-*"))
