"""The driver actor of a run: it owns members, placement group, rendezvous and epoch, issues the steps and keeps the
record.

It computes nothing and no tensor passes it. A step is one call per member; control costs one round, because the
decision on a step goes out with the call that starts the next one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.failure import collect
from actors.progress import Position, read_progress
from actors.stage_group import MemberHandle, StageGroup
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ZeroppError

Event = dict[str, Any]

TELL_S = 0.5  # the job process hears of steps at most this often
PLACE_S = 60.0  # how long the members' bundles are waited for
START_S = 120.0  # how long members may take to start and to build
GONE_S = 3.0  # how long the end of killed processes is waited for


@dataclass(frozen=True)
class RunFolder:
    """What a driver needs to know of where it runs:

    the run's folder, scratch for progress files, and the directory it was started from.
    """

    path: Path
    scratch: Path
    start_directory: str


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class RunDriver:
    """One per run. It has no control threads: Ray's loop for them alone would cost it 0.6% of a core."""

    def run(self, config: dict[str, Any], plan: Any, folder: RunFolder) -> Iterator[list[Event]]:
        """Train to the end; call it with ``num_returns="streaming"``. Yields what happened, at most every
        :data:`TELL_S` seconds.

        The last event is ``{"kind": "done", "summary": …}`` or ``{"kind": "failed", "error": cause}``; by then nothing
        of the run is left.
        """
        run = Run(RunConfig.from_dict(config), plan, folder)
        try:
            with run.members():
                yield from _in_batches(run.train())
            yield [{"kind": "done", "summary": run.summary}]
        except ZeroppError as error:
            yield [{"kind": "failed", "error": str(error)}]


def _in_batches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Each item costs the driver as much as an actor call, so steps are told together."""
    batch: list[Event] = []
    told = -math.inf
    for event in events:
        batch.append(event)
        if time.monotonic() - told >= TELL_S:
            yield batch
            batch, told = [], time.monotonic()
    yield batch


class Run:
    """The members of a run and the loop over its steps."""

    def __init__(self, config: RunConfig, plan: Any, folder: RunFolder) -> None:
        self._config, self._plan, self._folder = config, plan, folder
        self.summary: dict[str, Any] = {}
        self._stages: list[StageGroup] = []
        self._epoch = 0
        self._evaluating = False

    # -- members ------------------------------------------------------------------------------------------------------

    @contextmanager
    def members(self) -> Iterator[None]:
        """Place, start, build and join all members; kill them and remove the placement group in the end."""
        group = self._place()
        try:
            self._start(group)
            yield
        finally:
            self._end(group)

    def _place(self) -> PlacementGroup:
        cpus, size = self._config.resources.cpus, self._plan.layout.size
        group = placement_group([{"CPU": cpus}] * size, strategy="PACK", name=f"zeropp-{self._config.run.name}")
        if not group.wait(PLACE_S):
            remove_placement_group(group)
            free = ray.available_resources().get("CPU", 0)
            raise ZeroppError(
                f"{size} members of {cpus:g} CPUs each found no place within {PLACE_S:g} s: the cluster has {free:g} "
                "CPUs free; wait until others finish, add nodes, or lower resources.cpus"
            )
        return group

    def _start(self, group: PlacementGroup) -> None:
        layout, folder = self._plan.layout, self._folder
        bundles: dict[int, list[Any]] = {p: [] for p in range(layout.stages)}
        for bundle, me in enumerate(layout.members()):
            bundles[me.p].append((me, bundle))
        cpus = self._config.resources.cpus
        self._stages = [StageGroup(p, members, group, cpus) for p, members in bundles.items()]
        self._all = [member for stage in self._stages for member in stage.members]
        for member, identity in zip(self._all, self._call("identify", timeout_s=START_S), strict=True):
            member.identity = identity
        members = [{"stage": m.me.p, "shard": m.me.f, "replica": m.me.r, **asdict(m.identity)} for m in self._all]  # type: ignore[arg-type]
        (folder.path / "members.json").write_text(json.dumps(members, indent=1) + "\n", encoding="utf-8")
        calls = [
            member.actor.build.remote(
                self._config.to_dict(), self._plan, self._progress_path(member), folder.start_directory
            )
            for member in self._all
        ]
        self._collect(calls, timeout_s=START_S)
        self._join()

    def _join(self) -> None:
        """Form a new epoch around a rendezvous store of its own, on a port that it binds itself."""
        import torch.distributed as dist

        from zeropp_ray.comm.gloo import Rendezvous

        host, timeout_s = ray.util.get_node_ip_address(), self._config.resources.step_timeout_s
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        at = Rendezvous(host=host, port=self._store.port, epoch=self._epoch, timeout_s=timeout_s)
        self._call("join", at, self._plan.layout, timeout_s=timeout_s)

    def _end(self, group: PlacementGroup) -> None:
        """Leave nothing: actors, their processes, placement group, scratch files, store."""
        for stage in self._stages:
            stage.kill()
        remove_placement_group(group)
        here = ray.util.get_node_ip_address()
        pids = [m.identity.pid for m in self._all if m.identity and m.identity.host == here] if self._stages else []
        deadline = time.monotonic() + GONE_S
        while any(map(_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(self._folder.scratch, ignore_errors=True)
        del self._store

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return self._collect([ref for stage in self._stages for ref in stage.call(method, *arguments)], timeout_s)

    def _collect(self, calls: list[Any], timeout_s: float) -> list[Any]:
        program = self._plan.evaluation if self._evaluating else self._plan.program
        return collect(self._all, calls, timeout_s=timeout_s, where=self._where, programs=program.ranks)

    def _progress_path(self, member: MemberHandle) -> Path:
        return self._folder.scratch / "member-{}-{}-{}".format(*member.me)

    def _where(self, member: MemberHandle) -> Position | None:
        """Where a member is, or was: read here, or by another member of its node."""
        path, identity = self._progress_path(member), member.identity
        if identity is None or identity.host == ray.util.get_node_ip_address():
            return read_progress(path)
        for other in self._all:
            if other is not member and other.identity and other.identity.node_id == identity.node_id:
                try:
                    return ray.get(other.actor.progress_of.remote(path), timeout=1.0)
                except (ray.exceptions.RayError, TimeoutError):
                    continue
        return None

    # -- steps --------------------------------------------------------------------------------------------------------

    def train(self) -> Iterator[Event]:
        """All steps, evaluations and the record. Leaves :attr:`summary`."""
        from zeropp_ray.optim import learning_rate
        from zeropp_ray.vote import decide

        train, limit = self._config.train, self._config.resources.step_timeout_s
        record = Record(self._folder.path)
        decision, validation = None, math.nan
        for step in range(1, train.steps + 1):
            record.begin_step()
            votes = self._call("advance", step, decision, timeout_s=limit)
            decision = decide(step, votes, train.clip_norm)
            lr = learning_rate(
                step,
                steps=train.steps,
                lr=train.lr,
                warmup_steps=train.warmup_steps,
                min_lr_ratio=train.min_lr_ratio,
            )
            yield record.committed(decision, lr, max(vote.seconds for vote in votes), train.steps)
            if step == train.steps or (train.eval_every and step % train.eval_every == 0):
                self._call("flush", decision, timeout_s=limit)
                decision = None
                validation = self._evaluate()
                yield record.evaluated(step, validation)
        self.summary = record.finish(self._call("report", timeout_s=limit), validation)

    def _evaluate(self) -> float:
        """Validation loss in nats per token: summed over all members, then divided."""
        self._evaluating = True
        sums = self._call("evaluate", timeout_s=self._config.resources.step_timeout_s)
        self._evaluating = False
        tokens = sum(tokens for _, tokens in sums)
        return sum(loss for loss, _ in sums) / tokens if tokens else math.nan


class Record:
    """What is written about a run while it goes on:

    ``metrics.jsonl``, one line a step or evaluation, and ``summary.json``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = (folder / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")
        self._losses: list[float] = []
        self._tokens = 0
        self._skipped = 0
        self._seconds: list[float] = []
        self._own: list[tuple[float, float]] = []  # the driver's process time and its blocked time, of each step

    def begin_step(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def committed(self, decision: Any, lr: float, busiest_s: float, steps: int) -> Event:
        """Record a step; the event for whoever watches. ``busiest_s``: the longest that a member worked on it."""
        seconds, process_s = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        self._seconds.append(seconds)
        self._own.append((process_s, seconds - busiest_s))
        self._losses.append(decision.loss)
        self._tokens += decision.tokens
        self._skipped += not decision.commit
        line = {
            "step": decision.step,
            "loss": _finite(decision.loss),
            "tokens": self._tokens,
            "tokens_per_s": decision.tokens / seconds,
            "grad_norm": _finite(decision.grad_norm),
            "lr": lr,
            "skipped": not decision.commit,
            "seconds": seconds,
        }
        if decision.reason:
            line["reason"] = decision.reason
        self._metrics.write(json.dumps(line) + "\n")
        return {"kind": "step", "steps": steps, "driver_process_s": process_s, **line}

    def evaluated(self, step: int, validation_loss: float) -> Event:
        line = {"step": step, "validation_loss": _finite(validation_loss)}
        self._metrics.write(json.dumps(line) + "\n")
        return {"kind": "eval", **line}

    def finish(self, reports: list[Any], validation_loss: float) -> dict[str, Any]:
        """Write and return the summary. Counts are totals over all members; the driver's times are medians per step."""
        from zeropp_ray.comm.base import Counters

        total = Counters()
        for report in reports:
            total.add(report.counters)
        counts = total.as_dict()
        settled = self._own[1:] or self._own  # the first step warms up
        summary = {
            "version": 1,
            "steps": len(self._losses),
            "tokens": self._tokens,
            "skipped_steps": self._skipped,
            "first_loss": _finite(self._losses[0]),
            "last_loss": _finite(self._losses[-1]),
            "validation_loss": _finite(validation_loss),
            "tokens_per_s": self._tokens / sum(self._seconds),
            "seconds": sum(self._seconds),
            "gathers": total.gathers,
            "reduces": total.reduces,
            "bytes": sum(
                value for name, value in counts.items() if name.endswith("bytes") and name != "received_bytes"
            ),
            "traffic": counts,
            "peak_live_chunks": [report.measured.peak_live_chunks for report in reports],
            "peak_resident_elements": [report.measured.peak_resident_elements for report in reports],
            "peak_open_gradient_buffers": [report.peak_open_gradient_buffers for report in reports],
            "driver_process_s_per_step": _median([process for process, _ in settled]),
            "driver_blocked_s_per_step": _median([blocked for _, blocked in settled]),
        }
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        self._metrics.close()
        return summary


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
