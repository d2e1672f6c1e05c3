"""The driver actor of a run: it issues the steps, decides on them, brings back what a fault takes, keeps the record.

It computes nothing and no tensor passes it. A step is one call per member; control costs one round, because the
decision on a step goes out with the call that starts the next one. After a fault only the members that were lost get
new processes; all go back to the newest step that is held everywhere, and what came after it is taken again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from actors.checkpoints import Checkpoints
from actors.draining import DrainWatch
from actors.events import append_event
from actors.failure import MemberFault, quietly
from actors.folder import RunFolder
from actors.health import Slowness
from actors.injection import carry_out, check, corrupt
from actors.locks import only_driver
from actors.members import START_S, Members
from actors.record import Record
from actors.recovery import History, Source, choose_source, judge
from actors.room import on_devices
from actors.worker import Orders
from zeropp_ray.checkpoint.manifest import Progress
from zeropp_ray.checkpoint.reader import latest, open_checkpoint
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.faults import Fault, Faults
from zeropp_ray.layout import Member
from zeropp_ray.uri import place

if TYPE_CHECKING:
    from zeropp_ray.evaluation import Loss

Event = dict[str, Any]

TELL_S = 0.5  # the job process hears of steps at most this often
SLOW = 1.2  # matrix products in bf16 that take so many times as long as in fp32 are worth a remark


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class RunDriver:
    """One per run. It has no control threads: Ray's loop for them alone would cost it 0.6% of a core."""

    def run(
        self,
        config: dict[str, Any],
        plan: Any,
        folder: RunFolder,
        data: dict[str, Any],
        inject: Sequence[Fault] = (),
    ) -> Iterator[list[Event]]:
        """Train to the end; call it with ``num_returns="streaming"``. Yields what happened, at most every
        :data:`TELL_S` seconds. ``inject``: faults to put in.

        ``{"kind": "started"}`` comes before the first step. The last event is ``{"kind": "done", "summary": …}``,
        ``{"kind": "stopped", "step": …, "error": …, "why": …}`` or ``{"kind": "failed", "error": cause, "exit_code": …,
        "early": whether a member failed before the first step}``; by then nothing of the run is left.
        """
        run = Run(on_devices(RunConfig.from_dict(config)), plan, folder, data, inject)
        try:
            with only_driver(folder.path, folder.job), run.members():
                yield from _in_batches(run.train())
            yield [run.outcome]
        except ZeroppError as error:
            trace, early = getattr(error, "trace", ""), isinstance(error, MemberFault)
            event = {"kind": "failed", "error": str(error), "trace": trace, "exit_code": error.exit_code}
            yield [{**event, "early": early}]

    def evaluate(self, config: dict[str, Any], plan: Any, folder: RunFolder, rounds: int) -> Any:
        """The loss of the checkpoint ``folder.resume`` on ``folder.text``, summed over all members.

        ``rounds``: how many steps' worth of text that is.
        """
        run = Run(on_devices(RunConfig.from_dict(config)), plan, folder, {})
        with run.members():
            return run.evaluate(rounds)


def _in_batches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Each item costs the driver as much as an actor call, so steps are told together; what else happens, at once."""
    batch: list[Event] = []
    told = -math.inf
    for event in events:
        batch.append(event)
        if event["kind"] != "step" or time.monotonic() - told >= TELL_S:
            yield batch
            batch, told = [], time.monotonic()
    yield batch


class Run:
    """The loop over the steps of a run, and over its faults."""

    def __init__(
        self, config: RunConfig, plan: Any, folder: RunFolder, data: dict[str, Any], inject: Sequence[Fault] = ()
    ) -> None:
        self._config, self._plan, self._folder, self._data = config, plan, folder, data
        self._limit_s = config.resources.step_timeout_s
        self.outcome: Event = {}
        self._members = Members(config, plan, folder, data)
        self._inject = inject
        self._faults = Faults(inject, folder.scratch / "injected") if inject else None
        self._history = History()
        self._slowness = Slowness(_planned(plan), config.recovery.slow_factor)
        self._decision: Any = None  # on the last step, not yet told to the members
        self._marks: dict[int, Progress] = {}  # where the run stood after recent steps
        self._copied: list[int] = []  # the last steps whose copy was ordered, since members last joined
        self._held = -1  # the newest step whose copies are whole everywhere
        self._lost: set[Member] = set()  # members that have no state yet

    @contextmanager
    def members(self) -> Iterator[None]:
        """Whatever there is of members inside is killed in the end, and their place in the cluster given back."""
        try:
            yield
        finally:
            self._members.end()

    # -- steps --------------------------------------------------------------------------------------------------------

    def train(self) -> Iterator[Event]:
        """All steps, evaluations, checkpoints, recoveries and the record. Leaves :attr:`outcome`."""
        yield from self._members.start()
        check(self._inject, self._members)
        self._members.join()
        self._progress = self._begin()
        self._marks[self._progress.step] = self._progress
        self._draining = DrainWatch(self._members.nodes)
        self._record = Record(self._folder.path, self._progress, self._folder.job)
        units = list(self._plan.program.spec.units)
        step, shelf = self._progress.step, self._folder.shelf()
        self._checkpoints = Checkpoints(self._config, self._folder.run, units, self._data, step, shelf)
        # The second step is the first with an update in it.
        second = min(self._progress.step + 2, self._config.train.steps)
        self._measured = second if self._config.resources.measure_memory else 0
        yield from self._remarks()
        yield {"kind": "started"}
        self._members.start_spares()
        while True:
            try:
                yield from self._steps()
                yield from self._finish()
                return
            except MemberFault as fault:
                yield from self._recover(fault)

    def _steps(self) -> Iterator[Event]:
        """From the step that is next to the last one, or to where the run is to stop."""
        train, record = self._config.train, self._record
        while self._progress.step < train.steps and not self._stop():
            step = self._progress.step + 1
            record.begin_step()
            orders = self._orders(step)
            votes = yield from self._members.watched(
                "advance", step, self._decision, timeout_s=self._limit_s, orders=orders
            )
            self._after(step, votes)
            busiest_s = max(vote.seconds for vote in votes)
            yield from record.committed(self._decision, self._learning_rate(step), busiest_s, train.steps)
            if record.step == step:
                self._history.advanced()
            if step == self._measured:
                yield record.measured(step, self._memory())
            yield from self._poll()
            evaluate = step == train.steps or (train.eval_every and step % train.eval_every == 0)
            evaluate = evaluate and not record.has_evaluation(step)
            save = self._checkpoints.due(step)
            if evaluate or save:
                self._flush()
            if save:
                yield from self._checkpoints.begin(self._progress, self._saving_call)
            if evaluate:
                yield record.evaluated(step, self._evaluate().per_token)
            yield from self._slow(votes)

    def _finish(self) -> Iterator[Event]:
        """The end of the run, or of this part of it: saved and told."""
        self._flush()
        yield from self._checkpoints.finish(self._progress, self._saving_call, self._members.settle)
        error = self._checkpoints.unsaved(self._progress)
        if self._progress.step == self._config.train.steps:
            reports = self._members.call("report", timeout_s=self._limit_s)
            summary = self._record.finish(reports, self._checkpoints, error)
            self.outcome = {"kind": "done", "summary": summary}
        else:
            self.outcome = {"kind": "stopped", "step": self._progress.step, "error": error, "why": self._why}

    def _stop(self) -> bool:
        """Whether somebody asked for it, or a node of the run is to go."""
        self._why = self._draining.check()
        return bool(self._why) or self._folder.stop.exists()

    def _orders(self, step: int) -> dict[Member, Orders]:
        """What the members are told besides: to copy the state before ``step``, and faults that are put in."""
        due: dict[Member, Fault] = {}
        if self._faults is not None:
            for fault in self._faults.due_at_driver(step):
                carry_out(fault, self._members.of(fault.member))
            due = self._faults.due(step)
        copy, measure = self._copy_is_due(step - 1), step == self._measured
        if copy:
            self._copied = [*self._copied[-1:], step - 1]
        if not (copy or measure or due):
            return {}
        return {me: Orders(copy, measure, due.get(me)) for me in self._plan.layout.members()}

    def _copy_is_due(self, step: int) -> bool:
        """Whether to copy the state after ``step``. Not before the last copy is whole everywhere: so one always is."""
        recovery = self._config.recovery
        if not recovery.copies:
            return False
        if not self._copied:
            return True
        return step - self._copied[-1] >= recovery.copy_every and self._held >= self._copied[-1]

    def _after(self, step: int, votes: Sequence[Any]) -> None:
        """Decide on ``step``, and note where that brings the run."""
        from zeropp_ray.vote import decide

        before = self._progress
        self._decision = decision = decide(step, votes, self._config.train.clip_norm)
        self._progress = replace(
            before,
            step=step,
            commits=before.commits + decision.commit,
            samples=step * self._config.parallel.global_batch,
            tokens=before.tokens + decision.tokens,
        )
        self._marks[step] = self._progress
        self._held = min(vote.held for vote in votes)
        oldest = min(self._copied, default=step)
        for old in [mark for mark in self._marks if mark < oldest]:
            del self._marks[old]
        self._members.watch.step_s.append(max(vote.seconds for vote in votes))

    def _flush(self) -> None:
        self._members.call("flush", self._decision, timeout_s=self._limit_s)
        self._decision = None

    def _poll(self) -> Iterator[Event]:
        for event in self._checkpoints.poll():
            if event["kind"] == "checkpoint" and self._faults is not None:
                for _ in self._faults.due_at_checkpoint(event["step"]):
                    corrupt(place(event["path"]))
            yield event

    def _begin(self) -> Progress:
        """Where the run stands before its first step: at the beginning, or where the checkpoint was."""
        if self._folder.resume is None:
            return self._from_the_start()
        self._members.call("restore", self._folder.resume, timeout_s=self._limit_s)
        return open_checkpoint(self._folder.resume).manifest.progress

    def _from_the_start(self) -> Progress:
        if self._config.model.init_from:
            self._members.call("adopt", timeout_s=self._limit_s)
        return Progress(step=0, commits=0, samples=0, tokens=0)

    def _memory(self) -> list[dict[str, Any]]:
        """The tensor memory that was measured at each member and what was predicted for it, in bytes by kind."""
        from zeropp_ray.planner.memory import predict_memory

        predicted = [predict_memory(self._plan, self._config, stage) for stage in range(self._plan.layout.stages)]
        reports = self._members.call("report", timeout_s=self._limit_s)
        return [
            {
                "member": str(member.me),
                "at": report.memory.where,
                "predicted": predicted[member.me.p],
                "measured": report.memory.at_peak,
                "highest": report.memory.highest,
                "allocator": report.memory.allocator,
            }
            for member, report in zip(self._members.all, reports, strict=True)
        ]

    def _remarks(self) -> Iterator[Event]:
        """What is no error and should be known before the first step."""
        if self._config.train.dtype != "bfloat16" or self._members.on_gpus:
            return
        times = self._members.call("time_against_fp32", timeout_s=START_S)
        slowest, member = max(zip(times, map(str, self._members.all), strict=True))
        if slowest > SLOW:
            text = f"takes {slowest:.3g} times as long as in float32 at {member}, whose processor has no instructions"
            yield {"kind": "log", "text": f"train.dtype = 'bfloat16': a matrix product {text}; use float32 for speed"}

    def _saving_call(self, method: str, *arguments: Any) -> list[Any]:
        """Start a save at all members; the references of their files."""
        self._members.call(method, *arguments, timeout_s=self._limit_s)
        return [member.actor.saved.remote() for member in self._members.all]

    def _learning_rate(self, step: int) -> float:
        from zeropp_ray.optim import learning_rate

        return learning_rate(step, self._config.train)

    def evaluate(self, rounds: int) -> Loss:
        """Of the checkpoint that the run begins with; nothing is trained or written."""
        quietly(self._members.start())
        self._members.join()
        self._members.call("load_weights", self._folder.resume, timeout_s=self._limit_s)
        return self._evaluate(rounds)

    def _evaluate(self, rounds: int = 1) -> Loss:
        """On the held-out text, summed over all members; a round may take as long as a step."""
        from zeropp_ray.evaluation import Loss

        with self._members.evaluation():
            sums = self._members.call("evaluate", timeout_s=rounds * self._limit_s)
        return Loss(sum(loss for loss, _ in sums), sum(tokens for _, tokens in sums))

    # -- faults -------------------------------------------------------------------------------------------------------

    def _slow(self, votes: Sequence[Any]) -> Iterator[Event]:
        """Tell of members that are slower than their peers. Raises MemberFault if they are to be replaced."""
        seconds = {member.me: vote.times for member, vote in zip(self._members.all, votes, strict=True)}
        found = self._slowness.slow(seconds)
        for me, evidence in found:
            yield {"kind": "log", "text": f"{self._members.of(me)} is slow: {evidence}"}
        if found and self._config.recovery.replace_slow:
            me, evidence = found[0]
            text = f"{self._members.of(me)} is slow: {evidence}"
            at = f"step {self._progress.step}"
            raise MemberFault(text, "slow", [me], at=at, evidence=evidence)

    def _recover(self, fault: MemberFault) -> Iterator[Event]:
        """Bring the run back to a step that is held everywhere. Raises what ends the run if it cannot or shall not."""
        began, names = time.monotonic(), {member.me: str(member) for member in self._members.all}
        first, at_step = fault, min(self._progress.step + 1, self._config.train.steps)
        self._checkpoints.give_up()
        faults = 0
        while True:
            faults += 1
            append_event(
                self._folder.path, {"kind": "fault", **_told(fault, at_step, names)}
            )  # also one on the way back
            try:
                judge(fault.cause, len(fault.lost), fault.at, str(fault), self._history, self._config.recovery)
            except ZeroppError as end:
                end.trace = fault.trace  # type: ignore[attr-defined]
                raise
            yield {"kind": "log", "text": f"{fault}; the others wait"}
            try:
                action = yield from self._fill(fault.lost)
                self._members.join(self._faults.due_in_recovery() if self._faults is not None else None)
                source = self._restore()
                break
            except MemberFault as another:  # during the recovery, which then begins anew
                fault = another
        self._decision, self._copied, self._held = None, [], -1
        self._slowness.forget()
        event = {
            "kind": "recovery",
            **_told(first, at_step, names),
            "faults": faults,
            "action": action,
            "source": source.kind,
            "from_step": source.step,
            "replayed": at_step - 1 - source.step,
            "resumed_s": time.monotonic() - began,
        }
        append_event(self._folder.path, event)
        yield event

    def _fill(self, lost: Sequence[Member]) -> Generator[Event, None, str]:
        """Free all that live from what they wait for, and give the ``lost`` successors; how, in a word."""
        gone = self._members.clear(lost)
        self._lost |= set(gone)
        return (yield from self._members.replace(gone))

    def _restore(self) -> Source:
        """Take all members back to the newest state there is. They have joined."""
        from zeropp_ray.copies import common_step, missing

        layout = self._plan.layout
        found = self._members.call("holdings", timeout_s=self._limit_s)
        holdings = {
            member.me: None if member.me in self._lost else held
            for member, held in zip(self._members.all, found, strict=True)
        }
        steps = [step for step in common_step(layout, holdings) if step in self._marks]
        source = choose_source(steps, None if steps else self._newest_checkpoint())
        if source.kind == "copies":
            lost = missing(holdings, source.step)
            self._members.call("restore_copies", source.step, lost, timeout_s=self._limit_s)
            self._progress = self._marks[source.step]
        elif source.kind == "checkpoint":
            self._members.call("restore", source.path, timeout_s=self._limit_s)
            self._progress = open_checkpoint(source.path).manifest.progress  # type: ignore[arg-type]
            self._checkpoints.went_back(source.step)
        else:
            self._members.build(self._members.all)
            self._members.join()
            self._progress = self._from_the_start()
            self._checkpoints.went_back(0)
        self._lost.clear()
        self._marks = {step: mark for step, mark in self._marks.items() if step < self._progress.step}
        self._marks[self._progress.step] = self._progress
        return source

    def _newest_checkpoint(self) -> tuple[int, Any] | None:
        try:
            newest = latest(self._folder.run)
        except (ConfigError, OSError):
            return None
        return newest.step, newest.path


def _told(fault: MemberFault, step: int, names: dict[Member, str]) -> Event:
    """A fault as an event tells it."""
    return {
        "cause": fault.cause,
        "member": ", ".join(names[me] for me in fault.lost) or None,
        "at": fault.at,
        "evidence": fault.evidence,
        "step": step,
        "noticed_s": fault.noticed_s,
        "time": time.time(),
    }


def _planned(plan: Any) -> dict[Member, dict[str, float]]:
    """What each member's instructions cost in a step, by the plan."""
    costs = plan.program.spec.costs
    planned: dict[Member, dict[str, float]] = {}
    for me in plan.layout.members():
        sums = dict.fromkeys(("F", "RF", "B", "W"), 0.0)
        for action in plan.program.ranks[me.p]:
            op = action.op.name
            if op in sums:
                sums[op] += getattr(costs, "F" if op == "RF" else op)[plan.layout.model_chunk(me.p, action.chunk)]
        planned[me] = sums
    return planned
