"""``zeropp profile``: measure what the chunks of a model take on this machine, for schedules that are made from it."""

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


@click.command(name="profile", short_help="Measure what a model's chunks take, for the schedule.")
@configured
@click.option("--out", default="costs.json", show_default=True, type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--microbatches", type=int, default=7, show_default=True, help="How many each chunk runs; the median counts."
)
@click.option(
    "--transfer", type=float, default=0.0, show_default=True, help="Seconds between stages, which are not measured."
)
def profile(file: Path | None, overrides: tuple[str, ...], out: Path, microbatches: int, transfer: float) -> None:
    """Run a few micro-batches through each chunk of a model, one chunk after the other in this process, and write what
    forward (F), input gradient (B) and weight gradient (W) took.

    FILE and --set are a run's. Measure on a machine like the run's, with nothing else on it. The file is good for this
    model, dtype, micro-batch size and cut into chunks, and is refused for another.

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
    if not 0 <= transfer < float("inf"):
        raise ConfigError(f"--transfer = {transfer}: must be at least 0")
    import torch

    from zeropp_ray.planner.cost_file import identity, write_costs
    from zeropp_ray.planner.plan import make_plan
    from zeropp_ray.planner.profile import measure

    config = load_config(file, (*overrides, "parallel.costs="))
    plan = make_plan(config.resolved())
    costs = measure(config, plan, microbatches, transfer)
    notes = {
        "microbatches": microbatches,
        "threads": max(1, int(config.resources.cpus)),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    write_costs(out, identity(config, plan.ranges), costs, notes)
    click.echo(_table(plan, costs))
    click.echo(f"\n{out} written; use it with: zeropp train --set parallel.costs={out}")


def _table(plan: Plan, costs: Costs) -> str:
    """A line for each model chunk, in milliseconds."""
    lines = ["chunk  layers    F ms     B ms     W ms"]
    for c, blocks in enumerate(plan.ranges):
        times = "".join(f"{1000 * values[c]:9.3f}" for values in (costs.F, costs.B, costs.W))
        lines.append(f"{c:5}  {len(blocks):6}{times}")
    return "\n".join(lines)
