"""The command line ``zeropp``. Commands import torch and Ray only when they run, so that help is instant."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import click

from jobs.checkpoint import checkpoint
from jobs.cluster import list_jobs, logs, stop
from jobs.config import config
from jobs.data import data
from jobs.drill import drill
from jobs.evaluate import evaluate
from jobs.export import export
from jobs.plan import plan
from jobs.profile import profile
from jobs.sample import sample
from jobs.schedule import schedule
from jobs.status import status
from jobs.submit import submit
from jobs.train import train
from zeropp_ray import __version__
from zeropp_ray.errors import ConfigError, ZeroppError


class OneLineErrors(click.Command):
    """Shows an error that a user can act on as one line, and exits with its code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            _check_working_folder()
            return super().invoke(ctx)
        except ZeroppError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            click.echo(f"error: {error.filename or 'a file'} cannot be written: {error.strerror}", err=True)
            ctx.exit(1)


class _Group(OneLineErrors, click.Group):
    pass


def _check_working_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the folder that this was started in is gone; change to one that is there") from None


@click.group(cls=_Group)
@click.version_option(__version__, prog_name="zeropp")
def zeropp() -> None:
    """Train transformer language models without tensor parallelism: pipeline stages with the ZeroPP schedule, and
    parameters sharded inside each stage (ZeRO-3), as actors on Ray.

    \b
    Start here:
      zeropp train              train a small model on this machine
      zeropp config init        a file with every setting of a run, and what it means
      zeropp status RUN         where a run is
      zeropp submit --help      train on a Ray cluster
      zeropp data prepare       make text of your own into tokens, once
      zeropp plan --help        pick the layout for a model and devices
      zeropp schedule --help    look at a schedule before you use it

    Exit code: 0 done, 1 failed, 2 wrong usage or configuration, 70 no progress over several recoveries, 75 stopped with
    a checkpoint.
    """


for command in (
    *(train, submit, list_jobs, logs, stop, status),
    *(data, config, plan, profile, schedule, checkpoint, sample, evaluate, export, drill),
):
    zeropp.add_command(command)


def main() -> None:
    """Entry point of the installed command."""
    zeropp(prog_name="zeropp")


if __name__ == "__main__":
    main()
