"""What the driver itself costs a step: ``python -m bench.driver_share [--members 4] [--steps 60] [--step-ms 300]``.

The driver's own loop runs as it is, over actors that only sleep for the time of a step and vote, so that cores are free
and what is left is control. Per step, median and tenth to ninetieth percentile of the second half:

- *process*: CPU time of all threads of the driver's process, from the call of a step to its decision;
- *blocked*: wall time from the last member's end of a step to the first member's start of the next (one clock):
  nothing is computed and nothing moves.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--members", default=4, help="Number of members.")
@click.option("--steps", default=60, help="Steps measured.")
@click.option("--step-ms", default=300.0, help="Length of a step, in milliseconds.")
def main(members: int, steps: int, step_ms: float) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        measured = ray.get(_driver().remote().measure.remote(members, steps, step_ms / 1000))
    finally:
        ray.shutdown()
    for name, values in measured.items():
        values = values[len(values) // 2 :]
        middle, low, high = statistics.median(values), *statistics.quantiles(values, n=10)[::8]
        print(
            f"{name}  {middle * 1e3:.2f} ms a step ({low * 1e3:.2f} to {high * 1e3:.2f}), {middle * 1e5 / step_ms:.2f}%"
        )


def _driver() -> Any:
    import ray

    from actors.driver import Run, RunFolder
    from actors.stage_group import MemberHandle
    from zeropp_ray.checkpoint import run_id
    from zeropp_ray.comm.base import Counters
    from zeropp_ray.config import RunConfig
    from zeropp_ray.engine import Measured
    from zeropp_ray.member import Report
    from zeropp_ray.planner.plan import make_plan
    from zeropp_ray.vote import Vote

    @ray.remote(num_cpus=0, concurrency_groups={"control": 2})  # type: ignore[call-overload]
    class SleepingWorker:
        """As a StageWorker, but a step is a sleep."""

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds
            self.worked: list[tuple[float, float]] = []

        def advance(self, step: int, decision: Any, orders: Any = None) -> Vote:
            start = time.monotonic()
            time.sleep(self.seconds)
            self.worked.append((start, time.monotonic()))
            return Vote(1.0, 1, 1.0, self.seconds)

        def all_worked(self) -> list[tuple[float, float]]:
            return self.worked

        def flush(self, decision: Any) -> None:
            pass

        def snapshot(self, folder: Path) -> None:
            pass

        def saved(self) -> list[Any]:
            return []

        def evaluate(self) -> tuple[float, int]:
            return 1.0, 1

        def report(self) -> Report:
            return Report(Counters(), Measured(), 0, 0, None)

    @ray.remote(num_cpus=0)
    class Driver:
        def measure(self, members: int, steps: int, seconds: float) -> dict[str, list[float]]:
            config = RunConfig.from_dict({"train": {"steps": steps, "eval_every": 0}})
            plan = make_plan(config)
            with tempfile.TemporaryDirectory() as folder:
                run_id.create(Path(folder))
                run = Run(config, plan, RunFolder(Path(folder), Path(folder), folder), {})
                me = next(plan.layout.members())
                handles = [MemberHandle(me, SleepingWorker.remote(seconds)) for _ in range(members)]
                run._members.all += handles
                process = []
                for event in run.train():
                    if event["kind"] == "step":
                        process.append(event["driver_process_s"])
                worked = ray.get([member.actor.all_worked.remote() for member in handles])
                ends = [max(end for _, end in step) for step in zip(*worked, strict=True)]
                starts = [min(start for start, _ in step) for step in zip(*worked, strict=True)]
                gaps = [start - end for end, start in zip(ends[:-1], starts[1:], strict=True)]
                return {"process": process, "blocked": gaps}

    return Driver


if __name__ == "__main__":
    main()
