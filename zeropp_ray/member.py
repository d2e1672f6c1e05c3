"""One member of a stage, in one process: model chunks, shards, optimizer, data and engine. Knows nothing of Ray.

A step is one call, :meth:`StageMember.advance`, which first applies the decision on the step before.
:meth:`StageMember.flush` applies the last one; it comes before evaluation and before the weights are read.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from zeropp_ray.checkpoint.manifest import FileEntry
from zeropp_ray.checkpoint.reader import Checkpoint
from zeropp_ray.checkpoint.writer import ParameterCopy, write
from zeropp_ray.comm.base import Counters, Group, Links
from zeropp_ray.config import RunConfig
from zeropp_ray.copies import Copies, Holdings
from zeropp_ray.device import CPU, Aside, move_buffers
from zeropp_ray.engine import Chunk, Engine, Measured
from zeropp_ray.errors import MemberError
from zeropp_ray.layout import Member
from zeropp_ray.metrics.out_of_memory import is_out_of_memory, out_of_memory
from zeropp_ray.metrics.step_memory import StepMemory, StepMeter, allocator_peaks
from zeropp_ray.models import build_owned, resolve_factory
from zeropp_ray.optim import ShardedAdamW, learning_rate
from zeropp_ray.planner.plan import Plan
from zeropp_ray.precision import Precision
from zeropp_ray.sharding import FlatParameters, GradientBuffers
from zeropp_ray.split_backward import WeightQueue, defer
from zeropp_ray.uri import Place
from zeropp_ray.vote import Decision, Vote

Batch = tuple[torch.Tensor, torch.Tensor]  # ids and labels, int64 [b, s]


class MemberData(Protocol):
    """The samples of one member."""

    validation_rounds: int  # how often an evaluation runs the N micro-batches of the forward program

    def microbatch(self, step: int, m: int) -> Batch:
        """Micro-batch ``m`` of the step that has ``step`` steps before it."""

    def validation_microbatch(self, round: int, m: int) -> Batch:
        """Micro-batch ``m`` of a round of an evaluation."""


@dataclass(frozen=True)
class Report:
    """What a member counted: totals of all training steps, and peaks of the last one."""

    counters: Counters
    measured: Measured
    peak_open_gradient_buffers: int
    gradient_buffers: int
    memory: StepMemory | None  # of the last step that was measured


class StageMember:
    """Built in three calls: the constructor makes the chunks' weights, :meth:`join` shards them over the groups of an
    epoch.
    """

    def __init__(self, config: RunConfig, plan: Plan, me: Member, data: MemberData, device: torch.device = CPU) -> None:
        self.config, self.plan, self.me, self.data, self.device = config, plan, me, data, device
        self.counters = Counters()
        # Whoever wants to know of points besides instructions sets it; "copy" comes from the thread of the copies.
        self.reached: Callable[[str], None] = lambda point: None
        self._precision = Precision.of(config.train.dtype)
        torch.backends.mha.set_fastpath_enabled(False)  # only without gradients: a recomputed forward would differ
        self._owned = build_owned(
            resolve_factory(config.model),
            plan.description,
            plan.ranges,
            plan.layout.owned(me.p),
            seed=config.run.seed,
            dtype=self._precision.master,
        )
        move_buffers(self._owned.model, device)
        self._aside = Aside(device)  # for checkpoints
        self._engine: Engine | None = None
        self._unmade: Exception | None = None  # what kept the engine from being made whole
        self._links: Links | None = None
        self._measured = Measured()  # of the last training step
        self._memory: StepMemory | None = None

    def join(self, links: Links) -> None:
        """Enter an epoch. The first one shards the weights; a later one keeps the shards and changes the groups."""
        self._links = links
        if self._unmade is not None:  # parameters that are views of what was made in part cannot be sharded again
            raise self._unmade
        if self._engine is not None:
            self._engine.abort()
            self._engine.links = links
            for flat in self._engine.sets:
                flat.rebind(links.stage)
            self._copies.join(links.copies)
            return
        try:
            with self._memory_told():
                self._make(links)
        except Exception as error:
            self._unmade = error
            raise

    def _make(self, links: Links) -> None:
        config, plan = self.config, self.plan
        queue = WeightQueue()
        chunks = self._sharded(links, queue)
        b, s, h = config.parallel.microbatch_size, config.model.seq_len, plan.description.hidden
        self._engine = Engine(
            me=self.me,
            layout=plan.layout,
            chunks=chunks,
            weights=queue,
            links=links,
            counters=self.counters,
            activation=((b, s, h), self._precision.compute),
            live_limit=plan.program.spec.live_chunks,
            input_limit=plan.program.spec.input_limit,
            device=self.device,
            ranges=config.resources.nvtx and self.device.type == "cuda",
        )
        train = config.train
        self._optimizer = ShardedAdamW(
            [flat for flat in self._engine.sets if flat.trained],
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
        )
        self._copies: Copies = Copies(
            plan,
            self.me,
            self._engine.sets,
            self._optimizer,
            dtype=self._precision.master,
            device=self.device,
            enabled=config.recovery.copies,
            reached=lambda point: self.reached(point),
        )
        self._copies.join(links.copies)

    def _sharded(self, links: Links, queue: WeightQueue) -> list[Chunk]:
        """The chunks of this stage, their parameters sharded set by set."""
        plan, model = self.plan, self._owned.model
        deferred, parameters = defer(model, queue), dict(model.named_parameters())
        first_trained = min(used.chunks[0] for used in plan.sets if used.trained)
        chunks = {}
        for index, part in self._owned.chunks.items():
            in_place = any(part.in_place for part in plan.description.parts_of(plan.ranges, index))
            chunks[index] = Chunk(part, [], part.first, part.last, index > first_trained, in_place)
        # Chunks take turns in the buffers of one pool, unless all have theirs open at once.
        turns, in_turn = GradientBuffers(self.device), max(plan.program.peak_gradient_buffers) == 1
        self._buffers: set[GradientBuffers] = set()  # of what is the chunks' own
        for number, used in enumerate(plan.sets):
            if chunks.keys().isdisjoint(used.chunks):
                continue
            buffers = turns if in_turn and not used.shared else GradientBuffers(self.device)
            if not used.shared:
                self._buffers.add(buffers)
            flat = FlatParameters(
                [(name, parameters[name]) for name in used.shapes],
                deferred,
                links.stage,
                buffers,
                layout=plan.layout,
                me=self.me,
                dtype=self._precision.compute,
                device=self.device,
                stages=plan.layout.stages_of(used.chunks),
                shared=used.shared,
                number=number,
            )
            for index in chunks.keys() & used.chunks:
                chunks[index].sets.append(flat)
        return list(chunks.values())

    @property
    def waits(self) -> tuple[int, int]:
        """How many waits for transfers the main thread has begun in this epoch, and how many are over."""
        return (0, 0) if self._links is None else (self._links.waits.begun, self._links.waits.over)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "join comes first"
        return self._engine

    def advance(
        self,
        step: int,
        decision: Decision | None,
        progress: Callable[[int], None] = lambda position: None,
        *,
        copy: bool = False,
    ) -> Vote:
        """Apply the decision on step ``step - 1``, ``copy`` the state then, and run step ``step`` = 1, 2, … up to its
        vote.
        """
        start = time.perf_counter()
        self.flush(decision)
        if copy:
            self.copy_state(step - 1)
        with self._memory_told():
            sums = self.engine.run(
                self.plan.program.ranks[self.me.p],
                lambda m: self.data.microbatch(step - 1, m),
                training=True,
                progress=progress,
            )
        self._measured = self.engine.measured
        norm, held = self.squared_norm(), self._copies.acknowledged()
        self.reached("vote")
        return Vote(sums.loss, sums.tokens, norm, time.perf_counter() - start, held)

    def advance_measured(
        self,
        step: int,
        decision: Decision | None,
        progress: Callable[[int], None] = lambda position: None,
        *,
        copy: bool = False,
    ) -> Vote:
        """The same, with its tensor memory measured, for :meth:`report`: slower, and with the same results."""
        with StepMeter(self.engine, self._optimizer, self._copies, self.plan.program.ranks[self.me.p]) as meter:

            def before(position: int) -> None:
                progress(position)
                meter.before(position)

            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            vote = self.advance(step, decision, before, copy=copy)
            self._memory = replace(meter.result(), allocator=allocator_peaks(self.device))
        return vote

    @contextmanager
    def _memory_told(self) -> Iterator[None]:
        """Who runs out of memory is told what the plan gave it, and what to change."""
        try:
            yield
        except MemberError as error:
            if not is_out_of_memory(error.__cause__):
                raise
            raise self._out_of_memory(error.text.partition(": ")[0], error.trace) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            where = f"{self.me} failed in the making of its tensors"
            raise self._out_of_memory(where, traceback.format_exc()) from error

    def _out_of_memory(self, where: str, trace: str) -> MemberError:
        return MemberError(f"{where}: {out_of_memory(self.plan, self.config, self.me.p, self.device)}", trace=trace)

    def squared_norm(self) -> float:
        """Of the reduced gradients that this member answers for."""
        return sum(float(torch.linalg.vector_norm(flat.owned_gradient)) ** 2 for flat in self._answered_for())

    def flush(self, decision: Decision | None) -> None:
        """Commit or skip the step that ``decision`` is about; None: nothing is open."""
        if decision is None or not decision.commit:
            return
        self._copies.before_update()
        self._optimizer.update(learning_rate(decision.step, self.config.train), decision.factor)
        self.reached("commit")
        self.engine.refresh()

    def copy_state(self, step: int) -> None:
        """Copy the state of ``step``, which is committed and flushed, and begin to give it to the buddy.

        Called at all members at once, and after all have acknowledged the copy before (:attr:`Vote.held`).
        """
        assert self._links is not None
        with self._links.waits.one():
            self._copies.take(step)

    def holdings(self) -> Holdings:
        """Which copies are whole here. Comes after :meth:`join`, so that no exchange is on its way."""
        return self._copies.holdings()

    def restore_copies(self, step: int, missing: frozenset[Member]) -> None:
        """Go back to the state of ``step``, bit for bit. ``missing``: who has no copy of it and gets that of its buddy.

        Called at all members at once, after :meth:`join`. Raises MemberError if one is lost meanwhile.
        """
        assert self._links is not None
        training = replace(self.counters)
        self.reached("recovery")
        with self._links.waits.one():
            self._copies.restore(step, missing)
        self.engine.refresh(frozen=True)
        self.counters.set(training)

    def evaluate(self, progress: Callable[[int], None] = lambda position: None) -> tuple[float, int]:
        """Forward only over the held-out part, under the pipeline: loss sum (nats) and tokens, zero except in the last
        stage.
        """
        training = replace(self.counters)
        loss, tokens = 0.0, 0
        for round in range(self.data.validation_rounds):
            with self._memory_told():
                sums = self.engine.run(
                    self.plan.evaluation.ranks[self.me.p],
                    functools.partial(self.data.validation_microbatch, round),
                    training=False,
                    progress=progress,
                )
            loss, tokens = loss + sums.loss, tokens + sums.tokens
        self.counters.set(training)  # what is reported is training traffic
        return loss, tokens

    def abort(self) -> None:
        """Leave the epoch, from any thread: a wait that blocks fails at once, here and at its peers."""
        if self._links is not None:
            self._links.close()

    def drop_step(self) -> None:
        """After an abort: drop what a step left."""
        self.abort()  # or what the device still writes to would be dropped; comes back at once if it is done
        if self._engine is not None:
            self._engine.abort()

    def report(self) -> Report:
        peak_open = sum(pool.peak_open for pool in self._buffers)  # of several pools, all are open at the peak
        buffers = sum(len(pool.all) for pool in self._buffers)
        return Report(self.counters, self._measured, peak_open, buffers, self._memory)

    def _answered_for(self) -> list[FlatParameters]:
        """What this member counts in the norm and saves in a checkpoint. Of stages, and of replicas, that own the same
        the first does.
        """
        if not self.plan.layout.answers(self.me):
            return []
        return [flat for flat in self.engine.sets if flat.stages[0] == self.me.p]

    def copies(self) -> list[ParameterCopy]:
        """Copies of what this member owns of its parameters and moments, as they are committed; for a checkpoint."""
        copies, clone = [], self._aside.clone
        with self._aside.copying():
            for flat in self._answered_for():
                for slot in flat.slots:
                    pieces = {"weights": clone(flat.master[flat.place(slot)])}
                    pieces |= {name: clone(piece) for name, piece in self._optimizer.moments(flat, slot).items()}
                    ranges = [flat.piece(slot, number) for number in range(self.plan.layout.pieces)]
                    copies.append(ParameterCopy(slot.name, tuple(slot.parameter.shape), pieces, ranges))
        self._aside.finish()
        return copies

    @property
    def checkpoint_group(self) -> Group:
        """The group of the epoch at hand over which a checkpoint is put together."""
        assert self._links is not None
        return self._links.checkpoint

    def save(self, copies: list[ParameterCopy], folder: Place, group: Group) -> list[FileEntry]:
        """Write this member's part of a checkpoint, put together over ``group``; in a thread of its own, while steps go
        on. Of replicas that own the same the first does.
        """
        if not self.plan.layout.answers(self.me):
            return []
        return write(copies, group, self.me.p, folder, lambda: self.reached("checkpoint"))

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        """Take this member's pieces of weights and moments from a checkpoint of any layout, and forget all copies.

        Comes after the first join.
        """
        self._copies.forget()
        self.set_weights(checkpoint.tensor)
        for flat in self.engine.sets:
            for slot in flat.slots:
                first = flat.first(slot)
                for name, piece in self._optimizer.moments(flat, slot).items():
                    if piece.numel():
                        piece.copy_(checkpoint.tensor(f"{name}.{slot.name}").view(-1)[first : first + piece.numel()])
        self._optimizer.set_commits(checkpoint.manifest.progress.commits)

    def set_weights(self, weight: Callable[[str], torch.Tensor]) -> None:
        """Take this member's pieces of the whole parameters that ``weight`` gives by full name, one at a time.

        Comes after the first join.
        """
        for flat in self.engine.sets:
            for slot in flat.slots:
                if flat.holds(slot):
                    flat.fill(slot, weight(slot.name))

    def named_shards(self, what: str = "weights") -> Iterator[tuple[str, int, torch.Tensor]]:
        """(full name, first element, piece) of every parameter part that this member owns and answers for.

        ``what``: ``weights`` or ``gradients``.
        """
        for flat in self._answered_for():
            if what == "gradients" and not flat.trained:
                continue
            source = flat.master if what == "weights" else flat.owned_gradient
            for slot in flat.slots:
                piece = source[flat.place(slot)]
                if piece.numel():
                    yield slot.name, flat.first(slot), piece
