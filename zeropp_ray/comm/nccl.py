"""Groups over NCCL, for CUDA tensors, through ``cupy.cuda.nccl``: torch's pointers and streams go to it as they are.

**Streams and events.** Every communicator has a stream of its own. A post lets it wait for all that the computing
stream was given so far, launches, and records an event; :meth:`Transfer.wait` lets the computing stream wait for that
event. So the host never waits for a transfer. It only keeps from running too far ahead: at a wait it waits for the
device to have passed the one :data:`AHEAD` before. Therefore the place that a member reports is about where its device
is, no launch queue fills up, and a member whose device waits for a peer is seen to wait.

**Memory.** Tensors are torch's, from the pool of the computing stream. Whatever a post touches is kept by its transfer,
and may be freed once that was waited for: the computing stream comes after the transfer then, and so does whoever gets
the memory next. No ``record_stream``, which would hold memory back until the host finds an event done. Transfers that
an abort leaves behind are dropped after :meth:`Communicators.close`, when no kernel runs any more.

**Order.** A member's main thread alone posts, in the order of its program. A *send* or *receive* is a kernel that holds
its stream, and its communicator, until the peer has come. In one communicator for all of a pipeline a receive that is
posted ahead would keep back the send behind it, which the peer may need before it sends: a ring of stages would stand.
So each *edge* (source, destination, forward or backward, the way back from the last stage to the first included) is a
communicator of two with its own stream at both ends. Then an edge is a queue that nothing but its own peer holds up,
which is what ``schedule/check.py`` assumes when it proves that a program cannot deadlock: posts do not block, a send
meets its receive in the order of the edge, and only what waits is held. NCCL has no tags: the check also proves that
both ends of an edge post in the same order. Collectives hold only their own stream, and all members of a group post
them in one order. What several stages exchange at once (:meth:`Group.exchange`) is one NCCL group call.

Kernels that wait for peers take room on the device. There is at most one for each communicator, those of edges are of
few blocks, and streams have hardware queues of their own (``prepare`` in device.py); so all can be there at once. With
``NCCL_LAUNCH_ORDER_IMPLICIT=1`` kernels begin in the order of the program, in which the same proof holds, but with a
driver before CUDA 12.3 each then waits for the end of the one before, and a receive posted ahead stands for ever.

**Failures.** A thread asks ``check_async_error`` of all communicators; if one has failed, or when the driver says so
(:meth:`Communicators.close`), all are aborted together inside one NCCL group, for an abort waits for kernels that may
wait for those of another communicator. The main thread then finds its events done, or is refused, and raises PeerLost.

**Sums.** NCCL adds in an order that follows from the number of members, the size and the topology, not in rank order.
So all members get the same bytes, a run on the same devices repeats (``train.deterministic`` fixes the algorithm too),
and a recovery in the same places is exact; but the bytes are not those of gloo, nor of other devices. Two members are
the exception: a sum of two has one order.

Written against cupy 14.2 and NCCL 2.32. cupy's ``NcclConfig`` has ``split_share`` alone, so communicators block while
they are made: that is done in a thread, which is given up after a time (nccl_forming.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from zeropp_ray.comm.base import Group, PeerLost, Transfer, Waits
from zeropp_ray.errors import ConfigError

AHEAD = 4  # waits for transfers that the host may be ahead of the device
POLL_S = 50e-6  # between looks whether an event is done
WATCH_S = 0.5  # between looks for asynchronous errors
POST_S = 1.0  # how long an abort waits for a post that is under way; one that blocks is what it is to end
BROKEN = range(22803, 22809)  # NCCL 2.28.3 to 2.28.8, by its own numbering
SHARING = 23200  # the first that lets several ranks share a GPU
IN_PROGRESS = 7  # no error; cupy has no name for it and raises KeyError


def load() -> Any:
    """cupy's binding of NCCL. Raises ConfigError that says what to install, or which version must not be used."""
    why = "resources.transport = 'nccl': "
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ConfigError(
            f"{why}CuPy cannot be imported ({error}); pip install cupy-cuda12x nvidia-nccl-cu12, or use "
            "resources.transport=gloo"
        ) from None
    if not nccl.available:
        raise ConfigError(
            f"{why}CuPy finds no NCCL; pip install nvidia-nccl-cu12, or use resources.transport=gloo"
        ) from None
    check_version(nccl.get_version(), shared=os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1")
    return nccl


def check_version(version: int, *, shared: bool) -> None:
    """``version`` as NCCL counts: 23203 is 2.32.3. ``shared``: whether several members may have one GPU."""
    name = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    if version in BROKEN:
        raise ConfigError(
            f"resources.transport = 'nccl': NCCL {name} must not be used, nor any from 2.28.3 to 2.28.8; pip install "
            "'nvidia-nccl-cu12>=2.28.9', or use resources.transport=gloo"
        )
    if shared and version < SHARING:
        raise ConfigError(
            f"resources.gpus is below 1: NCCL {name} refuses several members on one GPU, 2.32 and newer can have them; "
            "pip install 'nvidia-nccl-cu12>=2.32', or use resources.transport=gloo or resources.gpus=1"
        )


class _Posted:
    """An operation on the stream of its communicator, and the tensors that it touches."""

    __slots__ = ("_all", "_done", "_tensors")

    def __init__(self, all: Communicators, done: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        self._all, self._done, self._tensors = all, done, tensors

    def wait(self) -> None:
        if self._done is not None:
            self._all.follow(self._done)
            self._done, self._tensors = None, ()


class Communicators:
    """All NCCL communicators of a member in one epoch. Its main thread posts, others watch and close.

    Args:
        nccl: see :func:`load`.
        limit_s: how long the device may take for a transfer.
        cuda: torch's module of that name, or what a test has in its place.
    """

    def __init__(self, nccl: Any, waits: Waits, limit_s: float, cuda: Any = torch.cuda) -> None:
        self.nccl, self.cuda, self._waits, self.limit_s = nccl, cuda, waits, limit_s
        self.dtypes = {
            torch.float32: nccl.NCCL_FLOAT32,
            torch.bfloat16: nccl.NCCL_BFLOAT16,
            torch.float16: nccl.NCCL_FLOAT16,
            torch.float64: nccl.NCCL_FLOAT64,
            torch.int64: nccl.NCCL_INT64,
            torch.int32: nccl.NCCL_INT32,
            torch.uint8: nccl.NCCL_UINT8,
        }
        self._made: list[Any] = []
        self._marks: deque[Any] = deque()  # where the device was told to wait, last
        self._closed = threading.Event()
        self._why = "the group is closed"
        self._posting, self._closing = threading.Lock(), threading.Lock()

    def add(self, name: str, rank: int, size: int, unique_id: bytes) -> NcclGroup:
        """Make a communicator; blocks until all its members do, see nccl_forming.py. Raises PeerLost."""
        try:
            communicator = self.nccl.NcclCommunicator(size, unique_id, rank)
        except RuntimeError as error:
            raise PeerLost(f"{name} was not formed: {error}") from error
        with self._closing:
            if self._closed.is_set():  # given up meanwhile
                communicator.abort()
                raise PeerLost(self._why)
            self._made.append(communicator)
        # Of high priority: a transfer that can go shall not wait for room behind a computation.
        return NcclGroup(self, communicator, rank, size, self.cuda.Stream(priority=-1))

    def watch(self) -> None:
        """From now on, look for asynchronous errors in a thread of its own."""
        if self._made:
            threading.Thread(target=self._watch, name="nccl", daemon=True).start()

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S):
            self.look()

    def look(self) -> None:
        """Close all if one has failed."""
        with self._closing:
            failed = None if self._closed.is_set() else next(filter(None, map(_failure, self._made)), None)
        if failed is not None:
            self._why = f"transfer failed: {failed}"
            self.close()

    def check(self) -> None:
        """Raises PeerLost if the communicators are closed."""
        if self._closed.is_set():
            raise PeerLost(self._why)

    def post(
        self, stream: Any, launch: Callable[[int], None], *tensors: torch.Tensor, then: Callable[[], Any] | None = None
    ) -> Transfer:
        """Have ``launch`` put something on ``stream``, which it gets as a pointer, after all that is computed so far.

        ``then`` computes on that stream afterwards. Raises PeerLost.
        """
        with self._posting:
            self.check()
            stream.wait_stream(self.cuda.current_stream())
            try:
                launch(stream.cuda_stream)
            except RuntimeError as error:
                self.check()  # an abort takes communicators away from under a post
                if getattr(error, "status", 0) in (2, 3, 6):  # system, internal, remote: the peer or the network
                    raise PeerLost(f"transfer failed: {error}") from error
                raise
            if then is not None:
                with self.cuda.stream(stream), torch.no_grad():
                    then()
            return _Posted(self, stream.record_event(), tensors)

    def follow(self, done: Any) -> None:
        """What is computed from here on comes after ``done``. Waits if the host is too far ahead. Raises PeerLost."""
        self.check()
        computing = self.cuda.current_stream()
        computing.wait_event(done)
        self._marks.append(computing.record_event())
        if len(self._marks) > AHEAD:
            self._reach(self._marks.popleft())

    def settle(self) -> None:
        """Until the device has done all that it was told to compute. Raises PeerLost."""
        self._marks.clear()
        self._reach(self.cuda.current_stream().record_event())

    def _reach(self, event: Any) -> None:
        if not event.query():
            with self._waits.one():
                end = time.monotonic() + self.limit_s
                while not event.query():
                    self.check()
                    if time.monotonic() > end:
                        raise PeerLost(f"transfer failed: not done within {self.limit_s:g} s")
                    time.sleep(POLL_S)
        self.check()  # what an abort has ended is done too

    def close(self) -> None:
        """Abort all, from any thread; when it returns, no kernel of theirs runs. A second call waits for the first."""
        self._closed.set()
        with self._closing:
            if not self._made:
                return
            idle = self._posting.acquire(timeout=POST_S)
            try:
                with suppress(RuntimeError):  # of one that is broken already; the others are to be aborted too
                    self.nccl.groupStart()
                    for communicator in self._made:
                        with suppress(RuntimeError):
                            communicator.abort()
                    self.nccl.groupEnd()
            finally:
                self._made.clear()
                if idle:
                    self._posting.release()


def _failure(communicator: Any) -> str | None:
    """What went wrong in a communicator since it was made."""
    try:
        communicator.check_async_error()
    except RuntimeError as error:
        return str(error)
    except KeyError as code:
        return None if code.args == (IN_PROGRESS,) else f"NCCL error {code}"
    return None


class NcclGroup(Group):
    """One communicator and its stream."""

    def __init__(self, all: Communicators, communicator: Any, rank: int, size: int, stream: Any) -> None:
        self.rank, self.size = rank, size
        self._all, self._communicator, self._stream = all, communicator, stream

    def _dtype(self, tensor: torch.Tensor) -> int:
        assert tensor.is_contiguous()
        return self._all.dtypes[tensor.dtype]

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Transfer:
        dtype, count = self._dtype(out), shard.numel()
        assert out.numel() == count * self.size
        assert shard.is_contiguous()

        def launch(stream: int) -> None:
            self._communicator.allGather(shard.data_ptr(), out.data_ptr(), count, dtype, stream)

        return self._all.post(self._stream, launch, out, shard)

    def reduce_scatter(self, full: torch.Tensor, into: torch.Tensor) -> Transfer:
        """In place: the sum arrives in this member's own piece of ``full``, and is added to ``into`` from there."""
        dtype, count = self._dtype(full), into.numel()
        piece = full.view(self.size, -1)[self.rank]

        def launch(stream: int) -> None:
            self._communicator.reduceScatter(
                full.data_ptr(), piece.data_ptr(), count, dtype, self._all.nccl.NCCL_SUM, stream
            )

        return self._all.post(self._stream, launch, full, into, then=lambda: into.add_(piece))

    def all_reduce(self, tensor: torch.Tensor) -> Transfer:
        dtype, pointer = self._dtype(tensor), tensor.data_ptr()

        def launch(stream: int) -> None:
            self._communicator.allReduce(pointer, pointer, tensor.numel(), dtype, self._all.nccl.NCCL_SUM, stream)

        return self._all.post(self._stream, launch, tensor)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._all.post(self._stream, lambda stream: self._transfer("send", tensor, peer, stream), tensor)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._all.post(self._stream, lambda stream: self._transfer("recv", tensor, peer, stream), tensor)

    def exchange(
        self, incoming: Mapping[int, torch.Tensor], outgoing: Mapping[int, torch.Tensor], tag: int
    ) -> list[Transfer]:
        def launch(stream: int) -> None:
            self._all.nccl.groupStart()
            try:
                for peer, tensor in incoming.items():
                    self._transfer("recv", tensor, peer, stream)
                for peer, tensor in outgoing.items():
                    self._transfer("send", tensor, peer, stream)
            finally:
                self._all.nccl.groupEnd()  # what is begun is ended, or all later posts of this thread would be held

        return [self._all.post(self._stream, launch, *incoming.values(), *outgoing.values())]

    def _transfer(self, what: str, tensor: torch.Tensor, peer: int, stream: int) -> None:
        dtype = self._dtype(tensor)
        getattr(self._communicator, what)(tensor.data_ptr(), tensor.numel(), dtype, peer, stream)

    def close(self) -> None:
        self._all.close()


Edge = tuple[int, int, int]
"""Source, destination, and 0 for what goes forward, 1 for what comes back."""


class NcclPipeline(Group):
    """The stages of one shard and replica: a communicator for each edge, and one of all for what they exchange."""

    def __init__(self, all: NcclGroup, edges: Mapping[Edge, NcclGroup]) -> None:
        self.rank, self.size = all.rank, all.size
        self._all, self._edges = all, edges

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Transfer:
        return self._all.all_gather(out, shard)

    def reduce_scatter(self, full: torch.Tensor, into: torch.Tensor) -> Transfer:
        return self._all.reduce_scatter(full, into)

    def all_reduce(self, tensor: torch.Tensor) -> Transfer:
        return self._all.all_reduce(tensor)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._edges[self.rank, peer, tag % 2].send(tensor, 1, tag)  # the source is rank 0 of its edge

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._edges[peer, self.rank, tag % 2].receive(tensor, 0, tag)

    def exchange(
        self, incoming: Mapping[int, torch.Tensor], outgoing: Mapping[int, torch.Tensor], tag: int
    ) -> list[Transfer]:
        return self._all.exchange(incoming, outgoing, tag)

    def close(self) -> None:
        self._all.close()
