"""The driver actor of a run: it owns members, placement group, rendezvous and epoch, issues the steps and keeps the
record.

It computes nothing and no tensor passes it. A step is one call per member; control costs one round, because the
decision on a step goes out with the call that starts the next one.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.checkpoints import Checkpoints
from actors.failure import collect
from actors.folder import RunFolder
from actors.locks import only_driver
from actors.processes import running
from actors.progress import STARTING, Position, read_progress
from actors.record import Record
from actors.stage_group import MemberHandle, StageGroup
from zeropp_ray.checkpoint.manifest import Progress
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ZeroppError

if TYPE_CHECKING:
    from zeropp_ray.evaluation import Loss

Event = dict[str, Any]

TELL_S = 0.5  # the job process hears of steps at most this often
PLACE_S = 60.0  # how long the members' bundles are waited for
START_S = 120.0  # how long members may take to start and to build
SLOW = 1.2  # matrix products in bf16 that take so many times as long as in fp32 are worth a remark
GONE_S = 3.0  # how long the end of killed processes is waited for


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class RunDriver:
    """One per run. It has no control threads: Ray's loop for them alone would cost it 0.6% of a core."""

    def run(self, config: dict[str, Any], plan: Any, folder: RunFolder, data: dict[str, Any]) -> Iterator[list[Event]]:
        """Train to the end; call it with ``num_returns="streaming"``. Yields what happened, at most every
        :data:`TELL_S` seconds.

        The first event is ``{"kind": "started"}``, the last ``{"kind": "done", "summary": …}``, ``{"kind": "stopped",
        "step": …, "error": …}`` or ``{"kind": "failed", "error": cause}``; by then nothing of the run is left.
        """
        run = Run(RunConfig.from_dict(config), plan, folder, data)
        try:
            with only_driver(folder.path, folder.job), run.members():
                yield from _in_batches(run.train())
            yield [run.outcome]
        except ZeroppError as error:
            yield [{"kind": "failed", "error": str(error), "trace": getattr(error, "trace", "")}]

    def evaluate(self, config: dict[str, Any], plan: Any, folder: RunFolder, rounds: int) -> Any:
        """The loss of the checkpoint ``folder.resume`` on ``folder.text``, summed over all members.

        ``rounds``: how many steps' worth of text that is.
        """
        run = Run(RunConfig.from_dict(config), plan, folder)
        with run.members():
            return run.evaluate(rounds)


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

    def __init__(self, config: RunConfig, plan: Any, folder: RunFolder, data: dict[str, Any] | None = None) -> None:
        self._config, self._plan, self._folder, self._data = config, plan, folder, data or {}
        self.outcome: Event = {}
        self._stages: list[StageGroup] = []
        self._all: list[MemberHandle] = []
        self._store: Any = None  # the rendezvous of the epoch at hand
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
            member.actor.build.remote(self._config.to_dict(), self._plan, folder, self._data) for member in self._all
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
        pids = [m.identity.pid for m in self._all if m.identity and m.identity.host == here]
        deadline = time.monotonic() + GONE_S
        while any(map(running, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(self._folder.scratch, ignore_errors=True)
        self._store = None

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return self._collect([ref for stage in self._stages for ref in stage.call(method, *arguments)], timeout_s)

    def _collect(self, calls: list[Any], timeout_s: float) -> list[Any]:
        program = self._plan.evaluation if self._evaluating else self._plan.program
        return collect(self._all, calls, timeout_s=timeout_s, where=self._where, programs=program.ranks)

    def _where(self, member: MemberHandle) -> Position | None:
        """Where a member is, or was: read here, or by another member of its node."""
        path, identity = self._folder.progress_of(member.me), member.identity
        if identity is None or identity.host == ray.util.get_node_ip_address():
            return read_progress(path) or STARTING
        for other in self._all:
            if other is not member and other.identity and other.identity.node_id == identity.node_id:
                try:
                    return ray.get(other.actor.progress_of.remote(path), timeout=1.0)
                except (ray.exceptions.RayError, TimeoutError):
                    continue
        return None

    # -- steps --------------------------------------------------------------------------------------------------------

    def train(self) -> Iterator[Event]:
        """All steps, evaluations, checkpoints and the record. Leaves :attr:`outcome`."""
        from zeropp_ray.vote import decide

        train, limit = self._config.train, self._config.resources.step_timeout_s
        progress, decision, validation = self._begin(), None, math.nan
        record = Record(self._folder.path, progress)
        checkpoints = Checkpoints(
            self._config, self._folder.path, list(self._plan.program.spec.units), self._data, progress.step
        )
        yield from self._remarks()
        yield {"kind": "started"}
        # The second step is the first with an update in it.
        measured = min(progress.step + 2, train.steps) if self._config.resources.measure_memory else 0
        for step in range(progress.step + 1, train.steps + 1):
            if self._folder.stop.exists():
                break
            record.begin_step()
            votes = self._call("advance_measured" if step == measured else "advance", step, decision, timeout_s=limit)
            decision = decide(step, votes, train.clip_norm)
            progress = self._after(progress, decision)
            yield record.committed(
                decision, self._learning_rate(step), max(vote.seconds for vote in votes), train.steps
            )
            if step == measured:
                yield record.measured(step, self._memory())
            yield from checkpoints.poll()
            last = step == train.steps
            evaluate = last or (train.eval_every and step % train.eval_every == 0)
            save = checkpoints.due(step)
            if evaluate or save:
                self._call("flush", decision, timeout_s=limit)
                decision = None
            if save:
                yield from checkpoints.begin(progress, self._saving_call)
            if evaluate:
                validation = self._evaluate().per_token
                yield record.evaluated(step, validation)
        self._call("flush", decision, timeout_s=limit)
        yield from checkpoints.finish(progress, self._saving_call)
        error = checkpoints.unsaved(progress)
        if progress.step == train.steps:
            summary = record.finish(self._call("report", timeout_s=limit), validation, checkpoints, error)
            self.outcome = {"kind": "done", "summary": summary}
        else:
            self.outcome = {"kind": "stopped", "step": progress.step, "error": error}

    def _begin(self) -> Progress:
        """Where the run stands before its first step: at the beginning, or where the checkpoint was."""
        from zeropp_ray.checkpoint.reader import open_checkpoint

        if self._folder.resume is None:
            if self._config.model.init_from:
                self._call("adopt", timeout_s=self._config.resources.step_timeout_s)
            return Progress(step=0, commits=0, samples=0, tokens=0)
        self._call("restore", self._folder.resume, timeout_s=self._config.resources.step_timeout_s)
        return open_checkpoint(self._folder.resume).manifest.progress

    def _memory(self) -> list[dict[str, Any]]:
        """The tensor memory that was measured at each member and what was predicted for it, in bytes by kind."""
        from zeropp_ray.planner.memory import predict_memory

        predicted = [predict_memory(self._plan, self._config, stage) for stage in range(self._plan.layout.stages)]
        reports = self._call("report", timeout_s=self._config.resources.step_timeout_s)
        return [
            {
                "member": str(member.me),
                "at": report.memory.where,
                "predicted": predicted[member.me.p],
                "measured": report.memory.at_peak,
                "highest": report.memory.highest,
            }
            for member, report in zip(self._all, reports, strict=True)
        ]

    def _remarks(self) -> Iterator[Event]:
        """What is no error and should be known before the first step."""
        if self._config.train.dtype != "bfloat16":
            return
        times = self._call("time_against_fp32", timeout_s=START_S)
        slowest, member = max(zip(times, map(str, self._all), strict=True))
        if slowest > SLOW:
            text = f"takes {slowest:.3g} times as long as in float32 at {member}, whose processor has no instructions"
            yield {"kind": "log", "text": f"train.dtype = 'bfloat16': a matrix product {text}; use float32 for speed"}

    def _after(self, progress: Progress, decision: Any) -> Progress:
        return replace(
            progress,
            step=decision.step,
            commits=progress.commits + decision.commit,
            samples=decision.step * self._config.parallel.global_batch,
            tokens=progress.tokens + decision.tokens,
        )

    def _saving_call(self, method: str, *arguments: Any) -> list[Any]:
        """Start a save at all members; the references of their files."""
        self._call(method, *arguments, timeout_s=self._config.resources.step_timeout_s)
        return [member.actor.saved.remote() for member in self._all]

    def _learning_rate(self, step: int) -> float:
        from zeropp_ray.optim import learning_rate

        return learning_rate(step, self._config.train)

    def evaluate(self, rounds: int) -> Loss:
        """Of the checkpoint that the run begins with; nothing is trained or written."""
        self._call("load_weights", self._folder.resume, timeout_s=self._config.resources.step_timeout_s)
        return self._evaluate(rounds)

    def _evaluate(self, rounds: int = 1) -> Loss:
        """On the held-out text, summed over all members; a round may take as long as a step."""
        from zeropp_ray.evaluation import Loss

        self._evaluating = True
        sums = self._call("evaluate", timeout_s=rounds * self._config.resources.step_timeout_s)
        self._evaluating = False
        return Loss(sum(loss for loss, _ in sums), sum(tokens for _, tokens in sums))
