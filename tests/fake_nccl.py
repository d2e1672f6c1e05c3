"""NCCL and CUDA streams as far as we use them, in one process and without a GPU: what is called is recorded, and what
is launched is carried out, with the semantics that can deadlock.

A stream is a queue and a thread that works it off. An operation of a communicator holds its stream until the peers have
come, so a send waits for its receive, and what stands behind it in the stream waits too. Several streams of one
communicator are one queue. The computing stream is the thread that calls: it waits where a device would. Members are
threads; tensors are CPU tensors, which are reached through their pointers alone.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DTYPES = {
    "NCCL_FLOAT32": torch.float32,
    "NCCL_BFLOAT16": torch.bfloat16,
    "NCCL_FLOAT16": torch.float16,
    "NCCL_FLOAT64": torch.float64,
    "NCCL_INT64": torch.int64,
    "NCCL_INT32": torch.int32,
    "NCCL_UINT8": torch.uint8,
}
_CODES = {name: 10 + i for i, name in enumerate(DTYPES)}
_TYPES = {_CODES[name]: dtype for name, dtype in DTYPES.items()}


def at(pointer: int, count: int, code: int) -> torch.Tensor:
    """The memory behind a pointer."""
    dtype = _TYPES[code]
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype=dtype)


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL error {status}")
        self.status = status


class Event:
    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.done.wait()


class Stream:
    """``work`` None: the calling thread itself computes."""

    _numbers = itertools.count(1)

    def __init__(self, cuda: FakeCuda, name: str = "") -> None:
        self.cuda_stream = next(self._numbers)
        self.name, self._cuda, self._computes = name or f"stream {len(cuda.streams) + 1}", cuda, bool(name)
        cuda.by_number[self.cuda_stream] = self
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        if not self._computes:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._queue.get()()

    def put(self, work: Callable[[], None]) -> None:
        if self._computes:
            work()
        else:
            self._queue.put(work)

    def wait_stream(self, other: Stream) -> None:
        self._cuda.log.append((self.name, "waits for", other.name))
        event = Event()
        other.put(event.done.set)
        self.put(event.synchronize)

    def wait_event(self, event: Event) -> None:
        self._cuda.log.append((self.name, "waits for", "event"))
        self.put(event.synchronize)

    def record_event(self) -> Event:
        self._cuda.log.append((self.name, "records"))
        event = Event()
        self.put(event.done.set)
        return event


class FakeCuda:
    """In the place of ``torch.cuda``, of one member."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.streams: list[Stream] = []
        self.by_number: dict[int, Stream] = {}
        self.computing = Stream(self, "computing")

    def Stream(self, priority: int = 0) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self.computing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """What is computed inside is computed at once: so the stream has to be done with what is before it."""
        self.log.append((stream.name, "computes"))
        event = Event()
        stream.put(event.done.set)
        event.synchronize()
        yield


class _World:
    """What the members of one communicator share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.arrived: dict[int, list[Any]] = defaultdict(list)  # by number of the collective
        self.sent: dict[tuple[int, int], deque[tuple[torch.Tensor, threading.Event]]] = defaultdict(deque)
        self.members: set[int] = set()

    def until(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            self.changed.wait_for(ready)


class FakeNccl:
    """In the place of ``cupy.cuda.nccl``, of one member. ``worlds``: shared by all."""

    NCCL_SUM = 0
    NcclError = NcclError
    available = True

    def __init__(self, cuda: FakeCuda, worlds: dict[bytes, _World], version: int = 23203) -> None:
        self.cuda, self._worlds, self._version = cuda, worlds, version
        self.group = threading.local()
        self.log = cuda.log
        self.failed = 0  # what check_async_error finds, as a status
        for name, code in _CODES.items():
            setattr(self, name, code)

    def get_version(self) -> int:
        return self._version

    def get_unique_id(self) -> bytes:
        unique = len(self._worlds).to_bytes(128, "little")
        self._worlds[unique] = _World()
        return unique

    def groupStart(self) -> None:
        self.log.append(("group starts",))
        self.group.work = []

    def groupEnd(self) -> None:
        self.log.append(("group ends",))
        for work in _together(self.group.__dict__.pop("work")):
            work()

    def NcclCommunicator(self, size: int, unique: bytes, rank: int) -> _Communicator:
        world = self._worlds[unique]
        communicator = _Communicator(self, world, size, rank)
        self.log.append(("made", size, rank))
        with world.changed:
            world.members.add(rank)
            world.changed.notify_all()
        world.until(lambda: len(world.members) == size)
        return communicator

    def launch(self, stream: int, communicator: _Communicator, *work: Callable[[], Callable[[], bool]]) -> None:
        """``work``: begins an operation, and gives what says whether it is over."""
        pending = getattr(self.group, "work", None)
        if pending is not None:
            pending.append((stream, communicator, *work))
        else:
            communicator.put(self.cuda.by_number[stream], list(work))


def _together(pending: list[Any]) -> list[Callable[[], None]]:
    """What a group has gathered: one operation per communicator, aborts as they are."""
    done: list[Callable[[], None]] = [item for item in pending if callable(item)]
    by_communicator: dict[Any, list[Any]] = defaultdict(list)
    for stream, communicator, *work in (item for item in pending if not callable(item)):
        by_communicator[communicator, stream] += work
    for (communicator, stream), work in by_communicator.items():
        done.append(lambda c=communicator, s=stream, w=work: c.put(c.nccl.cuda.by_number[s], w))
    return done


class _Communicator:
    def __init__(self, nccl: FakeNccl, world: _World, size: int, rank: int) -> None:
        self.nccl, self._world, self._size, self._rank = nccl, world, size, rank
        self._collectives = itertools.count()
        self._busy = Event()  # of the operation before, in whichever stream
        self._busy.done.set()
        self._aborted = False  # peers are not, and go on waiting

    def put(self, stream: Stream, work: list[Callable[[], Callable[[], bool]]]) -> None:
        before, self._busy = self._busy, Event()
        now = self._busy

        def run() -> None:
            before.synchronize()
            over = [begin() for begin in work]
            self._world.until(lambda: self._aborted or not sum(not done() for done in over))
            now.done.set()

        stream.put(run)

    def _record(self, *what: Any) -> None:
        self.nccl.log.append(what)

    # -- what is called --

    def send(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._record("send", self._rank, peer, count, dtype, self.nccl.cuda.by_number[stream].name)
        world, route = self._world, (self._rank, peer)

        def begin() -> Callable[[], bool]:
            taken = threading.Event()
            with world.changed:
                world.sent[route].append((at(pointer, count, dtype), taken))
                world.changed.notify_all()
            return taken.is_set

        self.nccl.launch(stream, self, begin)

    def recv(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._record("recv", self._rank, peer, count, dtype, self.nccl.cuda.by_number[stream].name)
        world, route, came = self._world, (peer, self._rank), threading.Event()

        def over() -> bool:
            if not came.is_set() and world.sent[route]:
                tensor, taken = world.sent[route].popleft()
                at(pointer, count, dtype).copy_(tensor)
                came.set()
                taken.set()
                world.changed.notify_all()
            return came.is_set()

        self.nccl.launch(stream, self, lambda: over)

    def _collective(self, stream: int, mine: Any, finish: Callable[[list[Any]], None]) -> None:
        world, number, size, rank = self._world, next(self._collectives), self._size, self._rank

        def begin() -> Callable[[], bool]:
            with world.changed:
                world.arrived[number].append((rank, mine))
                world.changed.notify_all()
            finished = False

            def over() -> bool:
                nonlocal finished
                if not finished and len(world.arrived[number]) >= size:
                    finish([each for _, each in sorted(world.arrived[number], key=lambda item: item[0])][:size])
                    finished = True
                    world.arrived[number].append((size, None))  # one of those that are done
                    world.changed.notify_all()
                return finished and len(world.arrived[number]) == 2 * size  # nobody's tensors are read any more

            return over

        self.nccl.launch(stream, self, begin)

    def allGather(self, shard: int, out: int, count: int, dtype: int, stream: int) -> None:
        self._record("allGather", count, dtype, self.nccl.cuda.by_number[stream].name)

        def finish(shards: list[torch.Tensor]) -> None:
            at(out, count * self._size, dtype).copy_(torch.cat(shards))

        self._collective(stream, at(shard, count, dtype), finish)

    def reduceScatter(self, full: int, into: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._record("reduceScatter", count, dtype, op, into - full, self.nccl.cuda.by_number[stream].name)
        whole, begin = at(full, count * self._size, dtype), count * self._rank

        def finish(fulls: list[torch.Tensor]) -> None:
            at(into, count, dtype).copy_(sum(each[begin : begin + count].clone() for each in fulls))

        self._collective(stream, whole, finish)

    def allReduce(self, mine: int, into: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._record("allReduce", count, dtype, op, self.nccl.cuda.by_number[stream].name)
        tensor = at(mine, count, dtype)

        def finish(tensors: list[torch.Tensor]) -> None:
            at(into, count, dtype).copy_(sum(tensors))

        self._collective(stream, tensor.clone(), finish)

    def check_async_error(self) -> None:
        if self.nccl.failed == 7:
            raise KeyError(7)
        if self.nccl.failed:
            raise NcclError(self.nccl.failed)

    def abort(self) -> None:
        self._record("abort", self._rank)

        def abort() -> None:
            with self._world.changed:
                self._aborted = True
                self._world.changed.notify_all()

        pending = getattr(self.nccl.group, "work", None)
        if pending is not None:
            pending.append(abort)
        else:
            abort()
