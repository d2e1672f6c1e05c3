"""How cost grows: ``python -m bench.growth [--quick] [--rounds 10] [--members 256]``.

- *step*: a step of a model whose layers take next to no time, so overhead is what is left, over its depth, stages P,
  micro-batches N and shards F. More processes than cores take turns.
- *compile*: from the numbers P and N to a checked program.
- *control*: the driver's round over actors that vote at once and compute nothing. Each is a process; 256 take about 16
  GB and some minutes to start.
- *start-up*: from the command to the first step of a small run, by part.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench import figures
from bench.control_plane import control_plane
from bench.crew import start
from bench.start_up import start_up
from bench.variant import Variant
from zeropp_ray.schedule import compile_program, resolve

MODEL = {"dim": 16, "heads": 2, "ffn_dim": 16, "seq_len": 8}
BASE = {"stages": 2, "chunks": 2, "shards": 1, "microbatches": 8, "microbatch_size": 1}
STEPS = 5  # in a round
SWEEPS: dict[str, tuple[int, ...]] = {
    "layers": (4, 8, 16, 32, 64),
    "stages": (1, 2, 4, 8),
    "microbatches": (8, 16, 32, 64, 128),
    "shards": (1, 2, 4, 8),
}
COMPILED = [(P, 4 * P) for P in (2, 4, 8, 16, 32, 64)] + [(8, N) for N in (64, 128, 256, 512, 1024)]  # P and N, V = 2
MEMBERS = (16, 64, 256)
QUICK_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """One point of a curve."""

    suite: str
    name: str  # of the curve
    x: str  # what grows, and how far
    at: int
    values: list[float]  # by round, in `unit`
    median: float
    unit: str
    more: dict[str, float]


def run(rounds: int, quick: bool, out: Path, *, members: int = 64) -> list[dict[str, Any]]:
    """All curves as rows; ``out/growth.json``, ``growth.md`` and, where matplotlib is, ``out/growth.png`` show them.

    Args:
        rounds: how often each point is measured; ``quick`` takes three at most, and the two smallest points of a curve.
        members: the most members of the control plane.
    """
    rounds = min(rounds, QUICK_ROUNDS) if quick else rounds

    def some(points: Sequence[Any]) -> Sequence[Any]:
        return points[:2] if quick else points

    rows = [row for name, values in SWEEPS.items() for row in steps(name, some(values), rounds)]
    rows += compiling(some(COMPILED), rounds)
    rows += control([count for count in MEMBERS if count <= (MEMBERS[0] if quick else members)], 20 * rounds)
    rows += starting(1 if quick else min(rounds, 3))
    out.mkdir(parents=True, exist_ok=True)
    (out / "growth.md").write_text(table(rows), encoding="utf-8")
    plot(rows, out / "growth.png")
    found = [dataclasses.asdict(row) for row in rows]
    (out / "growth.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _row(name: str, x: str, at: int, values: list[float], unit: str, **more: float) -> Row:
    return Row("growth", name, x, at, values, statistics.median(values), unit, more)


def steps(what: str, values: Sequence[int], rounds: int) -> Iterator[Row]:
    """Milliseconds a step as ``what`` grows."""
    for value in values:
        model, parallel = {**MODEL, "layers": 16}, {**BASE}
        (model if what == "layers" else parallel)[what] = value
        parallel["microbatches"] = max(parallel["microbatches"], 2 * parallel["stages"])
        variant = Variant(f"{what} {value}", "ours", parallel)
        config = variant.config({"model": model})
        crew = start(variant, config, "cpu")
        try:
            crew.run(STEPS)  # warm-up
            times = [crew.run(STEPS) / STEPS * 1e3 for _ in range(rounds)]
        finally:
            crew.close()
        program = compile_program(config.parallel.schedule())
        most = max(map(len, program.ranks))
        each = statistics.median(times) * 1e3 / most
        yield _row("step", what, value, times, "ms", instructions=most, us_per_instruction=each)


def compiling(sizes: Sequence[tuple[int, int]], rounds: int) -> Iterator[Row]:
    """Milliseconds from numbers to a checked program, two chunks a stage."""
    for P, N in sizes:
        spec = resolve(P, 2, N)
        times, size = [], 0
        for _ in range(min(rounds, 3)):
            began = time.perf_counter()
            program = compile_program(spec)
            times.append((time.perf_counter() - began) * 1e3)
            size = sum(map(len, program.ranks))
        x = "stages, with 4 micro-batches each" if N == 4 * P else f"micro-batches of {P} stages"
        yield _row("compile", x, P if N == 4 * P else N, times, "ms", instructions=size)


def control(counts: Sequence[int], rounds: int) -> Iterator[Row]:
    """Milliseconds a round of the driver over so many members."""
    for found in control_plane(counts, rounds):
        yield _row(
            "control",
            "members",
            found.members,
            [seconds * 1e3 for seconds in found.seconds],
            "ms",
            driver_process_ms=found.process_s * 1e3,
            member_mb=found.member_bytes / 1e6,
            start_s=found.start_s,
        )


def starting(times: int) -> list[Row]:
    """Seconds of each part of a run's start."""
    parts = [start_up() for _ in range(times)]
    return [_row("start-up", part, at, [each[part] for each in parts], "s") for at, part in enumerate(parts[0])]


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    text = "| cost | what grows | to | median | more |\n| --- | --- | --- | --- | --- |\n"
    for row in rows:
        more = ", ".join(f"{name} {value:.4g}" for name, value in row.more.items())
        at = "" if row.name == "start-up" else row.at
        text += f"| {row.name} | {row.x} | {at} | {row.median:.4g} {row.unit} | {more} |\n"
    return text


def plot(rows: Sequence[Row], path: Path) -> None:
    """One panel per curve, if matplotlib is there."""
    pyplot = figures.pyplot(path)
    if pyplot is None:
        return
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        curves.setdefault((row.name, "" if row.name == "start-up" else row.x), []).append(row)
    figure, panels = pyplot.subplots(2, -(-len(curves) // 2), figsize=(16, 8), squeeze=False)
    for panel, ((name, x), points) in zip(panels.flat, curves.items(), strict=False):
        panel.set_title(name)
        if name == "start-up":
            panel.barh([row.x for row in points][::-1], [row.median for row in points][::-1])
            panel.set_xlabel(points[0].unit)
            continue
        panel.plot([row.at for row in points], [row.median for row in points], "o-")
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.set_xlabel(x)
        panel.set_ylabel(points[0].unit)
    for panel in panels.flat[len(curves) :]:
        panel.remove()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--rounds", default=10, help="How often each point is measured.")
@click.option("--quick", is_flag=True, help=f"At most {QUICK_ROUNDS} rounds, and the two smallest points of a curve.")
@click.option("--members", default=MEMBERS[-1], help="Most members of the control plane.")
@click.option("--out", default="bench/results", type=click.Path(path_type=Path), help="Folder for what is written.")
def main(rounds: int, quick: bool, members: int, out: Path) -> None:
    run(rounds, quick, out, members=members)
    print((out / "growth.md").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
