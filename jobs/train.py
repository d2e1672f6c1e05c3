"""``zeropp train``: checks everything that can be checked, makes the run's folder, trains, and tells how it went."""

from __future__ import annotations

import dataclasses
import fcntl
import re
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.config import configured
from jobs.quiet import quiet
from jobs.report import Reporter, plan_table
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.errors import ConfigError, Stopped, ZeroppError
from zeropp_ray.shadow import check_not_shadowed

if TYPE_CHECKING:
    from zeropp_ray.checkpoint.reader import Checkpoint

LOCK = ".lock"


@click.command()
@configured
@click.option("--name", help="Name of the run, and of its folder; short for --set run.name=NAME.")
@click.option(
    "--resume", metavar="RUN", help="Go on from the newest good checkpoint of a run: its folder, or its name."
)
@click.option(
    "--init-from", metavar="DIR", help="Start from the model in a Hugging Face folder: its weights, and its sizes."
)
@click.option(
    "--address",
    metavar="ADDRESS",
    envvar="RAY_ADDRESS",
    show_envvar=True,
    help="Join the Ray cluster at HOST:PORT, or 'auto'; else start one here.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, show the table of the plan, and stop.")
def train(
    file: Path | None,
    overrides: tuple[str, ...],
    name: str | None,
    resume: str | None,
    init_from: str | None,
    address: str | None,
    dry_run: bool,
) -> None:
    """Train a language model on Ray actors with the ZeroPP schedule.

    FILE is a run configuration in TOML; without it every setting has its default, which trains a small model on
    Python's own documentation. `zeropp config` prints all settings and what they mean.

    \b
    Examples:
      zeropp train
      zeropp train run.toml --name first
      zeropp train --set data.path=book.txt --set train.steps=500
      zeropp train --set parallel.stages=4 --set parallel.chunks=1 --set parallel.shards=1
      zeropp train --set model.factory=mymodel:build --dry-run
      zeropp train --init-from downloads/gpt2 --set data.path=stores/mine
      zeropp train --resume first
      zeropp train --resume runs/first --set train.steps=1000 --set parallel.stages=1

    Ctrl-C or SIGTERM stops after the step at hand, saves, and says how to go on. A resumed run takes its settings from
    the checkpoint. Stages, chunks, shards, replicas and steps may change, if a step still takes as many sequences.

    \b
    What is written, in runs/NAME/:
      config.toml    the configuration, with every setting
      metrics.jsonl  a line for each step and evaluation
      summary.json   what was reached
      checkpoints/   weights and optimizer by parameter name, for any layout
      log.txt        what Ray and torch had to say

    Exit code: 0 done, 1 failed, 2 wrong usage or configuration, 75 stopped and saved: resume it.
    """
    # Ray's workers look first in the folder that the run was started in.
    check_not_shadowed([str(Path.cwd()), *sys.path], "zeropp_ray", "actors")
    if resume is not None:
        checkpoint, config, folder = _resumed(resume, file, name, init_from, overrides)
    else:
        overrides = overrides if name is None else (*overrides, f"run.name={name}")
        overrides = overrides if init_from is None else (*overrides, f"model.init_from={init_from}")
        checkpoint, config = None, _completed(load_config(file, overrides))
        folder = Path(config.run.dir).expanduser() / config.run.name

    from zeropp_ray.data.corpus import load_corpus
    from zeropp_ray.data.text import keep_tokenizer

    corpus = load_corpus(config)
    source = corpus.label
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=corpus.tokenizer))
    if dry_run:
        from zeropp_ray.planner.plan import make_plan

        click.echo(plan_table(make_plan(config).table(config), config, source))
        return
    if checkpoint is None:
        _make_folder(folder, config)
    with only_one(folder):
        if checkpoint is None:
            _check_unused(folder, config)
        written = folder / "config.toml"
        before = written.read_text(encoding="utf-8") if written.exists() else None
        try:
            written.write_text(config.to_toml(), encoding="utf-8")
            keep_tokenizer(config, folder)
            _run(config, address, folder, source, checkpoint)
        except ConfigError:  # nothing ran
            if checkpoint is None:
                shutil.rmtree(folder)  # the name is free for the next try
            elif before is not None:
                written.write_text(before, encoding="utf-8")
            raise


def _resumed(
    resume: str, file: Path | None, name: str | None, init_from: str | None, overrides: tuple[str, ...]
) -> tuple[Checkpoint, RunConfig, Path]:
    """The checkpoint to go on from, the configuration to go on with, and the run's folder."""
    from zeropp_ray.checkpoint.reader import find
    from zeropp_ray.checkpoint.resume import resumed

    if (file, name, init_from) != (None, None, None):
        raise ConfigError(
            "--resume takes its settings and weights from the checkpoint; leave out FILE, --name and --init-from, and "
            "use --set"
        )
    checkpoint = find(resume, lambda text: click.echo(f"warning: {text}", err=True))
    folder = checkpoint.path.parent.parent
    config = resumed(checkpoint, overrides)
    run = dataclasses.replace(config.run, name=folder.resolve().name, dir=str(folder.resolve().parent))
    return checkpoint, dataclasses.replace(config, run=run), folder


def _completed(config: RunConfig) -> RunConfig:
    """Every automatic value written out, a name, and a data path that does not depend on the working folder."""
    config = config.resolved()
    run, data = config.run, config.data
    if not run.name:
        model = re.split("[.:]", config.model.factory)[-2] if config.model.factory else config.model.family
        run = dataclasses.replace(run, name=f"{model}-{time.strftime('%Y%m%d-%H%M%S')}")
    if data.path:
        data = dataclasses.replace(data, path=str(Path(data.path).expanduser().absolute()))
    return dataclasses.replace(config, run=run, data=data)


def _make_folder(folder: Path, config: RunConfig) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise ConfigError(
            f"run.dir = {config.run.dir!r}: cannot write {folder}: {error.strerror};"
            " choose a folder that you can write to with --set run.dir=FOLDER"
        ) from error


def _check_unused(folder: Path, config: RunConfig) -> None:
    """Under the run's lock, so that of two that begin at once one is refused and neither is harmed."""
    if any(path.name != LOCK for path in folder.iterdir()):
        raise ConfigError(
            f"run.name = {config.run.name!r}: {folder} is not empty; choose another with --name, or go on with"
            f" --resume {shlex.quote(str(folder))}"
        )


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the run's lock; the system takes it back if the process is killed. ConfigError if another process has it."""
    with (folder / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another process trains this run; wait for it, or choose another run"
            ) from None
        yield


def _run(config: RunConfig, address: str | None, folder: Path, source: str, checkpoint: Checkpoint | None) -> None:
    log = folder / "log.txt"
    with quiet(log) as console:
        reporter = Reporter(console, config, source)
        try:
            from actors.run import run_training

            summary = run_training(config, address=address, run_dir=folder, on_event=reporter, resume=checkpoint)
        except (ConfigError, Stopped):
            raise
        except (KeyboardInterrupt, SystemExit):  # Ray turns SIGTERM into the second
            if checkpoint is None and not (folder / "metrics.jsonl").exists():
                shutil.rmtree(folder)
                raise ZeroppError("stopped before the first step; nothing is left of the run") from None
            raise ZeroppError(f"stopped before the end; the steps so far are in {folder / 'metrics.jsonl'}") from None
        except ZeroppError:
            traceback.print_exc()  # into the log
            raise
        except Exception as error:
            traceback.print_exc()
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise ZeroppError(f"unexpected {cause}; the traceback is in {log}") from error
        finally:
            reporter.end()
        reporter.summary(summary, folder)
