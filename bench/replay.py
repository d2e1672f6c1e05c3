"""Replay against reality: ``python -m bench.replay [PART ...] [--rounds 5]``, all three parts unless some are named.

- *sleep*: eight stages as eight processes whose layers sleep, so that two cores do for eight devices. Every policy runs
  its own program; the replay has the naps as costs, and on top what an engine's task takes besides, as ``profile``
  measures it of the same model awake.
- *compute*: two stages on two cores, one thread each, a model of 6.6M parameters, costs as ``profile`` measures them.
- *train*: ``zeropp profile``, then ``zeropp train`` with what it wrote: the step time that the run says at its start,
  and the one that it takes.

Policies take turns in rounds of one step each. A step is timed from its call to the end of its last member, the update
of the step before included. Error is that of the median, measured by predicted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.rounds import Spread
from bench.sleep import AHEAD_S, LATE_MS, Size, call, config_of, started
from bench.sleep_members import Pace
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.planner.plan import Plan, make_plan
from zeropp_ray.schedule import POLICIES, Costs, Program, compile_program
from zeropp_ray.vote import decide

SIZE = Size(stages=8, chunks=2, microbatches=16)
NAPS = {"F": 1.0, "B": 1.3, "W": 0.7}  # of every chunk, in units
DELAY = 0.25  # of a message
COMPUTED = ("zeropp", "zeropp-published", "1f1b", "bfs", "interleaved", "zb-v")
TRAINED = (
    "model.dim=256",
    "model.layers=4",
    "parallel.shards=1",
    "parallel.microbatches=12",
)
AIMS = {"sleep": 0.05, "compute": 0.10, "train": 0.15}
STEPS = 24  # of the run that is trained; the first ones warm up
_WARM = 4


@dataclass(frozen=True)
class Row:
    """One policy: what the replay says of a step, and what steps took."""

    part: str
    name: str
    predicted_s: float
    seconds: list[float]
    late_ms: float = 0.0  # at most, of a member's begin of a step; of sleeping members

    @property
    def error(self) -> float:
        return statistics.median(self.seconds) / self.predicted_s - 1


def run(rounds: int, quick: bool, out: Path, *, parts: Sequence[str] = (), unit_ms: float = 20.0) -> list[Row]:
    """All rows; ``out/replay.json`` and ``replay.md`` show them. ``quick`` takes three rounds at most."""
    rounds = min(rounds, 3) if quick else rounds
    made: Mapping[str, Callable[[], Iterator[Row]]] = {
        "sleep": lambda: sleeping(rounds, unit_ms),
        "compute": lambda: computing(rounds),
        "train": training,
    }
    rows = [row for part in parts or made for row in made[part]()]
    out.mkdir(parents=True, exist_ok=True)
    found = [dataclasses.asdict(row) | {"error": row.error} for row in rows]
    (out / "replay.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "replay.md").write_text(table(rows), encoding="utf-8")
    return rows


# --- layers that sleep


def sleeping(
    rounds: int, unit_ms: float, size: Size = SIZE, policies: Sequence[str] = tuple(POLICIES)
) -> Iterator[Row]:
    """Every policy on ``size``, the chunks of each alike whatever their number."""
    runs = {}
    for policy in policies:
        own = dataclasses.replace(size, chunks=POLICIES[policy].chunks or size.chunks)
        config = config_of(own, policy=policy)
        runs[policy] = (config, make_plan(config))
    awake = {
        chunks: _profiled(*next(r for r in runs.values() if r[1].layout.chunks == chunks))
        for chunks in (1, 2)
        if any(plan.layout.chunks == chunks for _, plan in runs.values())
    }
    unit = unit_ms / 1e3
    programs = {}
    for policy, (config, plan) in runs.items():
        costs = _asleep(awake[plan.layout.chunks], unit)
        programs[policy] = compile_program(config.parallel.schedule(costs))
    naps = {task: cost * unit for task, cost in NAPS.items()}
    with started(size, {policy: _loose(*made, programs[policy]) for policy, made in runs.items()}, {}) as pipes:
        call(pipes, "pace", Pace(naps, DELAY * unit, programs))
        steps = _Steps(pipes)
        taken = _rounds(rounds, list(runs), steps.take)
        for policy in policies:
            yield Row("sleep", policy, programs[policy].makespan, taken[policy], steps.late_s[policy] * 1e3)


def _asleep(awake: Costs, unit_s: float) -> Costs:
    """The costs of a model awake, and its naps."""
    tasks = {
        task: tuple(round(seconds + nap * unit_s, 6) for seconds in getattr(awake, task)) for task, nap in NAPS.items()
    }
    return dataclasses.replace(awake, **tasks, RF=tasks["F"], comm=DELAY * unit_s, hops=())


def _loose(config: RunConfig, plan: Plan, program: Program) -> tuple[RunConfig, Plan]:
    """The run of a policy with the program that its costs give: its members are built for that."""
    return config, dataclasses.replace(plan, program=program)


class _Steps:
    """Steps of sleeping members, by policy."""

    def __init__(self, pipes: Sequence[Any]) -> None:
        self._pipes = pipes
        self._decisions: dict[str, Any] = {}
        self.late_s: dict[str, float] = {}

    def take(self, policy: str) -> float:
        start = time.monotonic() + AHEAD_S
        given = call(self._pipes, "step", policy, start, self._decisions.get(policy))
        members = [stepped for stepped, _ in given]
        self.late_s[policy] = max(*(member.late_s for member in members), self.late_s.get(policy, 0.0))
        self._decisions[policy] = decide(1, [vote for _, vote in given], 0.0)
        return max(member.ended for member in members) - start


# --- a model that computes


def computing(rounds: int) -> Iterator[Row]:
    """Policies of two stages, one thread each, in plain processes, as in the other suites."""
    from bench.crew import Crew, start
    from bench.suites import MODEL, TRAIN
    from bench.variant import Variant
    from zeropp_ray.allocator import keep_freed_memory

    keep_freed_memory()  # as a member does
    shared, crews, programs = {"model": MODEL, "train": TRAIN}, dict[str, Crew](), {}
    measured: dict[tuple[int, ...], Costs] = {}
    try:
        for policy in COMPUTED:
            V = POLICIES[policy].chunks or 2
            layout = {"stages": 2, "chunks": V, "microbatches": 8, "microbatch_size": 2, "policy": policy}
            variant = Variant(policy, "ours", layout)
            config = variant.config(shared)
            plan = make_plan(config)
            cut = tuple(map(len, plan.ranges))
            if cut not in measured:
                measured[cut] = _profiled(config, plan)
            programs[policy] = compile_program(config.parallel.schedule(measured[cut]))
            crews[policy] = start(variant, config, "cpu")
            crews[policy].run(_WARM - 1)
        taken = _rounds(rounds, list(crews), lambda policy: crews[policy].run(1))
    finally:
        for crew in crews.values():
            crew.close()
    for policy, program in programs.items():
        yield Row("compute", policy, program.makespan, taken[policy])


def _profiled(config: RunConfig, plan: Plan) -> Costs:
    from zeropp_ray.planner.profile import measure

    return measure(config, plan, microbatches=9)[0]


def _rounds(rounds: int, names: Sequence[str], take: Callable[[str], float]) -> dict[str, list[float]]:
    """Seconds of each by round, in an order of the round's own; one more at the start is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1 + rounds):
        for name in random.Random(number).sample(names, len(names)):
            seconds = take(name)
            if number:
                taken[name].append(seconds)
    return taken


# --- a run of the command


def training(settings: Sequence[str] = TRAINED, steps: int = STEPS) -> Iterator[Row]:
    """What a user does: profile, train, and look at the record of the run."""
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        sets = [part for setting in settings for part in ("--set", setting)]
        _zeropp("profile", *sets, "--out", str(costs))
        more = [f"run.dir={folder}/runs", "run.name=replay", f"train.steps={steps}", "train.eval_every=0"]
        more += [f"parallel.costs={costs}", "parallel.unit=auto"]
        _zeropp("train", *sets, *(part for setting in more for part in ("--set", setting)))
        run = Path(folder) / "runs" / "replay"
        predicted = make_plan(load_config(run / "config.toml")).program.makespan
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        seconds = [line["seconds"] for line in lines if "seconds" in line and line.get("step", 0) > _WARM]
        yield Row("train", "zeropp train", predicted, seconds)


def _zeropp(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "jobs.cli", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"zeropp {arguments[0]} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")


# --- what is shown


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each policy. Quartiles in brackets."""
    text = ""
    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        text += f"\n### {part}: aim {AIMS[part]:.0%}\n\n| policy | predicted ms | measured ms | error |\n"
        text += "| --- | --- | --- | --- |\n"
        for row in own:
            spread = Spread.of([seconds * 1e3 for seconds in row.seconds])
            measured = f"{spread.middle:.0f} [{spread.low:.0f}, {spread.high:.0f}]"
            text += f"| {row.name} | {row.predicted_s * 1e3:.0f} | {measured} | {row.error:+.1%} |\n"
        late = max(row.late_ms for row in own)
        if late > LATE_MS:
            text += f"\nThe machine was busy with other things: a member began a step {late:.0f} ms late.\n"
    return text.lstrip("\n")


@click.command(help=__doc__, context_settings={"show_default": True})
@click.argument("parts", nargs=-1, type=click.Choice(list(AIMS)))
@click.option("--rounds", default=5, help="Steps of each policy.")
@click.option("--quick", is_flag=True, help="At most three rounds.")
@click.option("--unit-ms", default=20.0, help="How long a nap of cost 1 is, in milliseconds.")
@click.option("--out", default="bench/results", type=click.Path(path_type=Path), help="Folder for what is written.")
def main(parts: tuple[str, ...], rounds: int, quick: bool, unit_ms: float, out: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    run(rounds, quick, out, parts=parts, unit_ms=unit_ms)
    print((out / "replay.md").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
