"""``zeropp config``: every setting written out, a file to start from, and what a run would be; and the arguments that
change settings, which commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from zeropp_ray.config import RunConfig, load_config, starter
from zeropp_ray.errors import ConfigError
from zeropp_ray.schedule import AUTO


def configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the arguments ``file`` and ``overrides``, as ``load_config`` takes them."""
    command = click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting; can be repeated."
    )(command)
    return click.argument("file", required=False, type=click.Path(path_type=Path))(command)


def decided(config: RunConfig) -> RunConfig:
    """The same run, with the unit and the memory limit written out if they follow from what the chunks cost."""
    if config.parallel.unit != AUTO:
        return config
    from zeropp_ray.planner.plan import tuned  # torch is for those who need it

    return tuned(config)


class _ShowByDefault(click.Group):
    """``zeropp config FILE`` is short for ``zeropp config show FILE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ShowByDefault, short_help="Every setting of a run: show, check, or start a file.")
def config() -> None:
    """Every setting of a run, with its meaning and unit.

    \b
      zeropp config init run.toml     a file to start from
      zeropp config check run.toml    what the run would be
      zeropp config show run.toml     all settings, those left out too; `show` can be left out
    """


@config.command(short_help="Print every setting of a run, and what it means.")
@configured
def show(file: Path | None, overrides: tuple[str, ...]) -> None:
    """Print every setting of a run, with its meaning and unit, as TOML.

    What FILE and --set leave out has its default.
    """
    click.echo(load_config(file, overrides).to_toml(), nl=False)


@config.command(short_help="Write a commented file to start from.")
@click.argument("file", default="run.toml", type=click.Path(path_type=Path))
def init(file: Path) -> None:
    """Write FILE, run.toml if it is left out: what is changed most often as it is by default, all else as comments.

    \b
    Then:
      zeropp config check run.toml
      zeropp train run.toml
    """
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(starter())
    except FileExistsError:
        raise ConfigError(f"{file}: is there already; choose another name") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}; choose another folder") from None
    click.echo(f"{file} written; see what it comes to with: zeropp config check {file}")


@config.command(short_help="Say what a run would be, without starting it.")
@configured
def check(file: Path | None, overrides: tuple[str, ...]) -> None:
    """Check everything that can be checked without starting the run: settings, model, schedule and data.

    Prints what it would be: its units and global batch, members, predicted memory, the tokens that it would read.
    """
    from jobs.report import plan_table
    from zeropp_ray.data.corpus import load_corpus
    from zeropp_ray.planner.plan import make_plan

    settings = decided(load_config(file, overrides).resolved())
    plan = make_plan(settings)
    corpus = load_corpus(settings, plan.description.vocab)
    click.echo(plan_table(plan.table(settings), settings, corpus.label))
    click.echo("\nThis configuration can run.")
