"""``zeropp schedule``: see the order in which a step runs, and what it costs, before anything is started."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from zeropp_ray.errors import ConfigError
from zeropp_ray.placement import stage_and_chunk
from zeropp_ray.planner.cost_file import read_costs
from zeropp_ray.report import to_html, to_svg, to_trace
from zeropp_ray.schedule import (
    AUTO,
    POLICIES,
    RECOMPUTE,
    REDUCE,
    Costs,
    Program,
    compare,
    compile_program,
    hops,
    resolve,
    to_grid,
    to_json,
    to_table,
    tune,
)
from zeropp_ray.schedule.compare import Row

_PICTURES = ("svg", "html", "trace")


@click.command(name="schedule", context_settings={"show_default": True, "max_content_width": 100})
@click.option("--stages", type=int, default=2, help="Pipeline stages P: one group of actors each.")
@click.option("--chunks", type=int, default=2, help="Chunks V per stage; the model is cut in P·V pieces.")
@click.option("--microbatches", type=int, default=8, help="Micro-batches N per step and member; at least P.")
@click.option(
    "--unit",
    metavar="INTEGER|auto",
    default="0",
    help="Least number U of micro-batches in a scheduling unit, P to N. A larger unit gathers parameters less often "
    "and hides slow links, and keeps more activations. 0: min(N, 2P). auto: by a replay of each that fits the limit, "
    "2P by default then, the fewest units within 0.5% of the fastest; then the least limit that loses them no time.",
)
@click.option(
    "--cost",
    metavar="F,B,W,COMM",
    default="1,1,1,0",
    help="Time that a chunk takes for a micro-batch's forward, input gradient and weight gradient, and that a "
    "transfer between stages takes; in any one unit.",
)
@click.option(
    "--costs",
    "cost_file",
    type=click.Path(path_type=Path),
    help="Take them from a file of `zeropp profile`, for each chunk its own; instead of --cost.",
)
@click.option(
    "--besides",
    metavar="GATHER,REDUCE,UPDATE,VOTE",
    default="0,0,0,0",
    help="Time of the rest of a step: to gather a chunk's parameters and to reduce its gradients, which are under way "
    "while tasks run, to update its weights, and of the vote on the step.",
)
@click.option(
    "--nodes", type=int, default=1, help="Nodes that the stages lie on, in runs of equal length; with --between."
)
@click.option(
    "--between",
    type=float,
    help="Time that a transfer between nodes takes; COMM of --cost, or of --costs, is then that inside a node.",
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
    "--policy",
    type=click.Choice([*POLICIES, "all"]),
    default="zeropp",
    help="Whose order: ZeroPP's, which follows from the costs, or that of a known schedule, which decides the unit and "
    "the live activations, and may want a number of chunks. all: see --compare.",
)
@click.option(
    "--compare",
    "side_by_side",
    is_flag=True,
    help="One line of numbers for the policy, or for each of --policy all, instead of the schedule. The work of a "
    "stage is the same for all: V chunks of the given cost.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["grid", "json", *_PICTURES]),
    default="grid",
    help="grid: for a terminal. json: for a program. svg: a picture, with what is held in memory. html: the same, and "
    "says what is under the pointer. trace: for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "--width",
    type=click.IntRange(min=1200, max=100_000),
    help="Pixels of an svg.  [default: room for the micro-batches' numbers]",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write instead of printing.")
def schedule(
    stages: int,
    chunks: int,
    microbatches: int,
    unit: str,
    cost: str,
    cost_file: Path | None,
    besides: str,
    nodes: int,
    between: float | None,
    memory_limit: float,
    prefetch: bool,
    recompute: str,
    reduce: str,
    policy: str,
    side_by_side: bool,
    form: str,
    width: int | None,
    out: Path | None,
) -> None:
    """Print or draw the schedule of one training step.

    Inside a scheduling unit a stage runs all micro-batches of a chunk before it moves to the next, so a chunk's
    parameters are gathered once for all of them. The backward is split: input gradients (B) are on the critical path,
    weight gradients (W) fill the gaps. The schedule is checked before it is shown: complete, within the limit, free of
    deadlock.

    \b
    Examples:
      zeropp schedule --stages 4 --chunks 2 --microbatches 8 --unit 4
      zeropp schedule --stages 8 --microbatches 32 --cost 1,1.3,0.7,0.25     # uneven costs, a slow link
      zeropp schedule --stages 8 --microbatches 32 --besides 2,3,1,1         # gathers, reduces and the end count too
      zeropp schedule --stages 4 --microbatches 16 --recompute selective     # the forward again, for less memory
      zeropp schedule --stages 8 --microbatches 32 --unit 8 --memory-limit 8 --format json
      zeropp schedule --stages 4 --microbatches 16 --policy zb-v
      zeropp schedule --stages 4 --microbatches 16 --format html --out step.html
      zeropp schedule --stages 8 --microbatches 32 --policy all --compare
    """
    if width is not None and form != "svg":
        raise ConfigError(f"--width = {width}: is for --format svg; add that, or leave it out")
    times, rest = _parse_cost(cost), _four("--besides", besides, "gather, reduce, update and vote", "2,3,1,1")
    if not 1 <= nodes <= max(stages, 1):
        raise ConfigError(f"--nodes = {nodes}: stages lie on 1 to {stages} nodes")
    if nodes == 1 and between:
        raise ConfigError(f"--between = {between:g}: there is one node; give --nodes too")
    if nodes > 1 and between is None:
        raise ConfigError(f"--nodes = {nodes}: what does a transfer between them take? give --between too")
    between = between or 0.0
    costs = Costs.uniform(max(stages * chunks, 1), *times, *rest)
    if cost_file is not None:
        if any(rest):
            raise ConfigError(f"--besides = {besides}: is in {cost_file} too; leave out --besides, or --costs")
        _, costs = read_costs(cost_file, "--costs")
    if nodes > 1 and POLICIES.get(policy) and len(costs.F) == stages * chunks:
        owners = [stage_and_chunk(POLICIES[policy].placement, stages, c)[0] for c in range(stages * chunks)]
        costs = dataclasses.replace(costs, hops=hops(owners, stages, nodes, costs.comm, between))
    choices = (_parse_unit(unit), memory_limit, prefetch)
    if side_by_side:
        if cost_file is not None:
            raise ConfigError(f"--costs = {cost_file}: not with --compare, whose policies cut the work in other chunks")
        if form in _PICTURES:
            raise ConfigError(f"--format = {form}: draws one schedule; leave out --compare, or use grid or json")
        names = list(POLICIES) if policy == "all" else [policy]
        rows = compare(
            names,
            stages,
            chunks,
            microbatches,
            times,
            *choices,
            recompute,
            reduce,
            name=_option,
            besides=rest,
            nodes=nodes,
            between=between,
        )
        _put(json.dumps([_plain(row) for row in rows]) if form == "json" else to_table(rows, chunks), out)
        return
    if policy == "all":
        raise ConfigError("--policy = all: is for --compare; add that, or name one policy")
    spec = resolve(stages, chunks, microbatches, *choices, costs, recompute, reduce, policy, _option)
    program = compile_program(tune(spec, memory_limit) if choices[0] == AUTO else spec)
    if form == "json":
        _put(json.dumps(to_json(program)), out)
    elif form in _PICTURES:
        _put(_picture(program, form, width), out)
    else:
        color = out is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
        _put(to_grid(program, shutil.get_terminal_size((120, 24)).columns, color), out, color)


def _picture(program: Program, form: str, width: int | None) -> str:
    if form == "svg":
        return to_svg(program, width or 0)
    return to_html(program) if form == "html" else json.dumps(to_trace(program))


def _put(text: str, out: Path | None, color: bool = False) -> None:
    """Print it, or write it to a file and say so."""
    if out is None:
        click.echo(text, color=color)
        return
    try:
        out.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out = {out}: cannot be written ({error.strerror}); name a file in a folder that is there"
        ) from None
    click.echo(f"written to {out}")


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _plain(row: Row | tuple[str, str]) -> dict[str, Any]:
    return row._asdict() if isinstance(row, Row) else {"policy": row[0], "problem": row[1]}


def _parse_unit(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text  # AUTO, or refused with what is known


def _parse_cost(text: str) -> tuple[float, float, float, float]:
    return _four("--cost", text, "forward, input gradient, weight gradient and transfer", "1,1,1,0")


def _four(name: str, text: str, what: str, example: str) -> tuple[float, float, float, float]:
    """Whole numbers stay whole, so that they are printed as they were given."""
    try:
        a, b, c, d = (int(part) if part.strip().lstrip("+-").isdigit() else float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} = {text}: not four numbers; give those of {what}, such as {example}") from None
    return a, b, c, d
