"""``zeropp schedule``: see the order in which a step runs, and what it costs, before anything is started."""

from __future__ import annotations

import json
import os
import shutil
import sys

import click

from zeropp_ray.errors import ConfigError
from zeropp_ray.schedule import RECOMPUTE, REDUCE, Costs, compile_program, resolve, to_grid, to_json


@click.command(name="schedule", context_settings={"show_default": True, "max_content_width": 100})
@click.option("--stages", type=int, default=2, help="Pipeline stages P: one group of actors each.")
@click.option("--chunks", type=int, default=2, help="Chunks V per stage; the model is cut in P·V pieces.")
@click.option("--microbatches", type=int, default=8, help="Micro-batches N per step and member; at least P.")
@click.option(
    "--unit",
    type=int,
    default=0,
    help="Least number U of micro-batches in a scheduling unit, P to N. A larger unit gathers parameters less often "
    "and hides slow links, and keeps more activations. 0: min(N, 2P).",
)
@click.option(
    "--cost",
    metavar="F,B,W,COMM",
    default="1,1,1,0",
    help="Time that a chunk takes for a micro-batch's forward, input gradient and weight gradient, and that a "
    "transfer between stages takes; in any one unit.",
)
@click.option(
    "--memory-limit",
    type=float,
    default=0.0,
    help="Most live activations, in whole-stage micro-batches: a chunk's counts 1/V from its forward to its weight "
    "gradient, if it is recomputed from its second forward on. 0: largest unit + P/V, or 2P/V "
    "with --recompute; the least for one stage.",
)
@click.option(
    "--prefetch", is_flag=True, help="Gather the next chunk just ahead of its phase, so that two are resident."
)
@click.option(
    "--recompute",
    type=click.Choice(RECOMPUTE),
    default="none",
    help="Keep a chunk's input alone and run its forward again for the backward. selective: but keep the last chunk of "
    "a stage, whose backwards follow closely.",
)
@click.option(
    "--reduce",
    type=click.Choice(REDUCE),
    default="unit",
    help="When a chunk's gradients are summed over its members: after each unit, for the least memory, or once a step, "
    "for the least traffic.",
)
@click.option(
    "--format", "form", type=click.Choice(["grid", "json"]), default="grid", help="For the eye, or for a program."
)
def schedule(
    stages: int,
    chunks: int,
    microbatches: int,
    unit: int,
    cost: str,
    memory_limit: float,
    prefetch: bool,
    recompute: str,
    reduce: str,
    form: str,
) -> None:
    """Print the ZeroPP schedule of one training step.

    Inside a scheduling unit a stage runs all micro-batches of a chunk before it moves to the next, so a chunk's
    parameters are gathered once for all of them. The backward is split: input gradients (B) are on the critical path,
    weight gradients (W) fill the gaps. The schedule is checked before it is shown: complete, within the limit, free of
    deadlock.

    \b
    Examples:
      zeropp schedule --stages 4 --chunks 2 --microbatches 8 --unit 4
      zeropp schedule --stages 8 --microbatches 32 --cost 1,1.3,0.7,0.25     # uneven costs, a slow link
      zeropp schedule --stages 4 --microbatches 16 --recompute selective     # the forward again, for less memory
      zeropp schedule --stages 8 --microbatches 32 --unit 8 --memory-limit 8 --format json
    """
    costs = _parse_cost(cost, stages * chunks)
    spec = resolve(stages, chunks, microbatches, unit, memory_limit, prefetch, costs, recompute, reduce, name=_option)
    program = compile_program(spec)
    if form == "json":
        click.echo(json.dumps(to_json(program)))
    else:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        click.echo(to_grid(program, shutil.get_terminal_size((120, 24)).columns, color), color=color)


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _parse_cost(text: str, model_chunks: int) -> Costs:
    """Whole numbers stay whole, so that they are printed as they were given."""
    try:
        F, B, W, comm = (int(part) if part.strip().lstrip("+-").isdigit() else float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--cost = {text}: not four numbers; give those of forward, input gradient, weight gradient and transfer, "
            "such as 1,1,1,0"
        ) from None
    return Costs.uniform(max(model_chunks, 1), F, B, W, comm)
