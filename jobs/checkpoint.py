"""``zeropp checkpoint``: what a run has saved, whether it is whole, and whether two are the same."""

from __future__ import annotations

from pathlib import Path

import click

from zeropp_ray.errors import ConfigError, ZeroppError


@click.group()
def checkpoint() -> None:
    """List, verify and compare checkpoints.

    A checkpoint is a folder of safetensors files and a manifest, named by parameter and independent of the layout:

    \b
      from safetensors.torch import load_file
      load_file("runs/first/checkpoints/step-00000200/weights-000-000.safetensors")
    """


@checkpoint.command(name="ls")
@click.argument("run", type=click.Path(path_type=Path))
def list_checkpoints(run: Path) -> None:
    """List the checkpoints of RUN, newest first: step, tokens, size, and what is wrong with it if something is."""
    from jobs.report import size
    from zeropp_ray.checkpoint.reader import folder_of_run, folders, open_checkpoint

    run = folder_of_run(run)
    for path in folders(run):
        try:
            found = open_checkpoint(path)
        except ConfigError as error:
            click.echo(f"{path.name}  {error}")
            continue
        total = sum(entry.bytes for entry in found.manifest.files.values())
        click.echo(f"{path.name}  step {found.step}  {found.manifest.progress.tokens:,} tokens  {size(total)}")


@checkpoint.command()
@click.argument("where", type=click.Path(path_type=Path))
def verify(where: Path) -> None:
    """Read every byte of the checkpoints of WHERE, a run or a checkpoint, and compare it with its checksum.

    Exit code 1 if one is damaged.
    """
    from zeropp_ray.checkpoint.manifest import NAME
    from zeropp_ray.checkpoint.reader import folder_of_run, folders, open_checkpoint

    damaged = 0
    paths = [where] if (where / NAME).exists() else list(folders(folder_of_run(where)))
    for path in paths:
        try:
            wrong = open_checkpoint(path).verify()
        except ConfigError as error:
            wrong = [str(error).removeprefix(f"{path}: ")]
        damaged += bool(wrong)
        click.echo(f"{path}: {'; '.join(wrong) or 'good'}")
    if damaged:
        raise ZeroppError(f"{damaged} of {len(paths)} checkpoints damaged")


@checkpoint.command()
@click.argument("where", type=click.Path(path_type=Path))
@click.option("--state", is_flag=True, help="Take in the optimizer, the step and the cursor too.")
def digest(where: Path, state: bool) -> None:
    """Print one number for all weights of WHERE, a checkpoint or the newest of a run.

    Equal numbers mean equal weights, bit for bit.
    """
    from zeropp_ray.checkpoint.reader import find

    click.echo(find(where).digest(state=state))
