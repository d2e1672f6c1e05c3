"""``zeropp checkpoint``: what a run has saved, whether it is whole, and whether two are the same."""

from __future__ import annotations

import click

from jobs.place import PLACE
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.uri import Place


@click.group()
def checkpoint() -> None:
    """List, verify and compare checkpoints.

    A checkpoint is a folder of safetensors files and a manifest, named by parameter and independent of the layout:

    \b
      from safetensors.torch import load_file
      load_file("runs/first/checkpoints/step-00000200/weights-000-000.safetensors")

    Runs and checkpoints may be at a URI, such as s3://my-bucket/runs/first.
    """


@checkpoint.command(name="ls")
@click.argument("run", type=PLACE)
def list_checkpoints(run: Place) -> None:
    """List the checkpoints of RUN, newest first: step, tokens, size, and what is wrong with it if something is, such as
    that it is of another run.
    """
    from jobs.report import size
    from zeropp_ray.checkpoint.manifest import folders
    from zeropp_ray.checkpoint.reader import folder_of_run, open_checkpoint

    run = folder_of_run(run)
    for path in folders(run):
        try:
            found = open_checkpoint(path)
            wrong = found.misplaced(run)
        except ConfigError as error:
            click.echo(f"{path.name}  {error}")
            continue
        total = sum(entry.bytes for entry in found.manifest.files.values())
        said = (f"step {found.step}", f"{found.manifest.progress.tokens:,} tokens", size(total), *wrong)
        click.echo(f"{path.name}  {'  '.join(said)}")


@checkpoint.command()
@click.argument("where", type=PLACE)
def verify(where: Place) -> None:
    """Read every byte of the checkpoints of WHERE, a run or a checkpoint, and compare it with its checksum; and tell
    those that lie in a run and are of another.

    Exit code 1 if there is such a one, or one is damaged.
    """
    from zeropp_ray.checkpoint.manifest import folders, is_checkpoint
    from zeropp_ray.checkpoint.reader import folder_of_run, open_checkpoint, run_of

    bad = 0
    if is_checkpoint(where):
        run, paths = run_of(where), [where]
    else:
        run = folder_of_run(where)
        paths = list(folders(run))
    for path in paths:
        try:
            checkpoint = open_checkpoint(path)
            wrong = checkpoint.verify() + (checkpoint.misplaced(run) if run else [])
        except ConfigError as error:
            wrong = [str(error).removeprefix(f"{path}: ")]
        bad += bool(wrong)
        click.echo(f"{path}: {'; '.join(wrong) or 'good'}")
    if bad:
        raise ZeroppError(f"{bad} of {len(paths)} checkpoints damaged or of another run")


@checkpoint.command()
@click.argument("where", type=PLACE)
@click.option("--state", is_flag=True, help="Take in the optimizer, the step and the cursor too.")
def digest(where: Place, state: bool) -> None:
    """Print one number for all weights of WHERE, a checkpoint or the newest of a run.

    Equal numbers mean equal weights, bit for bit.
    """
    from zeropp_ray.checkpoint.reader import find

    click.echo(find(where, lambda text: click.echo(f"warning: {text}", err=True)).digest(state=state))
