"""What faults cost: ``python -m bench.recovery [--faults 10]``.

- *times*: members of a run over Ray are killed, stopped and hung, with a warm spare and without one; how long until
  each was noticed, and until all were back, ready to take the next step.
- *cost when nothing fails*: the model of the demo in plain processes. Steps with a copy of the state and without take
  turns; what the main thread pays for a copy, and what all threads of a member do. Beats and positions are measured by
  the processor time of their thread, and per call.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from zeropp_ray.config import RunConfig

SETTINGS = {
    "model": {"layers": 4, "dim": 64, "heads": 4, "seq_len": 64},
    "parallel": {"stages": 2, "chunks": 2, "shards": 2, "microbatches": 4, "microbatch_size": 2},
    "train": {"eval_every": 0, "eval_sequences": 8},
    "checkpoint": {"every_minutes": 0.0},
}
DEMO = {
    "model": {"layers": 4, "dim": 128, "heads": 4, "seq_len": 128},
    "parallel": {"stages": 2, "chunks": 2, "shards": 2, "microbatches": 8, "microbatch_size": 2},
}
HANG_S = 5.0
SPACE_S = 8.0  # between two faults, for the next spare to be warm
WARM_UP_STEPS = 10


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--faults", default=10, help="How many of each kind.")
@click.option("--steps", default=60, help="Steps with a copy, and as many without one.")
@click.option("--out", type=click.Path(path_type=Path), default="bench/results", help="Folder for what is written.")
def main(faults: int, steps: int, out: Path) -> None:
    rows = {"cost": cost(steps)}
    for line in told_cost(rows["cost"]):
        click.echo(line)
    rows["times"] = [
        times(kind, spares, faults if kind == "kill" else max(1, faults // 3))
        for kind, spares in (("kill", 1), ("kill", 0), ("stop", 1), ("hang", 1))
    ]
    click.echo("\n| fault | noticed after s | then back after s | of |\n| --- | --- | --- | --- |")
    for row in rows["times"]:
        name = f"{row['kind']}, {'a warm spare' if row['spares'] else 'no spare'}"
        click.echo(f"| {name} | {_spread(row['noticed_s'])} | {_spread(row['resumed_s'])} | {len(row['resumed_s'])} |")
    out.mkdir(parents=True, exist_ok=True)
    (out / "recovery.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def times(kind: str, spares: int, count: int) -> dict[str, Any]:
    """Faults of one kind in a run over Ray."""
    from actors.run import run_training
    from zeropp_ray.faults import read_faults

    seconds = _step_s()
    apart = max(2, round(SPACE_S / seconds))
    limits = {"copy_every": 1, "spares": spares, "suspect_s": HANG_S / 2, "hang_s": HANG_S}
    steps = (count + 1) * apart
    config = RunConfig.from_dict(
        {
            **SETTINGS,
            "run": {"name": f"{kind}{spares}"},
            "recovery": limits,
            "train": {**SETTINGS["train"], "steps": steps},
        }
    )
    lines = [f"{kind} stage={i % 2} member={i // 2 % 2} step={(i + 1) * apart} at=B" for i in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        told: list[dict[str, Any]] = []
        inject = read_faults(lines, config)
        run_training(config, address=None, run_dir=Path(folder), on_event=told.append, inject=inject)
    found = [event for event in told if event["kind"] == "recovery"]
    assert len(found) == count
    row: dict[str, Any] = {"kind": kind, "spares": spares}
    return row | {name: [event[name] for event in found] for name in ("noticed_s", "resumed_s")}


_known: list[float] = []


def _step_s() -> float:
    """How long a step of such a run takes here."""
    if not _known:
        from actors.run import run_training

        config = RunConfig.from_dict({**SETTINGS, "train": {**SETTINGS["train"], "steps": 30}})
        with tempfile.TemporaryDirectory() as folder:
            told: list[dict[str, Any]] = []
            run_training(config, address=None, run_dir=Path(folder), on_event=told.append)
        _known.append(statistics.median(event["seconds"] for event in told if event["kind"] == "step"))
    return _known[0]


# -- what it costs when nothing fails ---------------------------------------------------------------------------------


def cost(steps: int) -> dict[str, Any]:
    """By member, in seconds a step."""
    import torch.distributed as dist

    from zeropp_ray.planner.plan import make_plan
    from zeropp_ray.vote import decide

    config = RunConfig.from_dict({**DEMO, "recovery": {"copy_every": 1}, "train": {"steps": 10**6}})
    plan = make_plan(config)
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = []
    for rank in range(plan.layout.size):
        mine, theirs = context.Pipe()
        context.Process(target=_member, args=(theirs, config, rank, store.port), daemon=True).start()
        pipes.append(mine)
    decision: Any = None
    for step in range(1, WARM_UP_STEPS + 2 * steps + 1):
        for pipe in pipes:
            pipe.send((step, decision, step % 2 == 0))
        decision = decide(step, [pipe.recv() for pipe in pipes], 1.0)
    for pipe in pipes:
        pipe.send(None)
    return {"members": [pipe.recv() for pipe in pipes]}


def _member(pipe: Any, config: RunConfig, rank: int, port: int) -> None:
    """One member: steps as it is told, then what they took."""
    import torch

    from actors.progress import ProgressFile
    from zeropp_ray.allocator import keep_freed_memory
    from zeropp_ray.comm.gloo import Rendezvous, connect
    from zeropp_ray.data.corpus import load_corpus
    from zeropp_ray.data.sampler import Batches
    from zeropp_ray.member import StageMember
    from zeropp_ray.planner.plan import make_plan

    torch.set_num_threads(1)
    keep_freed_memory()
    plan = make_plan(config)
    me = list(plan.layout.members())[rank]
    member = StageMember(config, plan, me, Batches(config, load_corpus(config), me.f, me.r))
    member.join(connect(Rendezvous("127.0.0.1", port, 0, 60.0), plan.layout, me, host="127.0.0.1"))
    blocked: list[float] = []
    copy_state = member.copy_state

    def timed(step: int) -> None:
        began = time.perf_counter()
        copy_state(step)
        blocked.append(time.perf_counter() - began)

    member.copy_state = timed  # type: ignore[method-assign]
    beats: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        progress = ProgressFile(Path(folder) / "progress")
        progress.beat_every(0.5, lambda: (beats.append(time.thread_time()), member.waits)[1])
        took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        while (request := pipe.recv()) is not None:
            step, decision, copy = request
            progress.begin(step)
            began = time.perf_counter(), time.process_time()
            vote = member.advance(step, decision, progress, copy=copy)
            took[copy].append((time.perf_counter() - began[0], time.process_time() - began[1]))
            pipe.send(vote)
        began_s = time.perf_counter()
        for position in range(10_000):
            progress(position)
        call_s = (time.perf_counter() - began_s) / 10_000
    skip = WARM_UP_STEPS // 2
    pipe.send(
        {
            "step_s": [statistics.median(s for s, _ in took[copy][skip:]) for copy in (False, True)],
            "cpu_s": [statistics.median(c for _, c in took[copy][skip:]) for copy in (False, True)],
            "copy_blocked_s": statistics.median(blocked[skip:]),
            "beat_s": (beats[-1] - beats[0]) / (len(beats) - 1),
            "position_s": call_s * len(plan.program.ranks[me.p]),
        }
    )


def told_cost(found: dict[str, Any]) -> list[str]:
    """The same in words, of the member that pays most."""
    members = found["members"]
    share = max(each["copy_blocked_s"] / each["step_s"][0] for each in members)
    cpu = max(each["cpu_s"][1] / each["cpu_s"][0] - 1 for each in members)
    beats = max(each["beat_s"] / 0.5 for each in members)
    positions = max(each["position_s"] / each["step_s"][0] for each in members)
    step_ms = 1e3 * max(each["step_s"][0] for each in members)
    return [
        f"a step without a copy: {step_ms:.0f} ms",
        f"a copy every step: main thread {share:.2%} of a step, processor time {cpu:+.2%}",
        f"beats: {beats:.4%} of the time; positions: {positions:.3%} of a step",
    ]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main()
