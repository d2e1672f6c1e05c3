"""``zeropp train``: checks everything that can be checked, makes the run's folder, trains, and tells how it went."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import time
import traceback
from pathlib import Path

import click

from jobs.config import configured
from jobs.quiet import quiet
from jobs.report import Reporter, plan_table
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.shadow import check_not_shadowed


@click.command()
@configured
@click.option("--name", help="Name of the run, and of its folder; short for --set run.name=NAME.")
@click.option("--address", metavar="ADDRESS", help="Join the Ray cluster at HOST:PORT, or 'auto'; else start one here.")
@click.option("--dry-run", is_flag=True, help="Check everything, show the table of the plan, and stop.")
def train(file: Path | None, overrides: tuple[str, ...], name: str | None, address: str | None, dry_run: bool) -> None:
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

    \b
    What is written, in runs/NAME/:
      config.toml    the configuration, with every setting
      metrics.jsonl  a line for each step and evaluation
      summary.json   what was reached
      log.txt        what Ray and torch had to say

    Exit code: 0 done, 1 failed, 2 wrong usage or configuration.
    """
    if name is not None:
        overrides = (*overrides, f"run.name={name}")
    config = _completed(load_config(file, overrides))
    # Ray's workers look first in the folder that the run was started in.
    check_not_shadowed([str(Path.cwd()), *sys.path], "zeropp_ray", "actors")

    from zeropp_ray.data.corpus import load_corpus

    corpus = load_corpus(config)
    source = f"{corpus.source}: {len(corpus.train):,} bytes, and {len(corpus.validation):,} held out"
    if dry_run:
        from zeropp_ray.planner.plan import make_plan

        click.echo(plan_table(make_plan(config).table(config), config, source))
        return
    folder = _make_folder(config)
    try:
        _run(config, address, folder, source)
    except ConfigError:
        shutil.rmtree(folder)  # nothing ran: the name is free for the next try
        raise


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


def _make_folder(config: RunConfig) -> Path:
    folder = Path(config.run.dir).expanduser() / config.run.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"run.name = {config.run.name!r}: {folder} is not empty; choose another name with --name")
        (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run.dir = {config.run.dir!r}: cannot write {folder}: {error.strerror};"
            " choose a folder that you can write to with --set run.dir=FOLDER"
        ) from error
    return folder


def _run(config: RunConfig, address: str | None, folder: Path, source: str) -> None:
    log = folder / "log.txt"
    with quiet(log) as console:
        reporter = Reporter(console, config, source)
        try:
            from actors.run import run_training

            summary = run_training(config, address=address, run_dir=folder, on_event=reporter)
        except ConfigError:
            raise
        except (KeyboardInterrupt, SystemExit):  # Ray turns SIGTERM into the second
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
