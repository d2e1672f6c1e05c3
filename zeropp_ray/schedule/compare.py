"""All policies on one step, side by side: the same stages, micro-batches and work.

A policy that is made for another number of chunks cuts a stage's work in so many equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from zeropp_ray.errors import ConfigError
from zeropp_ray.placement import stage_and_chunk
from zeropp_ray.schedule.actions import Op
from zeropp_ray.schedule.costs import Costs, hops
from zeropp_ray.schedule.policies import POLICIES
from zeropp_ray.schedule.program import Program, compile_program
from zeropp_ray.schedule.replay import lower_bound
from zeropp_ray.schedule.spec import AUTO, resolve
from zeropp_ray.schedule.tune import tune


class Row(NamedTuple):
    """What a step takes under a policy, at the rank where it is most. Units as in :data:`LEGEND`."""

    policy: str
    chunks: int
    makespan: float
    ratio: float
    bubble: float
    live: float
    inputs: float
    resident: float
    buffers: float
    gathers: int
    reduces: int
    gathered: float
    reduced: float
    sent: int


LEGEND = """\
V         chunks of a stage
time      makespan, and how many times the least one that V = {V} allows; bubble: part of the ranks' time
live      activations; inputs: of recomputed chunks: in whole-stage micro-batches
resident  parameters; buffers: unsharded gradients: at most, as parts of the stage's
gathers   collectives of a rank; gathered, reduced: what they move, as multiples of the stage's parameters
sent      activations and gradients to other stages, in b·s·h
All but time and bubble: of the rank where it is most."""


def compare(
    policies: Iterable[str],
    stages: int,
    chunks: int,
    microbatches: int,
    cost: tuple[float, float, float, float],
    unit: int | str = 0,
    memory_limit: float = 0.0,
    prefetch: bool = False,
    recompute: str = "none",
    reduce: str = "unit",
    name: Callable[[str], str] = "parallel.{}".format,
    *,
    besides: tuple[float, float, float, float] = (0, 0, 0, 0),
    nodes: int = 1,
    between: float = 0,
) -> list[Row | tuple[str, str]]:
    """A row for each policy, or its name and why it has no schedule here.

    ``cost`` is of one of ``chunks``, as the first three of ``besides``: gather, reduce, update, and the vote. ``unit``
    and ``memory_limit`` are for the policies that have a choice there. Of several ``nodes``, a message ``between`` two
    of them takes that.

    Raises:
        ConfigError: for stages, chunks, micro-batches and costs that no policy takes.
    """

    def of(own: int, placement: str) -> Costs:
        share = chunks / own if own else 1
        F, B, W, comm = cost
        gather, reduced, update, vote = besides
        costs = Costs.uniform(
            max(stages * own, 1),
            F * share,
            B * share,
            W * share,
            comm,
            gather=gather * share,
            reduce=reduced * share,
            optimizer=update * share,
            vote=vote,
        )
        if nodes == 1:
            return costs
        owners = [stage_and_chunk(placement, stages, c)[0] for c in range(stages * own)]
        return replace(costs, hops=hops(owners, stages, nodes, comm, between))

    looped = of(chunks, "looped")
    least = lower_bound(resolve(stages, chunks, microbatches, costs=looped, recompute=recompute, name=name))
    rows: list[Row | tuple[str, str]] = []
    for policy in policies:
        known = POLICIES[policy]
        own = known.chunks or chunks
        costs = of(own, known.placement)
        try:
            limit = memory_limit if known.order is None else 0.0
            spec = resolve(
                stages,
                own,
                microbatches,
                unit if known.unit != "N" else 0,
                limit,
                prefetch,
                costs,
                recompute,
                reduce,
                policy,
                name,
            )
        except ConfigError as error:
            rows.append((policy, str(error)))
        else:
            rows.append(_row(policy, compile_program(tune(spec, limit) if unit == AUTO else spec), least))
    return rows


def _row(policy: str, program: Program, least: float) -> Row:
    V = program.spec.chunks
    return Row(
        policy=policy,
        chunks=V,
        makespan=program.makespan,
        ratio=program.makespan / least,
        bubble=program.bubble,
        live=max(program.peak_activations),
        inputs=max(program.peak_inputs) / V,
        resident=max(program.peak_resident) / V,
        buffers=max(program.peak_gradient_buffers) / V,
        gathers=max(program.gathers),
        reduces=max(program.reduces),
        gathered=max(program.gathers) / V,
        reduced=max(program.reduces) / V,
        sent=max(sum(action.op is Op.SEND for action in actions) for actions in program.ranks),
    )


def to_table(rows: Iterable[Row | tuple[str, str]], chunks: int) -> str:
    """The rows as text, and what the columns mean."""
    heads = ["policy", "V", "time", "", "bubble", "live", "inputs", "resident", "buffers", "gathers", "gathered"]
    lines = [[*heads, "reduces", "reduced", "sent"]]
    notes = []
    for row in rows:
        if not isinstance(row, Row):
            notes.append(f"{row[0]}: none here. {row[1]}")
            continue
        lines.append(
            [row.policy, f"{row.chunks}", f"{row.makespan:.6g}", f"{row.ratio:.3f}", f"{row.bubble:.1%}"]
            + [f"{value:.4g}" for value in (row.live, row.inputs, row.resident, row.buffers)]
            + [f"{row.gathers}", f"{row.gathered:.4g}", f"{row.reduces}", f"{row.reduced:.4g}", f"{row.sent}"]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([*text, *notes, "", LEGEND.format(V=chunks)])
