"""Schedules where cores are many: ``python -m bench.sleep [--quick] [--rounds 10] [--unit-ms 10]``.

Eight stages as eight processes whose layers sleep for given F, B and W times, so that two cores do for eight devices.
Ours and PyTorch's runtime with its own schedules really run, over gloo, in interleaved rounds of one step each. The
last table adds the same delay to every message of both.

A step is timed from a common start to the end of its last member, on one clock, optimizer included. The lower bound is
what the sleeps alone must take: all naps of a stage, after the first micro-batch's way to it. Every contestant must
take each nap once and reach the same loss.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from bench import figures
from bench.rounds import Spread
from bench.sleep_members import Pace, Setting, Stepped, serve
from zeropp_ray.config import RunConfig
from zeropp_ray.planner.plan import Plan, make_plan
from zeropp_ray.schedule import Costs, Program, compile_program
from zeropp_ray.vote import Decision, decide

CASES = (  # costs of F, B and W per chunk, and the delay of a message
    ((1.0, 1.0, 1.0), 0.0),
    ((1.0, 1.3, 0.7), 0.0),
    ((1.0, 2.0, 1.0), 0.0),
    ((1.0, 1.3, 0.7), 0.25),
)
OURS = {"ours": 2, "ours, memory P": 1}  # name → unit and limit of live activations, in P micro-batches
THEIRS = {
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
}
QUICK_ROUNDS = 3
LATE_MS = 5.0  # from where on a late begin is told
AHEAD_S = 0.1  # how far ahead of a step its start is set: by then all members have the call
TOLERANCE = 1e-4  # between losses, in nats: contestants add up in different orders

Case = tuple[Sequence[float], float]


@dataclass(frozen=True)
class Size:
    """Of the pipeline. A test takes less."""

    stages: int = 8
    chunks: int = 2
    microbatches: int = 32


@dataclass(frozen=True)
class Row:
    """One contestant under one set of costs."""

    suite: str
    name: str
    unit_ms: float
    costs: tuple[float, ...]
    delay: float
    seconds: list[float]  # of a step, by round
    median_s: float
    ratio_to_bound: float  # of the median
    to_ours: Spread  # its time by that of ours, round by round; above 1: ours is faster
    late_ms: float  # at most, of a member's begin of a step: a busy machine spoils this benchmark
    process_ms: float  # CPU time of the busiest member in a step: what is no sleep; median over the rounds
    gathers: int  # all-gathers per step and member with one resident chunk
    live_activations: float  # most at a member, in whole-stage micro-batches


def run(
    rounds: int,
    quick: bool,
    out: Path,
    *,
    unit_ms: float = 10.0,
    size: Size | None = None,
    cases: Sequence[Case] = CASES,
) -> list[dict[str, Any]]:
    """All tables as rows; ``out/sleep.json``, ``sleep.md`` and, where matplotlib is, ``out/sleep.png`` show them.

    Args:
        rounds: steps of each contestant and case; ``quick`` takes three at most.
        unit_ms: how long a task of cost 1 sleeps.
    """
    size, rounds = size or Size(), min(rounds, QUICK_ROUNDS) if quick else rounds
    rows: list[Row] = []
    with _race(size, unit_ms / 1e3) as race:
        for costs, delay in cases:
            rows += race.rows(costs, delay, rounds)
    out.mkdir(parents=True, exist_ok=True)
    (out / "sleep.md").write_text(table(rows), encoding="utf-8")
    plot(rows, out / "sleep.png")
    found = [dataclasses.asdict(row) for row in rows]
    (out / "sleep.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


@contextmanager
def _race(size: Size, unit_s: float) -> Iterator[_Race]:
    """The processes of all stages, started once and kept."""
    config = config_of(size)
    plan = make_plan(config)
    with started(size, dict.fromkeys(OURS, (config, plan)), THEIRS) as pipes:
        yield _Race(size, config, unit_s, pipes)


@contextmanager
def started(size: Size, ours: Mapping[str, tuple[RunConfig, Plan]], theirs: Mapping[str, str]) -> Iterator[list[Any]]:
    """A process for each stage that holds all contestants (:class:`Setting`); the pipes to them."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["bench.sleep_members", "torch._dynamo"])  # what AdamW imports takes a second
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    setting = Setting(store.port, ours, theirs)
    stamps = processes.RawArray("d", 4 * size.stages * size.chunks * size.microbatches)
    members, pipes = [], []
    try:
        for rank in range(size.stages):
            mine, other = processes.Pipe()
            process = processes.Process(target=serve, args=(other, rank, setting, stamps), daemon=True)
            process.start()
            other.close()
            members.append(process)
            pipes.append(mine)
        answers(pipes)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in members:
            process.join(10)
            process.kill()


def call(pipes: Sequence[Any], *request: Any) -> list[Any]:
    """Ask all processes; their answers."""
    for pipe in pipes:
        pipe.send(request)
    return answers(pipes)


def answers(pipes: Sequence[Any]) -> list[Any]:
    found = [pipe.recv() for pipe in pipes]
    for answer in found:
        if isinstance(answer, Exception):
            raise answer
    return found


def config_of(size: Size, **parallel: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "model": {
                "factory": "bench.sleeping:SleepingModel",
                "args": {"depth": size.stages * size.chunks},
                "seq_len": 4,
            },
            "parallel": {
                "stages": size.stages,
                "chunks": size.chunks,
                "microbatches": size.microbatches,
                "microbatch_size": 1,
                "shards": 1,
                **parallel,
            },
            "train": {"schedule": "constant", "warmup_steps": 0, "clip_norm": 0.0},
        }
    )


class _Race:
    def __init__(self, size: Size, config: RunConfig, unit_s: float, pipes: Sequence[Any]) -> None:
        self._size, self._config, self._unit_s, self._pipes = size, config, unit_s, pipes
        self._names = [*OURS, *THEIRS]
        self._decisions: dict[str, Decision | None] = dict.fromkeys(OURS)
        self._steps = 0

    def rows(self, costs: Sequence[float], delay: float, rounds: int) -> list[Row]:
        """Interleaved rounds of all contestants, after one that is not timed."""
        programs = {name: self._program(units, costs, delay) for name, units in OURS.items()}
        seconds = {task: cost * self._unit_s for task, cost in zip("FBW", costs, strict=True)}
        call(self._pipes, "pace", Pace(seconds, delay * self._unit_s, programs))
        stepped = [self._round(number) for number in range(1 + rounds)]
        times = {name: [took for took, _ in (each[name] for each in stepped[1:])] for name in self._names}
        bound = programs["ours"].lower_bound * self._unit_s
        rows = []
        for name in self._names:
            members = stepped[-1][name][1]
            ratios = [mine / ours for mine, ours in zip(times[name], times["ours"], strict=True)]
            row = Row(
                suite="sleep",
                name=name,
                unit_ms=self._unit_s * 1e3,
                costs=tuple(costs),
                delay=delay,
                seconds=times[name],
                median_s=statistics.median(times[name]),
                ratio_to_bound=statistics.median(times[name]) / bound,
                to_ours=Spread.of(ratios),
                late_ms=max(member.late_s for each in stepped[1:] for member in each[name][1]) * 1e3,
                process_ms=statistics.median(max(m.process_s for m in each[name][1]) for each in stepped[1:]) * 1e3,
                gathers=max(member.gathers for member in members),
                live_activations=max(member.peak_live for member in members),
            )
            rows.append(row)
        return rows

    def _program(self, units: int, costs: Sequence[float], delay: float) -> Program:
        size = self._size
        parallel = dataclasses.replace(
            self._config.parallel, unit=units * size.stages, memory_limit=float(units * size.stages)
        )
        F, B, W = costs
        return compile_program(parallel.schedule(Costs.uniform(size.stages * size.chunks, F, B, W, comm=delay)))

    def _round(self, number: int) -> dict[str, tuple[float, list[Stepped]]]:
        """One step of each, in an order of the round's own: seconds, and what its members say."""
        self._steps += 1
        names = random.Random(number).sample(self._names, len(self._names))
        result = {name: self._step(name) for name in names}
        losses = {name: next(m.loss for m in members if m.loss is not None) for name, (_, members) in result.items()}
        if max(losses.values()) - min(losses.values()) > TOLERANCE:
            raise RuntimeError(f"the contestants reach different losses in step {self._steps}: {losses}")
        tasks = self._size.chunks * self._size.microbatches  # but in its first step PyTorch's tries out shapes
        for name, (_, members) in result.items():
            if self._steps > 1 and any(member.naps != dict.fromkeys("FBW", tasks) for member in members):
                raise RuntimeError(f"{name} took {[member.naps for member in members]}, not {tasks} naps of each kind")
        return result

    def _step(self, name: str) -> tuple[float, list[Stepped]]:
        decision = [self._decisions[name]] if name in OURS else []
        start = time.monotonic() + AHEAD_S
        given = call(self._pipes, "step", name, start, *decision)
        members = [stepped for stepped, _ in given]
        if name in OURS:
            self._decisions[name] = decide(self._steps, [vote for _, vote in given], 0.0)
        return max(member.ended for member in members) - start, members


def _cases(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each case, and its costs in words."""
    for (costs, delay, unit_ms), group in groupby(rows, key=lambda row: (row.costs, row.delay, row.unit_ms)):
        named = ", ".join(f"{task} {cost * unit_ms:g} ms" for task, cost in zip("FBW", costs, strict=True))
        yield named + f", messages {delay * unit_ms:g} ms late" * bool(delay), list(group)


def table(rows: Sequence[Row]) -> str:
    """Markdown: one table per set of costs. Quartiles in brackets; above 1, ours is faster."""
    text = ""
    for named, group in _cases(rows):
        text += f"\n{named}\n\n"
        text += "| schedule | ms a step | by the lower bound | its time by ours | CPU ms | gathers | live |\n"
        text += "| --- | --- | --- | --- | --- | --- | --- |\n"
        for row in group:
            text += (
                f"| {row.name} | {row.median_s * 1e3:.0f} | {row.ratio_to_bound:.3f} "
                f"| {row.to_ours} | {row.process_ms:.0f} | {row.gathers} | {row.live_activations:g} |\n"
            )
    late = max(row.late_ms for row in rows)
    if late > LATE_MS:
        text += f"\nThe machine was busy with other things: a member began a step {late:.0f} ms late.\n"
    return text.lstrip("\n")


def plot(rows: Sequence[Row], file: Path) -> None:
    """One panel per set of costs, if matplotlib is there. Whiskers are quartiles over the rounds."""
    pyplot = figures.pyplot(file)
    if pyplot is None:
        return
    cases = list(_cases(rows))
    figure, panels = pyplot.subplots(len(cases), figsize=(8, 2 * len(cases)), squeeze=False, layout="constrained")
    for panel, (named, group) in zip(panels.flat, cases, strict=True):
        bounds = [row.median_s / row.ratio_to_bound for row in group]
        spreads = [Spread.of([s / bound for s in row.seconds]) for row, bound in zip(group, bounds, strict=True)]
        whiskers = [[s.middle - s.low for s in spreads], [s.high - s.middle for s in spreads]]
        panel.barh([row.name for row in group], [s.middle for s in spreads], xerr=whiskers)
        panel.set(title=named, xlabel="time of a step by its lower bound", xlim=(0.95, None))
        panel.invert_yaxis()
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--rounds", default=10, help="Steps of each contestant and case.")
@click.option("--quick", is_flag=True, help=f"At most {QUICK_ROUNDS} rounds.")
@click.option("--unit-ms", default=10.0, help="How long a task of cost 1 sleeps, in milliseconds.")
@click.option("--out", default="bench/results", type=click.Path(path_type=Path), help="Folder for what is written.")
def main(rounds: int, quick: bool, unit_ms: float, out: Path) -> None:
    run(rounds, quick, out, unit_ms=unit_ms)
    print((out / "sleep.md").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
