"""What `zeropp train --resume` goes on from: which run, which checkpoint, which settings. Nothing is trained here."""

from __future__ import annotations

import fcntl
import shutil
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result

from actors.locks import DRIVER, JOB, holder, only_driver, only_job
from jobs.cli import zeropp
from tests.saved import saved_run
from zeropp_ray.checkpoint import run_id
from zeropp_ray.checkpoint.reader import Checkpoint, find, latest
from zeropp_ray.checkpoint.resume import resumed
from zeropp_ray.config import LR_SCHEDULES, RunConfig, load_config
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.optim import learning_rate

SMALL = {"model": {"layers": 4, "dim": 32, "heads": 2, "seq_len": 32}, "train": {"steps": 10, "warmup_steps": 2}}
CONFIG = RunConfig.from_dict(SMALL | {"run": {"name": "first"}})


class Started(NamedTuple):
    """What a run would have begun with."""

    config: RunConfig
    folder: Path
    checkpoint: Checkpoint


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the run runs/first saved after steps 5 and 10."""
    monkeypatch.chdir(tmp_path)
    saved_run(tmp_path / "runs" / "first", CONFIG, step=5)
    saved_run(tmp_path / "runs" / "first", CONFIG, step=10)
    return tmp_path


@pytest.fixture
def resume(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    """Calls `zeropp train --resume WHERE --set …` for 20 steps, up to where training would begin."""

    def start(where: str, *settings: str) -> Started:
        started = []

        def run_training(config: RunConfig, *, run_dir: Path, resume: Checkpoint, **_: Any) -> dict[str, Any]:
            started.append(Started(config, run_dir, resume))
            raise ZeroppError("as far as this test goes")

        module = types.ModuleType("actors.run")
        module.run_training = run_training  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "actors.run", module)
        result = train(where, "train.steps=20", *settings)
        assert result.stderr.endswith("error: as far as this test goes\n"), result.output
        return started[0]

    return start


def train(where: str, *settings: str) -> Result:
    changes = [x for setting in settings for x in ("--set", setting)]
    return CliRunner().invoke(zeropp, ["train", "--resume", where, *changes])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


# --- which run


@pytest.mark.parametrize(
    ("where", "step"),
    [
        ("first", 10),
        ("runs/first", 10),
        ("runs/first/checkpoints/step-00000005", 5),
        ("runs/first/checkpoints/../checkpoints/step-00000005/", 5),
        ("runs/link", 10),
        ("runs/link/checkpoints/step-00000005", 5),
        ("five", 5),
    ],
)
def test_a_run_or_a_checkpoint_in_it_by_any_path(
    here: Path, resume: Callable[..., Started], where: str, step: int
) -> None:
    (here / "runs" / "link").symlink_to("first")
    (here / "five").symlink_to("runs/first/checkpoints/step-00000005")
    started = resume(where)
    assert started.folder.resolve() == here / "runs" / "first"
    assert started.checkpoint.step == step
    assert find(where, pytest.fail).step == step, "and nothing is told of it"


def test_from_another_working_folder(
    here: Path, resume: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert resume("../runs/first").folder.resolve() == here / "runs" / "first"
    monkeypatch.chdir(here / "runs" / "first" / "checkpoints")
    assert resume("..").checkpoint.step == 10
    assert resume("step-00000005").folder.resolve() == here / "runs" / "first"


@pytest.mark.parametrize("name", ["my first run", "-1", "été"])
def test_a_run_that_was_renamed_or_moved(here: Path, resume: Callable[..., Started], name: str) -> None:
    (here / "archive").mkdir()
    (here / "runs" / "first").rename(here / "archive" / name)
    started = resume(f"archive/{name}")
    assert started.folder.resolve() == here / "archive" / name
    assert started.config.run.name == "first"


def test_checkpoints_that_lie_on_another_disk(here: Path, resume: Callable[..., Started]) -> None:
    checkpoints = here / "runs" / "first" / "checkpoints"
    checkpoints.rename(here / "large")
    checkpoints.symlink_to(here / "large")
    for where in ("first", "runs/first/checkpoints/step-00000010"):
        started = resume(where)
        assert (started.folder.resolve(), started.checkpoint.step) == (here / "runs" / "first", 10)


@pytest.mark.parametrize("place", ["alone", "alone/checkpoints/step-00000010"])
def test_a_checkpoint_that_lies_in_no_run_is_refused(here: Path, place: str) -> None:
    shutil.copytree(here / "runs" / "first" / "checkpoints" / "step-00000010", here / place)
    message = f"error: --resume {place}: lies in no run; put it into the folder checkpoints of its own"
    assert refused(train(place)).strip() == message
    assert [path.name for path in here.rglob(JOB)] == [], "nothing was written"
    assert find(place).step == 10, "it can be read all the same"


# --- which checkpoint


def test_a_checkpoint_of_another_run_is_named_and_passed_over(here: Path, resume: Callable[..., Started]) -> None:
    saved_run(here / "runs" / "second", CONFIG, step=15)
    foreign = "runs/first/checkpoints/step-00000015"
    shutil.copytree("runs/second/checkpoints/step-00000015", foreign)
    said = f"{foreign}: of another run than the one in runs/first"
    warnings: list[str] = []
    assert latest(Path("runs/first"), warnings.append).step == 10
    assert resume("runs/first").checkpoint.step == 10
    assert warnings == [said]
    assert f"warning: {said}\n" in train("runs/first").stderr
    assert "of another run than the one in" in refused(train(foreign))

    result = CliRunner().invoke(zeropp, ["checkpoint", "verify", "runs/first"])
    assert result.exit_code == 1
    assert said in result.output
    assert "error: 1 of 3 checkpoints damaged or of another run" in result.output
    listed = CliRunner().invoke(zeropp, ["checkpoint", "ls", "runs/first"]).output.splitlines()
    assert [line.endswith("of another run than the one in runs/first") for line in listed] == [True, False, False]

    warnings.clear()
    assert find(foreign, warnings.append).step == 15, "named itself, it can be read"
    assert warnings[0].endswith("of another run than the one in " + str(here / "runs" / "first"))


def test_a_checkpoint_under_another_step_s_name_is_passed_over(here: Path) -> None:
    shutil.copytree("runs/first/checkpoints/step-00000005", "runs/first/checkpoints/step-00000099")
    warnings: list[str] = []
    assert latest(Path("runs/first"), warnings.append).step == 10
    assert warnings == ["runs/first/checkpoints/step-00000099: of step 5, and not called step-00000005"]


def test_a_run_without_its_id_is_refused(here: Path) -> None:
    (here / "runs" / "first" / run_id.FILE).unlink()
    for arguments in (["train", "--resume", "first"], ["sample", "first"]):
        assert f"{run_id.FILE} cannot be read" in refused(CliRunner().invoke(zeropp, arguments))
    assert "lies in no run" in refused(train("runs/first/checkpoints/step-00000005"))
    listed = CliRunner().invoke(zeropp, ["checkpoint", "ls", "first"]).output.splitlines()
    assert all(run_id.FILE in line for line in listed)


def test_what_the_driver_of_a_killed_job_still_does_is_waited_for(here: Path, resume: Callable[..., Started]) -> None:
    """It removes step 10, which was the newest."""
    run = here / "runs" / "first"
    holds = threading.Event()

    def old_driver() -> None:
        with (run / DRIVER).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            holds.set()
            time.sleep(0.5)
            shutil.rmtree(run / "checkpoints" / "step-00000010")

    driver = threading.Thread(target=old_driver)
    driver.start()
    holds.wait()
    assert resume("first").checkpoint.step == 5
    driver.join()


def test_a_driver_that_comes_late_finds_another_job(here: Path) -> None:
    run = here / "runs" / "first"
    with only_job(run):
        old = holder(run)
        with only_driver(run, old):
            pass
        with pytest.raises(ConfigError, match="another process trains this run \\(process "), only_job(run):
            pass
    with only_job(run), pytest.raises(ZeroppError, match="by another job"), only_driver(run, old):
        pass


def test_a_run_whose_folder_cannot_be_written_is_refused(here: Path) -> None:
    (here / "runs" / "first" / DRIVER).mkdir()
    assert "cannot be written: Is a directory" in refused(train("first"))


# --- which settings


def test_a_text_that_is_changed_by_a_relative_path(
    here: Path, resume: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "book.txt").write_bytes(b"words " * 10000)
    monkeypatch.chdir(here / "elsewhere")
    started = resume("../runs/first", "data.path=book.txt")
    assert started.config.data.path == str(here / "elsewhere" / "book.txt")
    assert load_config(here / "runs" / "first" / "config.toml").data.path == started.config.data.path


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.dtype=float64", "train.dtype: 'float32' there, 'float64' here"),
        ("run.seed=1", "run.seed: 0 there, 1 here"),
        ("run.name=second", "run.name: 'first' there, 'second' here"),
        ("model.dim=64", "model.dim: 32 there, 64 here"),
    ],
)
def test_what_may_not_change_is_refused(here: Path, setting: str, said: str) -> None:
    assert said in refused(train("first", "train.steps=20", setting))


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
def test_the_steps_of_a_run_are_extended(here: Path, schedule: str) -> None:
    """By ``constant``, and by ``wsd`` from before its decay, the run is the longer one from its beginning; by the
    others it goes on at the rate that the longer one would have."""
    decay = ["train.decay_steps=4"] * (schedule == "wsd")
    settings = [f"train.schedule={schedule}", "train.warmup_steps=2", "model.dim=32", *decay]
    short, longer = (load_config(None, [*settings, f"train.steps={steps}"]).resolved() for steps in (10, 20))
    saved_run(here / "runs" / schedule, short, step=5)
    config = resumed(latest(here / "runs" / schedule), ["train.steps=20"])
    assert config.train == longer.train
    rates = [learning_rate(step, short.train) for step in range(1, 6)]
    rates += [learning_rate(step, config.train) for step in range(6, 21)]
    straight = [learning_rate(step, longer.train) for step in range(1, 21)]
    assert rates[5:] == straight[5:]
    assert (rates == straight) == (schedule in ("constant", "wsd"))
