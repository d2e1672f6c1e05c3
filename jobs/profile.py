"""``zeropp profile``: measure what a step of a run costs on this machine, for schedules that are made from it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.config import configured
from zeropp_ray.config import load_config
from zeropp_ray.errors import ConfigError

if TYPE_CHECKING:
    from zeropp_ray.planner.plan import Plan
    from zeropp_ray.schedule import Costs


@click.command(name="profile", short_help="Measure what a step costs, for the schedule.")
@configured
@click.option("--out", default="costs.json", show_default=True, type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--microbatches", type=int, default=7, show_default=True, help="How many each chunk runs; the median counts."
)
@click.option(
    "--transfer",
    type=float,
    help="Seconds that a message between stages takes.  [default: measured between two processes of this machine]",
)
@click.option(
    "--vote", type=float, default=0.0, show_default=True, help="Seconds of the round that ends a step; not measured."
)
def profile(
    file: Path | None, overrides: tuple[str, ...], out: Path, microbatches: int, transfer: float | None, vote: float
) -> None:
    """Measure what a step of a run costs, and write it to a file.

    A few micro-batches go through each chunk of the model, one chunk after the other in this process: forward (F),
    input gradient (B), weight gradient (W), and the update of its weights. As many other processes are at work
    meanwhile as the run has members on so many cores. Then processes of this machine measure gathers and reduces among
    the members of a stage, and a message between stages. On a GPU (resources.device=cuda) exchanges are not measured.

    FILE and --set are a run's. Measure on a machine like the run's, with nothing else on it. The file is good for this
    model, dtype, micro-batch size, cut into chunks and number of shards, and is refused for another.

    \b
    Examples:
      zeropp profile run.toml --out costs.json
      zeropp train run.toml --set parallel.costs=costs.json --set parallel.unit=auto
      zeropp schedule --stages 2 --chunks 2 --costs costs.json
    """
    if microbatches < 1:
        raise ConfigError(f"--microbatches = {microbatches}: must be at least 1")
    if out.exists():
        raise ConfigError(f"--out = {out}: is there already; choose another name")
    for name, value in (("transfer", transfer), ("vote", vote)):
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"--{name} = {value}: must be at least 0")
    import torch

    from zeropp_ray.allocator import keep_freed_memory
    from zeropp_ray.planner.cost_file import identity, write_costs
    from zeropp_ray.planner.plan import make_plan
    from zeropp_ray.planner.profile import measure

    keep_freed_memory()  # as a member does: else tasks would pay for fresh pages
    config = load_config(file, (*overrides, "parallel.costs="))
    plan = make_plan(config.resolved())
    costs, link = measure(config, plan, microbatches, transfer, vote)
    notes = {
        "microbatches": microbatches,
        "threads": max(1, int(config.resources.cpus)),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "link": link and {"latency_s": link.latency, "bytes_per_s": link.bandwidth},
    }
    write_costs(out, identity(config, plan.ranges), costs, notes)
    click.echo(_table(plan, costs))
    click.echo(f"\n{out} written; use it with: zeropp train --set parallel.costs={out}")


def _table(plan: Plan, costs: Costs) -> str:
    """A line for each model chunk, in milliseconds, and one for what happens once."""
    named = {"F": costs.F, "B": costs.B, "W": costs.W, "gather": costs.gather, "reduce": costs.reduce}
    named["update"] = costs.optimizer
    lines = ["chunk  layers" + "".join(f"{name + ' ms':>11}" for name in named)]
    for c, blocks in enumerate(plan.ranges):
        lines.append(f"{c:5}  {len(blocks):6}" + "".join(f"{1000 * values[c]:11.3f}" for values in named.values()))
    return "\n".join(
        [*lines, f"a message between stages: {1000 * costs.comm:.3f} ms, each end {1000 * costs.post:.3f} ms"]
    )
