"""``zeropp config``: every setting written out; and the arguments that change settings, which commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from zeropp_ray.config import load_config


def configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the arguments ``file`` and ``overrides``, as ``load_config`` takes them."""
    command = click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting; can be repeated."
    )(command)
    return click.argument("file", required=False, type=click.Path(path_type=Path))(command)


@click.command(short_help="Print every setting of a run, and what it means.")
@configured
def config(file: Path | None, overrides: tuple[str, ...]) -> None:
    """Print every setting of a run, with its meaning and unit, as TOML.

    What FILE and --set leave out has its default. A good start for a file of your own:

    \b
      zeropp config > run.toml
      zeropp train run.toml
    """
    click.echo(load_config(file, overrides).to_toml(), nl=False)
