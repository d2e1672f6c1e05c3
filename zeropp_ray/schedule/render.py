"""How a schedule is shown: a grid of ranks over time for the terminal, and JSON."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from zeropp_ray.schedule.actions import COMPUTE, Action, Op
from zeropp_ray.schedule.held import fullest
from zeropp_ray.schedule.policies import POLICIES
from zeropp_ray.schedule.program import Program
from zeropp_ray.schedule.replay import Timeline, replay
from zeropp_ray.schedule.spec import ScheduleSpec

JSON_VERSION = 1
# One sign per chunk (they repeat where a stage has more chunks); black on blue, cyan, green and yellow in a terminal.
_SIGNS = {
    Op.F: "0123456789",
    Op.RF: "⁰¹²³⁴⁵⁶⁷⁸⁹",
    Op.B: "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    Op.W: "abcdefghijklmnopqrstuvwxyz",
}
_COLORS = {Op.F: "\x1b[30;44m", Op.RF: "\x1b[30;46m", Op.B: "\x1b[30;42m", Op.W: "\x1b[30;43m"}
_PLAIN, _IDLE = "\x1b[0m", "·"
Cell = tuple[str, str]  # colour ("" for none) and sign


def to_json(program: Program) -> dict[str, Any]:
    """Version 1 of the JSON form: times in the unit of the costs, memory in whole-stage micro-batches, no transfers.

    The version stays where keys are added.
    """
    spec, costs = program.spec, program.spec.costs
    ranks = program.without_transfers()
    timeline = replay(ranks, spec, program.forward_only)
    columns = {"F": costs.F, "B": costs.B, "W": costs.W}
    return {
        "version": JSON_VERSION,
        "policy": spec.policy,
        "stages": spec.stages,
        "chunks": spec.chunks,
        "microbatches": spec.microbatches,
        "unit": spec.unit,
        "units": list(spec.units),
        "placement": spec.placement,
        # one number per task where all chunks cost the same, else one per model chunk
        "cost": {op: c[0] if costs.is_uniform else list(c) for op, c in columns.items()} | {"comm": costs.comm},
        **_besides(spec, timeline),
        "memory_limit": int(spec.memory_limit) if spec.memory_limit == int(spec.memory_limit) else spec.memory_limit,
        "makespan": timeline.makespan,
        "lower_bound": timeline.lower_bound,
        "ranks": [
            {
                "rank": p,
                "peak_activations": timeline.peak_activations[p],
                "peak_gradient_buffers": timeline.peak_gradient_buffers[p],
                "actions": [
                    _action(spec.model_chunk(p, action.chunk), action, start, end)
                    for action, start, end in zip(actions, timeline.starts[p], timeline.ends[p], strict=True)
                ],
                "peak_inputs": timeline.peak_inputs[p],
            }
            for p, actions in enumerate(ranks)
        ],
        "recomputed": list(spec.recomputed),
        "reduce": spec.reduce,
    }


def _besides(spec: ScheduleSpec, timeline: Timeline) -> dict[str, Any]:
    """What takes time besides tasks and messages, if something does; memory of each rank by kind, if it is known."""
    costs, more = spec.costs, dict[str, Any]()
    if not costs.tasks_alone:
        each = ("RF", "gather", "reduce", "optimizer", "hops")
        more["besides"] = {name: list(getattr(costs, name)) for name in each} | {"vote": costs.vote, "post": costs.post}
        more["exposed"] = list(timeline.exposed)
    if timeline.held:
        more["memory_at_the_fullest"] = [fullest(curves) for curves in timeline.held]
    return more


def _action(model_chunk: int, action: Action, start: float, end: float) -> dict[str, Any]:
    task = {"microbatch": action.microbatch} if action.op in COMPUTE else {}
    where = {"op": action.op.value, "chunk": action.chunk, "model_chunk": model_chunk}
    return {**where, **task, "start": start, "end": end}


def to_grid(program: Program, width: int = 120, color: bool = False) -> str:
    """One line per rank, time from left to right, at most ``width`` columns; above it a legend, below it a summary.

    A column shows what runs in its middle: ``F`` as the digit of its chunk, ``RF`` as a raised one, ``B`` as a capital,
    ``W`` a small letter.
    """
    spec = program.spec
    ranks = program.without_transfers()
    timeline = replay(ranks, spec, program.forward_only)
    labels = [f"rank {p:<{len(str(spec.stages - 1))}} " for p in range(spec.stages)]
    columns = _columns(timeline.makespan, spec, max(width - len(labels[0]), 1))
    step = timeline.makespan / columns
    rows = [
        label + _paint(_row(actions, starts, ends, columns, step), color)
        for label, actions, starts, ends in zip(labels, ranks, timeline.starts, timeline.ends, strict=True)
    ]
    return "\n".join([title(spec), *_legend(spec, step, color), *rows, *summary(spec, timeline)])


def _columns(makespan: float, spec: ScheduleSpec, most: int) -> int:
    """As many as show each task in whole columns, up to four per time grain, if they fit; else as many as there are."""
    cost = spec.costs.ticks()
    exact = round(makespan * cost.scale / math.gcd(*cost.F, *cost.B, *cost.W, *cost.hops))
    return exact * min(most // exact, 4) if exact <= most else most


def _row(
    actions: Sequence[Action], starts: Sequence[float], ends: Sequence[float], columns: int, step: float
) -> Iterable[Cell]:
    tasks = [(s, e, a) for a, s, e in zip(actions, starts, ends, strict=True) if a.op in COMPUTE and e > s]
    begins = [start for start, _, _ in tasks]
    for column in range(columns):
        middle = (column + 0.5) * step
        at = bisect_right(begins, middle) - 1
        yield _cell(tasks[at][2].op, tasks[at][2].chunk) if at >= 0 and middle < tasks[at][1] else ("", _IDLE)


def _cell(op: Op, chunk: int) -> Cell:
    signs = _SIGNS[op]
    return _COLORS[op], signs[chunk % len(signs)]


def _paint(cells: Iterable[Cell], color: bool) -> str:
    runs = ((shade, "".join(sign for _, sign in run)) for shade, run in groupby(cells, key=lambda cell: cell[0]))
    return "".join(f"{shade}{text}{_PLAIN}" if color and shade else text for shade, text in runs)


def title(spec: ScheduleSpec) -> str:
    """The policy and the numbers of a schedule in one line."""
    units = " + ".join(f"{len(list(run))} × {size}" for size, run in groupby(spec.units))
    numbers = f"P = {spec.stages} stages, V = {spec.chunks} chunks, N = {spec.microbatches} micro-batches = {units}"
    return f"{POLICIES[spec.policy].title}  {numbers}"


def _legend(spec: ScheduleSpec, step: float, color: bool) -> list[str]:
    keys = []
    names = {Op.F: "forward", Op.RF: "forward again", Op.B: "input gradient", Op.W: "weight gradient"}
    for op, text in names.items():
        if op is not Op.RF or any(spec.recomputed):
            keys.append(f"{_paint((_cell(op, v) for v in range(min(spec.chunks, 4))), color)} {text}")
    return [f"{', '.join(keys)} of chunk 0, 1, …; {_IDLE} idle; one column is {step:.4g} of the costs' unit of time"]


def summary(spec: ScheduleSpec, timeline: Timeline) -> list[str]:
    """What a step takes: a line each of time, memory and traffic."""
    makespan, bound = timeline.makespan, timeline.lower_bound
    inputs, buffers = max(timeline.peak_inputs), max(timeline.peak_gradient_buffers)
    waits = f"; waits for gathers and reduces {max(timeline.exposed):.4g}" if any(timeline.exposed) else ""
    return [
        f"time     makespan {makespan:.6g}, {makespan / bound:.3f} times the lower bound; "
        f"bubble {timeline.bubble:.1%}{waits}",
        f"memory   {max(timeline.peak_activations):.6g} live micro-batches of {spec.memory_limit:.6g} allowed; "
        + (f"{inputs} chunk inputs kept; " if inputs else "")
        + f"{max(timeline.peak_resident)} of {spec.chunks} chunks resident; "
        f"{buffers} gradient buffer{'s' * (buffers > 1)} open",
        f"traffic  {max(timeline.gathers)} gathers and {max(timeline.reduces)} reduces per rank",
    ]
