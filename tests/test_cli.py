"""The commands as a person meets them: help, bad input in one line, what is shown and written."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from actors.stopping import StopSignals
from jobs.cli import zeropp
from jobs.quiet import quiet
from jobs.report import Reporter, duration, short, size
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.errors import ConfigError, ZeroppError

ROOT = Path(__file__).parent.parent
PLAN: dict[str, Any] = {
    "kind": "plan",
    "model": "llama",
    "parameters": 870_000,
    "shared": 0,
    "frozen": 0,
    "layout": "2 stages x 2 chunks, 2 shards",
    "units": [4, 4],
    "chunks": [1, 1, 1, 1],
    "built_whole": "",
    "global_batch": 32,
    "tokens_per_step": 4096,
    "predicted_memory": {"weights": 3 * 2**20, "activations": 2**19, "copies of the state": 2**18},
    "bubble": 0.031,
    "gathers": 5,
    "reduces": 4,
    "limit": 5.0,
}
SUMMARY: dict[str, Any] = {
    "error": None,
    "steps": 2,
    "tokens": 8192,
    "first_loss": 5.5,
    "last_loss": 5.25,
    "validation_loss": 5.3,
    "tokens_per_s": 9100.0,
    "gathers": 10,
    "reduces": 8,
    "bytes": 3 * 2**20,
}


def step_event(step: int, steps: int, **changes: Any) -> dict[str, Any]:
    event = {"kind": "step", "step": step, "steps": steps, "loss": 6 - step / steps, "tokens": 4096 * step}
    return event | {"tokens_per_s": 9100.0, "grad_norm": 1.0, "lr": 1e-3, "skipped": False, "seconds": 0.5} | changes


def run(*arguments: str) -> Result:
    return CliRunner().invoke(zeropp, arguments)


def refused(result: Result, code: int = 2) -> str:
    """The one line of an error."""
    assert result.exit_code == code, result.output
    assert result.output.startswith("error: ")
    assert result.output.count("\n") == 1
    return result.output.removeprefix("error: ").rstrip()


Trainer = Callable[..., dict[str, Any]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trainer(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Trainer], None]:
    """Puts a function in the place of the training run."""

    def install(function: Trainer) -> None:
        module = types.ModuleType("actors.run")
        module.run_training = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "actors.run", module)

    return install


def short_run(config: RunConfig, *, on_event: Callable[[dict[str, Any]], None], **_: Any) -> dict[str, Any]:
    os.write(1, b"noise from C\n")
    print("noise from Python", file=sys.stderr)
    on_event(PLAN)
    on_event(step_event(1, 2))
    on_event({"kind": "log", "text": "4 CPUs on 2 cores"})
    on_event(step_event(2, 2))
    on_event({"kind": "eval", "step": 2, "validation_loss": 5.3})
    return SUMMARY


# --- help


def test_help_teaches() -> None:
    assert run("--version").output == "zeropp, version 0.1.0\n"
    for command in ("train", "config", "schedule"):
        assert command in run("--help").output
    text = run("train", "--help").output
    for part in ("Examples", "--set", "--dry-run", "metrics.jsonl", "Exit code: 0 done, 1 failed, 2 wrong usage"):
        assert part in text


def test_help_needs_neither_torch_nor_ray() -> None:
    code = "import sys, jobs.cli; assert not {'torch', 'ray', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_config_prints_a_file_that_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(run("config", "--set", "parallel.stages=1", "--set", "run.name=a").output, encoding="utf-8")
    assert load_config(file) == load_config(None, ["parallel.stages=1", "run.name=a"])


def test_a_configuration_file_from_start_to_check(here: Path) -> None:
    made = run("config", "init", "mine.toml")
    assert (made.exit_code, made.output.count("\n")) == (0, 1)
    assert load_config(here / "mine.toml") == RunConfig()
    assert "is there already; choose another name" in refused(run("config", "init", "mine.toml"))
    assert "cannot be written" in refused(run("config", "init", "none/mine.toml"))
    assert run("config", "mine.toml").output == run("config", "show").output == run("config").output
    shown = run("config", "check", "mine.toml", "--set", "train.tokens_per_step=0", "--set", "train.schedule=wsd")
    assert shown.exit_code == 0, shown.output
    for text in (
        "2 stages x 2 shards",
        "4 members",
        "32 sequences, 4,096 tokens",
        "in units of 4",
        "per member: weights",
        "200 steps, 819,200 tokens; learning rate 0.003, wsd after 20 steps of warm-up",
        "over the last 20",
        "bytes, and 23,3",
        "This configuration can run.",
    ):
        assert text in " ".join(shown.output.split())
    assert not (here / "runs").exists()
    assert "use 4608 or 5120" in refused(run("config", "check", "mine.toml", "--set", "train.tokens_per_step=5000"))


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "named", "fix"),
    [
        (["--set", "data.path=missing.txt"], "data.path", "leave it empty"),
        (["--set", "data.path=empty.txt"], "data.path", "name a text file"),
        (["--set", "data.path=short.txt"], "data.path", "needs"),
        (["--set", "data.path=folder"], "data.path", "name a text file"),
        (["--set", "parallel.unit=9"], "parallel.unit = 9", "works"),
        (["--set", "parallel.unit=1"], "parallel.unit = 1", "works"),
        (["--set", "parallel.memory_limit=1"], "parallel.memory_limit = 1", "2.5"),
        (["--set", "model.layers=3"], "model.layers = 3", "use 4"),
        (["--set", "model.heads=3"], "model.heads = 3", "use 2"),
        (["--set", "model.vocab_size=100"], "model.vocab_size = 100", "use 256"),
        (["--set", "parallel.microbatch_size=0"], "parallel.microbatch_size = 0", "at least 1"),
        (["--set", "parallel.shard=2"], "parallel.shard", "did you mean parallel.shards?"),
        (["--set", "run.dir=short.txt/runs"], "run.dir", "choose a folder"),
        (["--set", "data.path=~nobodys/text"], "data.path = '~nobodys/text'", "write out the whole path"),
        (["--set", "run.dir=~nobodys"], "run.dir = '~nobodys'", "write out the whole path"),
        (["--resume", "~nobodys/run"], "--resume ~nobodys/run", "write out the whole path"),
        (["--init-from", "~nobodys"], "model.init_from = '~nobodys'", "write out the whole path"),
        (["--name", "taken"], "run.name = 'taken'", "choose another with --name, or remove it"),
        (["--name", "../up"], "run.name = '../up'", "letters"),
        (["missing.toml"], "missing.toml", "leave it out"),
        (["short.txt"], "short.txt", "not TOML"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(here: Path, arguments: list[str], named: str, fix: str) -> None:
    (here / "empty.txt").touch()
    (here / "short.txt").write_text("too short")
    (here / "folder").mkdir()
    (here / "runs" / "taken").mkdir(parents=True)
    (here / "runs" / "taken" / "summary.json").touch()
    message = refused(run("train", *arguments))
    assert named in message
    assert fix in message
    assert [path.name for path in (here / "runs").iterdir()] == ["taken"]


def test_a_working_folder_that_is_gone_is_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = here / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "the folder that this was started in is gone" in refused(run("train"))


def test_wrong_usage_is_exit_2() -> None:
    result = run("train", "--bogus")
    assert result.exit_code == 2
    assert "No such option" in result.output


# --- a run


def test_a_run_shows_little_and_logs_the_noise(
    here: Path, trainer: Callable[[Trainer], None], capfd: pytest.CaptureFixture[str]
) -> None:
    trainer(short_run)
    (here / "book.txt").write_bytes(b"words " * 2000)
    result = run("train", "--name", "first", "--set", "data.path=book.txt")
    assert (result.exit_code, result.output) == (0, "")
    shown = capfd.readouterr().out
    assert "noise" not in shown
    for text in (
        "llama, 870k parameters",
        "3.8 MiB per member: weights 3.0 MiB, activations 512.0 KiB, copies of the state",
        "256.0 KiB of that are two copies of its state, and two of its buddy's, made every\n        10 steps",
        "3.1%, with at most 5 live",
        "step 1/2  loss 5.500  9.10k tok/s\n",
        "4 CPUs on 2 cores",
        "step 2  validation loss 5.300",
        "5.500 to 5.250; validation 5.300",
        "runs/first: config.toml",
    ):
        assert text in shown
    folder = here / "runs" / "first"
    assert (folder / "log.txt").read_text() == "noise from C\nnoise from Python\n"
    config = load_config(folder / "config.toml")
    assert config.run.name == "first"
    assert config.data.path == str(here / "book.txt")
    assert config.parallel.unit == 4, "automatic values are written out"


def test_a_run_names_itself(here: Path, trainer: Callable[[Trainer], None]) -> None:
    trainer(short_run)
    assert run("train").exit_code == 0
    assert [path.name.startswith("llama-2") for path in (here / "runs").iterdir()] == [True]


@pytest.mark.parametrize(
    ("error", "message", "logged"),
    [
        (ZeroppError("stage 1 shard 0 replica 0 died in 1F3"), "stage 1 shard 0 replica 0 died in 1F3", "1F3"),
        (RuntimeError("a\nb"), "unexpected RuntimeError: a b; the traceback is in runs/a/log.txt", "Traceback"),
        (KeyboardInterrupt(), "stopped at once, before a checkpoint; the steps so far are in runs/a/metrics.jsonl", ""),
    ],
)
def test_a_run_that_fails_is_one_line_and_exit_1(
    here: Path, trainer: Callable[[Trainer], None], error: BaseException, message: str, logged: str
) -> None:
    def fail(*_: Any, run_dir: Path, **__: Any) -> dict[str, Any]:
        (run_dir / "metrics.jsonl").write_text("{}\n")
        raise error

    trainer(fail)
    assert refused(run("train", "--name", "a"), code=1) == message
    assert logged in (here / "runs" / "a" / "log.txt").read_text()


def test_a_run_stopped_before_its_first_step_leaves_its_name_free(
    here: Path, trainer: Callable[[Trainer], None]
) -> None:
    def stop(*_: Any, run_dir: Path, stop: StopSignals, **__: Any) -> dict[str, Any]:
        (run_dir / "metrics.jsonl").touch()
        signal.raise_signal(signal.SIGTERM)
        stop.check()
        raise AssertionError("the signal came to nothing")

    trainer(stop)
    assert refused(run("train", "--name", "a"), code=1) == "stopped before the first step; nothing is left of the run"
    assert not (here / "runs" / "a").exists()


def test_a_resume_that_is_stopped_at_once_leaves_the_run_as_it_was(
    here: Path, trainer: Callable[[Trainer], None]
) -> None:
    from tests.saved import saved_run

    def stop(*_: Any, **__: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    folder = here / "runs" / "a"
    saved_run(folder, RunConfig())
    (folder / "config.toml").write_text("as it was")
    (here / "elsewhere").mkdir()
    real = (folder / "checkpoints" / "step-00000010").rename(here / "elsewhere" / "step-00000010")
    (folder / "checkpoints" / "linked").symlink_to(real)  # all that the run has
    trainer(stop)
    one = "runs/a/checkpoints/linked"
    message = refused(run("train", "--resume", one, "--set", "train.steps=777"), code=75)
    assert message == f"stopped at once; go on with: zeropp train --resume {one}"
    assert (folder / "config.toml").read_text() == "as it was"


def test_a_dry_run_of_a_resume_checks_all_that_a_run_does(here: Path) -> None:
    from tests.saved import saved_run

    saved_run(here / "runs" / "a", RunConfig())
    assert "the model has changed: embed.weight was frozen" in refused(run("train", "--resume", "a", "--dry-run"))


def test_a_token_store_does_not_hide_the_run_of_its_name(here: Path) -> None:
    from tests.saved import saved_run

    saved_run(here / "runs" / "a", RunConfig())
    (here / "a").mkdir()
    for name in ("manifest.json", "train-00000.arrow"):
        (here / "a" / name).touch()
    shown = run("checkpoint", "verify", "a")
    assert shown.exit_code == 0, shown.output
    assert shown.output.endswith("step-00000010: good\n")


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_stopped_at_once_says_what_there_is_to_go_on_from(
    here: Path, trainer: Callable[[Trainer], None], resume: bool
) -> None:
    from tests.saved import saved_run

    def stop(config: RunConfig, *, run_dir: Path, **__: Any) -> dict[str, Any]:
        if not resume:
            saved_run(run_dir, config)
        raise KeyboardInterrupt

    if resume:
        saved_run(here / "runs" / "a", RunConfig())
    trainer(stop)
    message = refused(run("train", *(["--resume", "a"] if resume else ["--name", "a"])), code=75)
    newest = "" if resume else "the newest checkpoint is step-00000010, "
    assert message == f"stopped at once; {newest}go on with: zeropp train --resume runs/a"
    assert "or go on with --resume runs/a" in refused(run("train", "--name", "a"))


def test_a_run_that_has_all_its_steps_and_failed_says_both(
    here: Path, trainer: Callable[[Trainer], None], capfd: pytest.CaptureFixture[str]
) -> None:
    trainer(lambda *_, **__: SUMMARY | {"error": "step 2 could not be saved"})
    assert refused(run("train", "--name", "a"), code=1) == "step 2 could not be saved"
    shown = capfd.readouterr().out
    assert "2 steps, 8,192 tokens" in shown
    assert "--resume" not in shown


def test_a_run_that_another_process_trains_is_refused_and_unharmed(
    here: Path, trainer: Callable[[Trainer], None]
) -> None:
    def again(*_: Any, **__: Any) -> dict[str, Any]:
        assert "another process trains this run" in refused(run("train", "--name", "a"))
        assert (here / "runs" / "a" / "config.toml").exists()
        raise ZeroppError("seen")

    trainer(again)
    assert refused(run("train", "--name", "a"), code=1) == "seen"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_log_on_a_full_disk_ends_no_run(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with quiet(Path("/dev/full")) as console:
        print("lost")
        print("shown", file=console)
    assert capfd.readouterr().out == "shown\n"


def test_a_full_disk_is_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/.lock")

    monkeypatch.setattr("actors.mirror.only_job", full)
    assert refused(run("train", "--name", "a"), code=1) == "runs/a/.lock cannot be written: No space left on device"


def test_a_refused_run_leaves_its_name_free(here: Path, trainer: Callable[[Trainer], None]) -> None:
    def refuse(*_: Any, **__: Any) -> dict[str, Any]:
        raise ConfigError("resources.cpus = 1: too many members")

    trainer(refuse)
    assert refused(run("train", "--name", "a")) == "resources.cpus = 1: too many members"
    assert not (here / "runs" / "a").exists()


# --- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(console: io.StringIO, steps: int, seconds: float, shown: int | None = None) -> str:
    now = [0.0]
    reporter = Reporter(console, RunConfig(), "", clock=lambda: now[0])
    for step in range(1, (shown or steps) + 1):
        now[0] += seconds
        reporter(step_event(step, steps))
    reporter.end()
    return console.getvalue()


def test_a_terminal_has_one_live_line() -> None:
    text = progress(Terminal(), steps=200, seconds=0.5, shown=120)
    assert text.count("\n") == 1
    assert text.endswith("\r\x1b[Kstep 120/200  loss 5.400  9.10k tok/s  0:40 left\n")


def test_without_a_terminal_lines_are_few() -> None:
    fast = progress(io.StringIO(), steps=200, seconds=0.01).splitlines()
    assert [line.split()[1] for line in fast] == [f"{n}/200" for n in (1, *range(20, 201, 20))]
    slow = progress(io.StringIO(), steps=20, seconds=6.0).splitlines()
    assert len(slow) == 20
    long = progress(io.StringIO(), steps=5000, seconds=6.0).splitlines()
    assert 50 < len(long) < 150
    assert "\r" not in "".join(fast + slow + long)


def test_what_is_worth_a_line_gets_one() -> None:
    console = Terminal()
    reporter = Reporter(console, RunConfig(), "")
    reporter(step_event(1, 3, loss=None))
    reporter(step_event(2, 3, loss=None, skipped=True, reason="the gradient is not finite"))
    reporter({"kind": "eval", "step": 2, "validation_loss": 2.5})
    reporter({"kind": "unknown"})
    text = console.getvalue()
    assert "loss not finite" in text
    assert "\r\x1b[Kstep 2  skipped: the gradient is not finite\n" in text
    assert text.endswith("\r\x1b[Kstep 2  validation loss 2.500\n")


def test_measured_memory_is_shown_beside_the_predicted() -> None:
    console = io.StringIO()
    kinds = {"activations": 2**20, "messages": 0}
    columns = {"predicted": kinds, "measured": kinds | {"activations": 1536}, "highest": kinds}
    Reporter(console, RunConfig(), "")({"kind": "memory", "step": 2, "member": "stage 0", "at": "1B4", **columns})
    assert console.getvalue().splitlines() == [
        "step 2  memory of stage 0, the fullest, at its peak in 1B4",
        "             predicted   measured    highest",
        "activations    1.0 MiB    1.5 KiB    1.0 MiB",
        "total          1.0 MiB    1.5 KiB",
    ]


def test_numbers_are_short() -> None:
    assert [short(n) for n in (0, 7, 999, 1000, 9100, 91_000, 870_000, 1_234_567, 7e9)] == [
        *("0", "7", "999", "1.00k", "9.10k", "91.0k", "870k", "1.23M", "7.00G")
    ]
    assert [size(n) for n in (0, 1023, 1536, 2**20, 5 * 2**30, 2**42)] == [
        *("0 B", "1023 B", "1.5 KiB", "1.0 MiB", "5.0 GiB", "4.0 TiB")
    ]
    assert [duration(n) for n in (0, 34, 61.6, 7500)] == ["0:00", "0:34", "1:02", "2:05:00"]


# --- packages of the same name


def started(folder: Path, *path: Path, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The installed command, which has its own folder first on the path and not the working folder."""
    code = "import sys; sys.path[0] = '/nowhere'; from zeropp_ray.__main__ import main; main()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_it_works_from_any_folder(tmp_path: Path) -> None:
    for name in ("actors", "jobs"):
        (tmp_path / name).mkdir()  # no package: hides nothing
        (tmp_path / name / "notes.txt").touch()
    result = started(tmp_path, arguments=("config",))
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "arguments", "on_path"),
    [
        ("jobs", ("config",), True),  # the command itself would be the other one
        ("actors", ("config",), True),
        ("actors", ("train", "--dry-run"), False),  # workers look in the working folder first
        ("zeropp_ray", ("train", "--dry-run"), False),
    ],
)
def test_a_package_that_hides_ours_is_named(
    tmp_path: Path, name: str, arguments: tuple[str, ...], on_path: bool
) -> None:
    own = tmp_path / name
    own.mkdir()
    (own / "__init__.py").touch()
    result = started(tmp_path, *([tmp_path] if on_path else []), arguments=arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {own}: hides the package '{name}'")
    assert result.stderr.count("\n") == 1
