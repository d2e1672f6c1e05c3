"""``zeropp train``: checks everything that can be checked, makes the run's folder, trains, and tells how it went."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actors import lease
from actors.locks import DRIVER, JOB
from actors.mirror import Held, held
from actors.stopping import StopSignals
from jobs.config import configured, decided
from jobs.quiet import quiet
from jobs.report import Reporter, plan_table
from zeropp_ray.checkpoint.manifest import folders
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.errors import ConfigError, Stopped, ZeroppError
from zeropp_ray.faults import Fault, read_faults
from zeropp_ray.files import expanded
from zeropp_ray.shadow import check_not_shadowed
from zeropp_ray.uri import Place, UriPath, absolute, place, remove_tree

if TYPE_CHECKING:
    from zeropp_ray.checkpoint.reader import Checkpoint


@click.command()
@configured
@click.option("--name", help="Name of the run, and of its folder; short for --set run.name=NAME.")
@click.option(
    "--resume", metavar="RUN", help="Go on from the newest good checkpoint of a run: its folder, name or URI."
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
@click.option(
    "--inject",
    multiple=True,
    metavar="FAULT",
    help="A fault to put into the run, to see it recover; can be repeated. `zeropp drill --help` has them all.",
)
def train(
    file: Path | None,
    overrides: tuple[str, ...],
    name: str | None,
    resume: str | None,
    init_from: str | None,
    address: str | None,
    dry_run: bool,
    inject: tuple[str, ...],
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
      zeropp train --name first --set run.dir=s3://my-bucket/runs
      zeropp train --inject 'kill stage=1 member=0 step=20 at=B'

    Ctrl-C or SIGTERM stops after the step at hand, saves, and says how to go on; once more, 2 s later or more, ends the
    run at once. A resumed run takes its settings from the checkpoint. Stages, chunks, shards, replicas and steps may
    change, if a step still takes as many sequences. RUN may also be one checkpoint of a run, in its folder: what came
    after it is given up.

    \b
    What is written, in runs/NAME/:
      config.toml    the configuration, with every setting
      metrics.jsonl  a line for each step and evaluation
      events.jsonl   recoveries from faults, and how the run ended
      summary.json   whether it is done or failed, and what was reached
      checkpoints/   weights and optimizer by parameter name, for any layout
      log.txt        what Ray and torch had to say
      run-id         tells the run's checkpoints from those of others

    Exit code: 0 done, 1 failed, 2 wrong usage or configuration, 70 no progress over several recoveries, 75 stopped with
    a checkpoint: resume it.
    """
    # Ray's workers look first in the folder that the run was started in.
    check_not_shadowed([str(Path.cwd()), *sys.path], "zeropp_ray", "actors")
    if resume is not None and (file, name, init_from) != (None, None, None):
        raise ConfigError(
            "--resume takes its settings and weights from the checkpoint; leave out FILE, --name and --init-from, and "
            "use --set"
        )
    stop = StopSignals()
    with nullcontext() if dry_run else stop:
        try:
            if resume is not None:
                return _go_on(place(resume, f"--resume {resume}"), overrides, address, dry_run, stop, inject)
            overrides = overrides if name is None else (*overrides, f"run.name={name}")
            overrides = overrides if init_from is None else (*overrides, f"model.init_from={init_from}")
            _begin(completed(load_config(file, overrides)), address, dry_run, stop, inject)
        except KeyboardInterrupt:
            raise ZeroppError("stopped before the run began") from None


def _begin(config: RunConfig, address: str | None, dry_run: bool, stop: StopSignals, inject: Sequence[str]) -> None:
    """Train a new run, in a new folder."""
    runs: Any = place(config.run.dir, f"run.dir = {config.run.dir!r}")
    run = runs / config.run.name
    config, source = with_text(config)
    faults = read_faults(inject, config)
    if dry_run:
        return _show_plan(config, source)
    stop.check()
    if isinstance(run, Path):
        _make_folder(run, config)
    with held(run, _say) as ours:
        _check_unused(run, config)
        try:
            _run(config, address, ours, source, stop, faults)
        except ConfigError:  # nothing ran
            _remove(ours)  # the name is free for the next try
            raise
        except KeyboardInterrupt:
            raise _interrupted(ours) from None


def _go_on(
    where: Place,
    overrides: tuple[str, ...],
    address: str | None,
    dry_run: bool,
    stop: StopSignals,
    inject: Sequence[str],
) -> None:
    """Train a run further, from the checkpoint ``where`` or from the newest good one of the run ``where``."""
    from zeropp_ray.checkpoint.manifest import is_checkpoint
    from zeropp_ray.checkpoint.reader import folder_of_run, latest, open_own, run_of
    from zeropp_ray.checkpoint.resume import resumed

    named = is_checkpoint(where)
    run = run_of(where) if named else folder_of_run(where)
    if run is None:
        raise ConfigError(f"--resume {where}: lies in no run; put it into the folder checkpoints of its own")
    with held(run, _say) as ours:  # from here on nobody else removes checkpoints
        if named:
            checkpoint = open_own(where.resolve(), run)
        else:
            checkpoint = latest(run, _say)
        ours.go_on_from(checkpoint.path)
        config, source = with_text(decided(_from_anywhere(resumed(checkpoint, overrides))))
        faults = read_faults(inject, config, first=checkpoint.step + 1)
        if dry_run:
            return _show_plan(config, source, checkpoint)
        written = ours.folder / "config.toml"
        before = written.read_text(encoding="utf-8") if written.exists() else None
        try:
            _run(config, address, ours, source, stop, faults, checkpoint)
        except (ConfigError, KeyboardInterrupt) as error:
            newer = next(folders(run), checkpoint.path).name > checkpoint.path.resolve().name
            if before is not None and not newer:  # the run is where it was
                written.write_text(before, encoding="utf-8")
            if isinstance(error, ConfigError):
                raise
            again = shlex.quote(str(where if named and not newer else run))
            raise Stopped(f"stopped at once; go on with: zeropp train --resume {again}") from None


def with_text(config: RunConfig) -> tuple[RunConfig, str]:
    """The run with its tokenizer written out, and its text in words."""
    from zeropp_ray.data.corpus import load_corpus

    corpus = load_corpus(config)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=corpus.tokenizer)), corpus.label


def _show_plan(config: RunConfig, source: str, resume: Checkpoint | None = None) -> None:
    """What the run would be, with all checks of a real one; ``resume``: the checkpoint that it would go on from."""
    from actors.run import planned

    plan, _ = planned(config, resume)
    click.echo(plan_table(plan.table(config), config, source))


def completed(config: RunConfig) -> RunConfig:
    """Every automatic value written out, a name, and a data path that does not depend on the working folder."""
    return named(decided(_from_anywhere(config.resolved())))


def named(config: RunConfig) -> RunConfig:
    """The same run, with a name if it has none: that of the model, and the time."""
    if config.run.name:
        return config
    model = re.split("[.:]", config.model.factory)[-2] if config.model.factory else config.model.family
    name = f"{model}-{time.strftime('%Y%m%d-%H%M%S')}"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))


def _from_anywhere(config: RunConfig) -> RunConfig:
    """The same run with paths of data and costs that do not depend on the working folder."""
    data, costs = config.data.path, config.parallel.costs
    path = data and absolute(data, f"data.path = {data!r}")
    costs = costs and str(expanded(costs, f"parallel.costs = {costs!r}").absolute())
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=path),
        parallel=dataclasses.replace(config.parallel, costs=costs),
    )


def _make_folder(folder: Path, config: RunConfig) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JOB).touch()
    except OSError as error:
        raise ConfigError(
            f"run.dir = {config.run.dir!r}: cannot write {folder}: {error.strerror};"
            " choose a folder that you can write to with --set run.dir=FOLDER"
        ) from error


def _check_unused(folder: Place, config: RunConfig) -> None:
    """Under the run's lock, so that of two that begin at once one is refused and neither is harmed."""
    if not all(path.name.startswith((JOB, DRIVER, lease.NAME)) for path in folder.iterdir()):
        saved = next(folders(folder), None) is not None
        raise ConfigError(
            f"run.name = {config.run.name!r}: {folder} is not empty; choose another with --name, or "
            + (f"go on with --resume {shlex.quote(str(folder))}" if saved else "remove it, it holds no checkpoint")
        )


def _say(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def _remove(run: Held) -> None:
    shutil.rmtree(run.folder, ignore_errors=True)
    if isinstance(run.run, UriPath):
        run.folder.mkdir(exist_ok=True)  # a working copy, of nothing
        lease.check(run.run, run.lease)  # another job may have the run by now
        for path in run.run.iterdir():
            if not path.name.startswith(lease.NAME):  # which goes last
                path.unlink(missing_ok=True) if path.is_file() else remove_tree(path)


def _interrupted(run: Held) -> ZeroppError:
    """A run was ended before it could save: what is left of it, in words. Without a step nothing is."""
    metrics, newest = run.folder / "metrics.jsonl", next(folders(run.run), None)
    if newest is not None:
        return Stopped(
            f"stopped at once; the newest checkpoint is {newest.name}, go on with: zeropp train --resume "
            f"{shlex.quote(str(run.run))}"
        )
    if metrics.exists() and metrics.stat().st_size:
        return ZeroppError(f"stopped at once, before a checkpoint; the steps so far are in {run.run / metrics.name}")
    _remove(run)  # the driver may be about to end
    return ZeroppError("stopped before the first step; nothing is left of the run")


def _run(
    config: RunConfig,
    address: str | None,
    run: Held,
    source: str,
    stop: StopSignals,
    faults: tuple[Fault, ...],
    checkpoint: Checkpoint | None = None,
) -> None:
    from zeropp_ray.data.text import keep_tokenizer

    folder = run.folder
    try:
        (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        keep_tokenizer(config, folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
    log = folder / "log.txt"
    with quiet(log) as console:
        reporter = Reporter(console, config, source)
        try:
            from actors.run import run_training

            summary = run_training(
                config,
                address=address,
                run_dir=folder,
                uri=run.run if isinstance(run.run, UriPath) else None,
                lease=run.lease,
                on_event=reporter,
                resume=checkpoint,
                stop=stop,
                inject=faults,
            )
        except (ConfigError, Stopped):
            raise
        except ZeroppError:
            traceback.print_exc()  # into the log
            raise
        except Exception as error:
            traceback.print_exc()
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise ZeroppError(f"unexpected {cause}; the traceback is in {run.run / log.name}") from error
        finally:
            reporter.end()
        reporter.summary(summary, run.run)
        if summary["error"]:
            raise ZeroppError(summary["error"])
