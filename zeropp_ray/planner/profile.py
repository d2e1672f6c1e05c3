"""Measure what the chunks of a model take on this machine: ``F``, ``B`` and ``W`` of a micro-batch each.

One model chunk at a time is built as the only chunk of a stage of its own, and a member's engine runs micro-batches
through it. Its neighbours are not there: what would come from them is random, what would go to them is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch

from zeropp_ray.comm.base import Group, Links
from zeropp_ray.config import RunConfig
from zeropp_ray.layout import Member
from zeropp_ray.member import Batch, StageMember
from zeropp_ray.planner.plan import Plan
from zeropp_ray.schedule import Action, Costs, Op

_WARM_UP = 2  # micro-batches that are not counted
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


def measure(config: RunConfig, plan: Plan, microbatches: int, transfer: float = 0.0) -> Costs:
    """Seconds of ``F``, ``B`` and ``W`` of every model chunk: medians of ``microbatches`` micro-batches, after a few to
    warm up, with as many threads as a member of the run has. The time of a ``transfer`` is not measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, int(config.resources.cpus)))
    try:
        rows = [_measure_chunk(config, plan, c, microbatches) for c in range(len(plan.ranges))]
    finally:
        torch.set_num_threads(threads)
    F, B, W = (tuple(row[task] for row in rows) for task in range(3))
    return Costs(F, B, W, transfer)


def _measure_chunk(config: RunConfig, plan: Plan, c: int, microbatches: int) -> tuple[float, float, float]:
    chunks = len(plan.ranges)
    layout = replace(plan.layout, stages=chunks, chunks=1, shards=1, replicas=1, zero1=False, placement="looped")
    config = replace(config, recovery=replace(config.recovery, enabled=False))
    shape = (config.parallel.microbatch_size, config.model.seq_len)
    samples = _Samples(shape, plan.description.vocab)
    member = StageMember(config, replace(plan, layout=layout), Member(c, 0, 0), samples)
    alone = _Alone()
    member.join(Links(pipeline=alone, stage=alone, replicas=alone, checkpoint=alone, copies=alone))
    program = list(_program(c > 0, c < chunks - 1, _WARM_UP + microbatches))
    times: list[float] = []
    member.engine.run(
        program, lambda m: samples.microbatch(0, m), training=True, progress=lambda _: times.append(time.perf_counter())
    )
    taken: dict[Op, list[float]] = {Op.F: [], Op.B: [], Op.W: []}
    for action, start, end in zip(program, times, times[1:], strict=False):
        if action.op in taken:
            taken[action.op].append(end - start)
    F, B, W = (round(median(each[_WARM_UP:]), 6) for each in taken.values())
    return max(F, _LEAST_S), B, W


def _program(before: bool, behind: bool, microbatches: int) -> Iterator[Action]:
    """``F``, ``B`` and ``W`` of one micro-batch after the other, with what crosses to the chunk before and behind."""
    yield Action(Op.GATHER, 0)
    for m in range(microbatches):
        if before:
            yield from (Action(Op.RECV, 0, m, "F"), Action(Op.WAIT, 0, m, "F"))
        yield Action(Op.F, 0, m)
        if behind:
            yield from (Action(Op.SEND, 0, m, "F"), Action(Op.DRAIN, 0, m, "F"))
            yield from (Action(Op.RECV, 0, m, "B"), Action(Op.WAIT, 0, m, "B"))
        yield Action(Op.B, 0, m)
        if before:
            yield from (Action(Op.SEND, 0, m, "B"), Action(Op.DRAIN, 0, m, "B"))
        yield Action(Op.W, 0, m)
    yield from (Action(Op.RELEASE, 0), Action(Op.REDUCE, 0))
