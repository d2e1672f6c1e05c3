"""Measure what a step costs on this machine: tasks of every model chunk, its exchanges, its update, and a message.

One model chunk at a time is built as the only chunk of a stage of its own, and a member's engine runs micro-batches
through it. Its neighbours are not there: what would come from them is random, what would go to them is dropped. So a
task's time is that of the engine's instruction. Gathers and reduces are the engine's too where a stage has one member,
which copies by itself; of several they are exchanges between processes, as messages are (``exchanges.py``).

Members of a machine share its memory and its clock: tasks of one alone are faster than they are in the run. So as many
other processes run tasks meanwhile as there will be members at work beside this one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from statistics import median
from typing import Any

import torch

from zeropp_ray.allocator import keep_freed_memory
from zeropp_ray.comm.base import Group, Links
from zeropp_ray.config import RunConfig
from zeropp_ray.device import CPU, pick
from zeropp_ray.errors import ConfigError
from zeropp_ray.layout import Member
from zeropp_ray.member import Batch, StageMember
from zeropp_ray.planner.exchanges import Exchanges, measure_exchanges
from zeropp_ray.planner.memory import chunk_sizes, message_bytes
from zeropp_ray.planner.plan import Plan
from zeropp_ray.precision import Precision
from zeropp_ray.schedule import Action, Costs, Link, Op
from zeropp_ray.vote import Decision

_WARM_UP = 2  # micro-batches that are not counted
_RESIDENCY = 4  # micro-batches from a gather to its reduce
_COMPANY_S = 60.0  # how long the other processes may take to be at work
_LONG = 1000  # micro-batches: more than are run while one chunk is measured
_LEAST_S = 1e-6  # a clock's tick: what is too short to measure takes its time too


class _Done:
    def wait(self) -> None:
        pass


class _Alone(Group):
    """A group of one, and a pipeline whose other stages send random numbers."""

    rank, size = 0, 1

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> _Done:
        out.copy_(shard)
        return _Done()

    def reduce_scatter(self, full: torch.Tensor, into: torch.Tensor) -> _Done:
        into.add_(full)
        return _Done()

    def all_reduce(self, tensor: torch.Tensor) -> _Done:
        return _Done()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Done:
        return _Done()

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> _Done:
        tensor.normal_()
        return _Done()

    def close(self) -> None:
        pass


@dataclass
class _Samples:
    """Random tokens."""

    shape: tuple[int, int]
    vocab: int
    validation_rounds: int = 0

    def microbatch(self, step: int, m: int) -> Batch:
        ids, labels = torch.randint(self.vocab, (2, *self.shape), generator=torch.Generator().manual_seed(m))
        return ids, labels

    def validation_microbatch(self, round: int, m: int) -> Batch:
        return self.microbatch(0, m)


@dataclass(frozen=True)
class _Chunk:
    """Seconds that a model chunk takes."""

    F: float
    B: float
    W: float
    gather: float  # by a stage of one member
    reduce: float
    optimizer: float


def measure(
    config: RunConfig, plan: Plan, microbatches: int, transfer: float | None = None, vote: float = 0.0
) -> tuple[Costs, Link | None]:
    """Costs in seconds, and the link that a message was measured over.

    Of ``F``, ``B`` and ``W`` medians of ``microbatches`` micro-batches, after a few to warm up, on the run's device and
    with as many threads as a member of the run has. The ``vote`` is stated: it is a round of the run's driver. So is
    the time of a ``transfer``, if it is given.

    Raises ConfigError if there is no such device, or exchanges cannot be measured, as between GPUs.
    """
    device = pick(config.resources)
    if device.type == "cuda" and (transfer is None or config.parallel.shards > 1):
        raise ConfigError(
            "resources.device = 'cuda': exchanges between GPUs are not measured; state them: --transfer SECONDS, and "
            "--set parallel.shards=1"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, int(config.resources.cpus)))
    try:
        with nullcontext() if device.type == "cuda" else _company(config, plan):  # a GPU is a member's own
            chunks = [_measure_chunk(config, plan, c, microbatches, device) for c in range(len(plan.ranges))]
    finally:
        torch.set_num_threads(threads)
    each = {name: tuple(getattr(chunk, name) for chunk in chunks) for name in ("F", "B", "W", "gather", "reduce")}
    link, post = None, 0.0
    sizes = chunk_sizes(plan, config)
    if transfer is None or config.parallel.shards > 1:
        measured = measure_exchanges(_exchanges(plan, config))
        if transfer is None:
            link, post = measured.link, round(measured.post, 6)
            transfer = round(link.time(message_bytes(plan, config)), 6)
        if config.parallel.shards > 1:
            each["gather"], each["reduce"] = (
                tuple(round(seconds, 6) for seconds in times) for times in (measured.gather, measured.reduce)
            )
    optimizer = tuple(round(chunk.optimizer / _owners(config), 6) for chunk in chunks)
    overlap = config.parallel.shards > 1
    costs = Costs(**each, comm=transfer, vote=vote, post=post, optimizer=optimizer, overlap=overlap, sizes=sizes)
    return costs, link


@contextmanager
def _company(config: RunConfig, plan: Plan) -> Iterator[None]:
    """Meanwhile other members of the run are at their tasks, as many as have cores here beside this process.

    Raises ConfigError if they do not begin.
    """
    at_once = int((os.cpu_count() or 1) // max(1.0, config.resources.cpus))
    others = min(len(list(plan.layout.members())), at_once) - 1
    context = multiprocessing.get_context("spawn")
    begun = context.Semaphore(0)
    processes = [
        context.Process(target=_run_tasks, args=(config, plan, begun, other), daemon=True) for other in range(others)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            if not begun.acquire(timeout=_COMPANY_S):
                raise ConfigError(
                    f"{others} other members could not be set to work beside this process: one of them "
                    f"{'is gone' if not process.is_alive() else 'is not ready'} after {_COMPANY_S:g} s"
                )
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run_tasks(config: RunConfig, plan: Plan, begun: Any, first: int) -> None:
    """In a process of its own: the tasks of one chunk after the other, until it is killed, or who started it is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, to who started it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, int(config.resources.cpus)))
    keep_freed_memory()
    begun.release()
    for c in count(first):
        _measure_chunk(config, plan, c % len(plan.ranges), _LONG)


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _owners(config: RunConfig) -> int:
    """Among how many members the update of a chunk is shared out."""
    return config.parallel.shards * (config.parallel.replicas if config.parallel.zero1 else 1)


def _exchanges(plan: Plan, config: RunConfig) -> Exchanges:
    sizes, precision = chunk_sizes(plan, config), Precision.of(config.train.dtype)
    parameters = [int(size) // precision.compute.itemsize for size in sizes.parameters]
    trained = [int(size) // precision.master.itemsize for size in sizes.gradients]
    return Exchanges(
        config.parallel.shards, parameters, trained, precision.compute, precision.master, message_bytes(plan, config)
    )


def _measure_chunk(config: RunConfig, plan: Plan, c: int, microbatches: int, device: torch.device = CPU) -> _Chunk:
    chunks = len(plan.ranges)
    layout = replace(plan.layout, stages=chunks, chunks=1, shards=1, replicas=1, zero1=False, placement="looped")
    config = replace(config, recovery=replace(config.recovery, enabled=False))
    shape = (config.parallel.microbatch_size, config.model.seq_len)
    samples = _Samples(shape, plan.description.vocab)
    member = StageMember(config, replace(plan, layout=layout), Member(c, 0, 0), samples, device)
    alone = _Alone()
    member.join(Links(pipeline=alone, stage=alone, replicas=alone, checkpoint=alone, copies=alone))
    taken: dict[Op, list[float]] = {op: [] for op in (Op.F, Op.B, Op.W, Op.GATHER, Op.REDUCE)}
    times: list[float] = []
    updates: list[float] = []
    at_once = min(_RESIDENCY, plan.program.spec.live_chunks)  # the engine holds no more
    program = list(_program(c > 0, c < chunks - 1, at_once))
    while len(updates) < 2 or len(taken[Op.F]) < _WARM_UP + microbatches:  # the first of what comes once warms up
        times.clear()
        member.engine.run(
            program,
            lambda m: samples.microbatch(0, m),
            training=True,
            progress=lambda _: times.append(_now(device)),
        )
        for action, start, end in zip(program, times, times[1:], strict=False):
            if action.op in taken:
                taken[action.op].append(end - start)
        updates.append(_update(member, device))
    F, B, W = (_seconds(taken[op][_WARM_UP:]) for op in (Op.F, Op.B, Op.W))
    gather, reduce, update = map(_seconds, (taken[Op.GATHER][1:], taken[Op.REDUCE][1:], updates[1:]))
    return _Chunk(max(F, _LEAST_S), B, W, gather, reduce, update)


def _seconds(times: list[float]) -> float:
    return round(median(times), 6)


def _now(device: torch.device) -> float:
    """The time when all that was begun is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _update(member: StageMember, device: torch.device) -> float:
    """Seconds of what a member does between the last instruction of a step and the first of the next."""
    start = _now(device)
    member.squared_norm()
    member.flush(Decision(1, True, 0.0, 0.0, 1, 0.0))  # a factor of 0 leaves numbers as they are, near enough
    for flat in member.engine.sets:
        flat.zero_gradient()
    return _now(device) - start


def _program(before: bool, behind: bool, microbatches: int) -> Iterator[Action]:
    """``F`` of all micro-batches, then ``B``, then ``W``, with what crosses to the chunk before and behind.

    One kind after the other, as in a pipeline: what a task needs has left the processor's caches by then.
    """
    each = range(microbatches)
    yield Action(Op.GATHER, 0)
    for m in each:
        if before:
            yield from (Action(Op.RECV, 0, m, "F"), Action(Op.WAIT, 0, m, "F"))
        yield Action(Op.F, 0, m)
        if behind:
            yield from (Action(Op.SEND, 0, m, "F"), Action(Op.DRAIN, 0, m, "F"))
    for m in each:
        if behind:
            yield from (Action(Op.RECV, 0, m, "B"), Action(Op.WAIT, 0, m, "B"))
        yield Action(Op.B, 0, m)
        if before:
            yield from (Action(Op.SEND, 0, m, "B"), Action(Op.DRAIN, 0, m, "B"))
    yield from (Action(Op.W, 0, m) for m in each)
    yield from (Action(Op.RELEASE, 0), Action(Op.REDUCE, 0))
