"""The save at the end of a run, which no later one makes up for."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors import checkpoints
from actors.checkpoints import AGAIN_S, Checkpoints
from tests.saved import saved_run
from zeropp_ray.checkpoint.manifest import Progress
from zeropp_ray.checkpoint.reader import find
from zeropp_ray.config import RunConfig

END = Progress(step=12, commits=12, samples=12, tokens=12)
Failing = Callable[[int], Checkpoints]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(checkpoints.time, "sleep", slept.append)
    return slept


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failing:
    """The checkpoints of a run with one of step 10, and members whose next saves fail so many times."""

    def make(times: int) -> Checkpoints:
        saved_run(tmp_path / "a run", RunConfig())
        fails = iter([True] * times)

        def get(files: list[Any]) -> list[Any]:
            if next(fails, False):
                raise OSError(errno.ENOSPC, "No space left on device")
            return files

        monkeypatch.setattr(checkpoints, "ray", SimpleNamespace(wait=lambda files, **_: (files, []), get=get))
        return Checkpoints(RunConfig(), tmp_path / "a run", [], {}, saved=10)

    return make


def save(method: str, folder: Path) -> list[Any]:
    return [[]]  # a member without parameters


@pytest.mark.parametrize("times", [0, 1, 2])
def test_it_is_tried_again(failing: Failing, slept: list[float], times: int) -> None:
    ours = failing(times)
    events = [*ours.finish(END, save, lambda files: None)]
    text = "checkpoint of step 12 failed: [Errno 28] No space left on device"
    assert [event.get("text") for event in events] == [*[text] * times, None]
    assert (events[-1]["kind"], ours.unsaved(END)) == ("checkpoint", "")
    assert sum(slept) == times * AGAIN_S
    assert [*ours.finish(END, save, lambda files: None)] == [], "what is saved is not saved again"


def test_when_it_fails_for_good_the_newest_good_checkpoint_is_named(
    failing: Failing, slept: list[float], tmp_path: Path
) -> None:
    ours = failing(3)
    assert {event["kind"] for event in ours.finish(END, save, lambda files: None)} == {"log"}
    assert ours.unsaved(END) == (
        "step 12 could not be saved ([Errno 28] No space left on device); the newest good checkpoint is step-00000010, "
        f"go on with: zeropp train --resume '{tmp_path}/a run'"
    )
    assert find(tmp_path / "a run").step == 10
    next((tmp_path / "a run" / "checkpoints" / "step-00000010").glob("weights*")).unlink()
    assert ours.unsaved(END).endswith("the run has no good checkpoint: what it learned is lost")


def test_a_save_on_the_way_that_fails_is_not_the_last(failing: Failing) -> None:
    ours = failing(1)
    ours.begin(END, save)
    assert [event["text"].rpartition("; ")[2] for event in ours.poll()] == ["the run goes on without it"]
