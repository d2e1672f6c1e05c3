"""How near ZeroPP's orders come to the least step, by memory: ``python -m bench.frontier``.

Prints the table of docs/schedules.md. Nothing is run: costs are replayed. For each row and limit it shows the best unit
under the greedy rule alone, and under all rules.
"""

from __future__ import annotations

import click

from zeropp_ray.errors import ConfigError
from zeropp_ray.schedule import Costs, ScheduleSpec, compile_program, lower_bound, resolve
from zeropp_ray.schedule.order import GREEDY, zeropp_makespan

ROWS = (
    (8, 2, 32, (1, 1, 1, 0.1)),
    (8, 2, 32, (1, 1.3, 0.7, 0.25)),
    (8, 4, 64, (1, 1.3, 0.7, 0.25)),
    (16, 2, 124, (1, 2, 1, 0.1)),
)
LIMITS = (1.0, 1.25, 1.5, 1.75, 2.0)  # in units of P


def last_phase_bound(spec: ScheduleSpec) -> float:
    """The least makespan with these units at any memory, for equal chunks and V of 2 or more.

    Rank 0 is in the phase ``F(V-1)+B(V-1)`` from its first ``F`` until the last rank has done ``F`` and ``B`` of the
    whole unit, one of them after the way there and before the way back: ``(P-1)·(F+B+2·transfer) + u·(F+B)``. Its
    other phases take ``u·(F+B)`` for each other chunk. And the ``W`` of the last phase's ``B`` are behind all ``B``.
    """
    F, B, W, comm = spec.costs.F[0], spec.costs.B[0], spec.costs.W[0], spec.costs.comm
    way = (spec.stages - 1) * (F + B + 2 * comm)
    return sum(way + spec.chunks * u * (F + B) for u in spec.units) + W


def specs(P: int, V: int, N: int, cost: tuple[float, float, float, float], limit: float) -> list[ScheduleSpec]:
    """One for each number of units that has a schedule under the limit, in whole-stage micro-batches."""
    found = {}
    for K in range(1, N // P + 1):
        try:
            spec = resolve(P, V, N, N // K, limit, costs=Costs.uniform(P * V, *cost))
        except ConfigError:
            continue
        found[spec.units] = spec
    return list(found.values())


@click.command(help=__doc__)
def main() -> None:
    click.echo("| P, V, N | costs | limit / P | greedy | best | units | gathers | these units at any memory |")
    click.echo("| --- " * 8 + "|")
    for P, V, N, cost in ROWS:
        for limit in LIMITS:
            every = specs(P, V, N, cost, limit * P)
            bound = lower_bound(every[0])
            greedy = min(zeropp_makespan(spec, rules=GREEDY) for spec in every)
            spec = min(every, key=zeropp_makespan)
            program = compile_program(spec)
            cells = [
                f"{P}, {V}, {N}",
                ", ".join(f"{value:g}" for value in cost),
                f"{limit:g}",
                f"{greedy / bound:.3f}",
                f"{program.makespan / bound:.3f}",
                f"{len(spec.units)} of {max(spec.units)}",
                f"{max(program.gathers)}",
                f"{max(last_phase_bound(spec) / bound, 1):.3f}",
            ]
            click.echo(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
