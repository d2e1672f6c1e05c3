"""Measure what exchanges take: gathers and reduces inside a stage, and a message between two members.

Over gloo between processes of this machine, for a run's members are such; links between nodes are not measured. The
processes do nothing else meanwhile, so what tasks and transfers take from each other is in neither of their times.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from zeropp_ray.allocator import keep_freed_memory
from zeropp_ray.comm.base import Group, Transfer
from zeropp_ray.comm.gloo import Rendezvous, connect
from zeropp_ray.errors import ConfigError
from zeropp_ray.layout import Layout, Member
from zeropp_ray.schedule import Link

_TIMES, _WARM_UP = 7, 2
_SMALL = 64  # bytes: a message that is all latency
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Exchanges:
    """What to measure: of each chunk elements of parameters and of trained ones, padded, and bytes of a message."""

    shards: int
    parameters: Sequence[int]
    trained: Sequence[int]
    compute: torch.dtype
    master: torch.dtype
    message: int


@dataclass(frozen=True)
class Measured:
    """Seconds of each chunk's gather and reduce, none if a stage has one member; the link between two members, and the
    processor time of each end of a message.
    """

    gather: tuple[float, ...]
    reduce: tuple[float, ...]
    link: Link
    post: float


def measure_exchanges(what: Exchanges) -> Measured:
    """Medians over a few times each, by as many processes as a stage has members, two at least.

    Raises ConfigError if they cannot be started or do not answer.
    """
    context = multiprocessing.get_context("spawn")
    size = max(what.shards, 2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started, pipes = [], []
    answers: list[Any]
    try:
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, store.port, what), daemon=True)
            process.start()
            theirs.close()
            started.append(process)
            pipes.append(mine)
        answers = [pipe.recv() if pipe.poll(_PATIENCE_S) else "no answer in time" for pipe in pipes]
    except (EOFError, OSError) as error:
        answers = [f"a process is gone: {error}"]
    finally:
        for process in started:
            process.join(5)
            process.kill()
    for answer in answers:
        if isinstance(answer, str):
            raise ConfigError(
                f"exchanges of {size} members could not be measured here: {answer}; state them: --transfer SECONDS, "
                "and --set parallel.shards=1"
            )
    return answers[0]


def _serve(pipe: Any, rank: int, size: int, port: int, what: Exchanges) -> None:
    try:
        torch.set_num_threads(1)
        keep_freed_memory()
        at = Rendezvous(host="127.0.0.1", port=port, epoch=0, timeout_s=_PATIENCE_S)
        layout = Layout(stages=1, chunks=1, shards=size, replicas=1)
        group = connect(at, layout, Member(0, rank, 0), host="127.0.0.1").stage
        pipe.send(_measured(group, what))
    except BaseException:
        pipe.send(traceback.format_exc().strip().splitlines()[-1])


def _measured(group: Group, what: Exchanges) -> Measured:
    gathers: list[float] = []
    reduces: list[float] = []
    if what.shards > 1:
        gathers = [_collective(group, group.all_gather, elements, what.compute) for elements in what.parameters]
        reduces = [_collective(group, group.reduce_scatter, elements, what.master) for elements in what.trained]
    both = [
        partial(_there_and_back, group, torch.zeros(nbytes, dtype=torch.uint8)) for nbytes in (_SMALL, what.message)
    ]
    small, large = (_median(group, each) / 2 for each in both)
    bandwidth = (what.message - _SMALL) / max(large - small, 1e-9)
    post = _median(group, both[1], time.process_time) / 2  # all threads: a member has one core for them
    return Measured(tuple(gathers), tuple(reduces), Link(small, bandwidth), post)


def _collective(
    group: Group, run: Callable[[torch.Tensor, torch.Tensor], Transfer], elements: int, dtype: torch.dtype
) -> float:
    if not elements:  # of a chunk whose parameters are all frozen
        return 0.0
    full, shard = torch.zeros(elements, dtype=dtype), torch.zeros(elements // group.size, dtype=dtype)
    return _median(group, lambda: run(full, shard).wait())


def _there_and_back(group: Group, tensor: torch.Tensor) -> None:
    """A message from the first member to the second, and one back; the others look on."""
    if group.rank == 0:
        group.send(tensor, 1, 1).wait()
        group.receive(tensor, 1, 2).wait()
    elif group.rank == 1:
        group.receive(tensor, 0, 1).wait()
        group.send(tensor, 0, 2).wait()


def _median(group: Group, run: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    times = []
    for _ in range(_WARM_UP + _TIMES):
        group.all_reduce(torch.zeros(1)).wait()  # all begin together
        start = clock()
        run()
        times.append(clock() - start)
    return median(times[_WARM_UP:])
