"""ZeroPP against 3D parallelism on paper, from 64 to 10,000 devices: ``python -m bench.study``.

Prints the tables of docs/planning.md. Nothing is run: both sides are estimates of ``zeropp_ray/planner``.
"""

from __future__ import annotations

from typing import NamedTuple

import click

from zeropp_ray.config import ModelSection
from zeropp_ray.errors import ConfigError
from zeropp_ray.planner.cost_model import Estimate, Rival
from zeropp_ray.planner.hardware import cluster
from zeropp_ray.planner.search import best_3d, search
from zeropp_ray.planner.sizes import sizes_of


class Case(NamedTuple):
    """One row: a model on devices, for a batch of ``sequences`` of ``seq_len`` tokens a step."""

    model: str
    device: str
    count: int
    seq_len: int
    sequences: int


SUITES: dict[str, tuple[Case, ...]] = {
    "64 devices, as many as in the paper": (
        Case("gpt3-6.7b", "a100-80g", 64, 2048, 512),
        Case("gpt3-13b", "a100-80g", 64, 2048, 512),
        Case("llama2-7b", "a100-80g", 64, 4096, 512),
        Case("llama2-13b", "a100-80g", 64, 4096, 512),
        Case("llama2-70b", "a100-80g", 64, 4096, 512),
        Case("llama3-8b", "h100-80g", 64, 8192, 512),
        Case("llama3-70b", "h100-80g", 64, 8192, 512),
        Case("llama3-70b", "h200", 64, 8192, 512),
        Case("gpt3-175b", "h200", 64, 2048, 512),
    ),
    "A batch of 16 M tokens, on more and more devices": tuple(
        Case("llama3-70b", "h200", count, 8192, 2048) for count in (64, 256, 1024, 2048, 4096, 10_000)
    ),
    "A batch that grows with the devices": tuple(
        Case("llama3-70b", "h200", count, 8192, 2 * count) for count in (64, 256, 1024, 4096, 10_000)
    ),
    "Llama 3.1 405B": (
        Case("llama3.1-405b", "h100-80g", 512, 8192, 2048),
        Case("llama3.1-405b", "h200", 512, 8192, 2048),
        Case("llama3.1-405b", "h200", 512, 4096, 4096),
        Case("llama3.1-405b", "b200", 512, 8192, 2048),
    ),
}


def row(case: Case) -> tuple[str, ...]:
    """The best of both sides, and ours in parts of the rivals' tokens per second: of tensor parallelism over the whole
    node, and of any.
    """
    model = sizes_of(ModelSection(preset=case.model, seq_len=case.seq_len, context=0), "bfloat16")
    on = cluster(case.device, case.count)
    given = (case.model, f"{case.count} {case.device}", f"{case.sequences} x {case.seq_len}")
    rivals = (best_3d(model, on, case.sequences, on.per_node), best_3d(model, on, case.sequences))
    try:
        found = search(model, on, case.sequences, show=1)
    except ConfigError as error:
        least = str(error).partition(", takes ")[2].partition(" GB")[0]
        return (
            *given,
            f"none fits {on.device.usable / 1e9:.0f} GB, the smallest takes {least}",
            "",
            "",
            *map(_name, rivals),
        )
    best = found.best[0]
    ours = (str(best.choice), str(best.choice.members), f"{found.utilisation(best):.1%}")
    against = [f"{_name(each)} ({each.step_s / best.step_s - 1:+.0%})" if each else "none fits" for each in rivals]
    return (*given, *ours, *against)


def _name(step: Estimate[Rival] | None) -> str:
    return str(step.choice) if step else "none fits"


@click.command()
@click.option("--suite", type=click.Choice(list(SUITES)), help="Only this one.")
def main(suite: str | None) -> None:
    """Print the tables of the study; takes some minutes."""
    for name, cases in SUITES.items():
        if suite in (None, name):
            click.echo(f"\n### {name}\n\n| model | devices | batch | ZeroPP | at work | MFU | 3D, T = node | best 3D |")
            click.echo("| --- " * 8 + "|")
            for case in cases:
                click.echo(f"| {' | '.join(row(case))} |")


if __name__ == "__main__":
    main()
