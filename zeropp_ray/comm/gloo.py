"""Groups over gloo, for CPU tensors.

Process groups are built directly on a store, not through ``torch.distributed``'s global state: a member holds several
epochs' groups in turn, and a test holds several members. Gathers and reduces are exchanges of shards with
point-to-point transfers:

- gloo's own reduce-scatter is an all-reduce in disguise (6.0 tensors on the wire for 4 ranks, where 1.5 is due);
- adding in rank order gives the same bytes in every run and after any fault;
- they can be posted early and waited for late.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeropp_ray.comm.base import Group, Links, PeerLost, Transfer, Waits
from zeropp_ray.layout import Layout, Member

_NEVER_SENT = 2**31 - 1  # a tag
_MARKED = 2**30  # added to the tag of what is marked
_MARK = torch.zeros(1, dtype=torch.uint8)
_LARGE = 256 * 2**10  # bytes; of less, a part is on its way for some microseconds only
FORM_S = 15.0  # for a group's forming


def _short(error: RuntimeError) -> str:
    """What gloo says, without where in its sources and what it advises."""
    text = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*] ", "", text)


class _Posted:
    """Works of one operation with the tensors they touch, and pieces to add up in order once all have come."""

    __slots__ = ("_add", "_into", "_limit", "_tensors", "_waits", "_works")

    def __init__(
        self,
        waits: Waits,
        limit: timedelta,
        works: Sequence[dist.Work],
        tensors: Sequence[torch.Tensor],
        add: Sequence[torch.Tensor] = (),
        into: torch.Tensor | None = None,
    ) -> None:
        self._waits, self._limit = waits, limit
        self._works, self._tensors, self._add, self._into = works, tensors, add, into

    def wait(self) -> None:
        if self._works:
            self._waits.begun += 1
            try:
                for work in self._works:
                    work.wait(self._limit)
            except RuntimeError as error:
                raise PeerLost(f"transfer failed: {_short(error)}") from error
            finally:
                self._waits.over += 1
        if self._into is not None:
            with torch.no_grad():
                for piece in self._add:
                    self._into.add_(piece)
        self._works, self._tensors, self._add, self._into = (), (), (), None


class GlooGroup(Group):
    """A gloo process group of ``size`` members; a group of one needs no store and moves nothing.

    ``limit``: how long a transfer may take, from the wait for it.
    """

    def __init__(
        self, rank: int, size: int, backend: Any, waits: Waits | None = None, limit: timedelta = timedelta()
    ) -> None:
        self.rank, self.size, self.limit = rank, size, limit
        self._backend, self._waits = backend, waits or Waits()
        self._sequence = 0

    def _posted(self, *arguments: Any) -> Transfer:
        return _Posted(self._waits, self.limit, *arguments)

    def _post(self, what: str, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """``send`` or ``recv``."""
        backend = self._backend
        if backend is None:
            raise PeerLost("the group is closed")
        try:
            return getattr(backend, what)([tensor], peer, tag)
        except RuntimeError as error:
            raise PeerLost(f"transfer failed: {_short(error)}") from error

    def _transfer(self, what: str, tensor: torch.Tensor, peer: int, tag: int) -> list[dist.Work]:
        """Post a ``send`` or ``recv``: what to wait for, in order.

        When a connection breaks, gloo forgets to fail the receive of which a part has come, and its wait would go on up
        to the limit. So a mark follows what is large, and is waited for first: once it is there, all before it is. A
        large send of which a part is gone is forgotten too, which nothing here helps against.
        """
        works = [self._post(what, tensor, peer, tag)]
        return [self._post(what, _MARK, peer, tag + _MARKED), *works] if tensor.nbytes >= _LARGE else works

    def _peers(self) -> list[int]:
        return [q for q in range(self.size) if q != self.rank]

    def _exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Send ``outgoing[q]`` to and receive ``incoming[q]`` from every peer ``q``.

        All members call in the same order.
        """
        self._sequence += 1
        if self.size == 1:
            return []
        tag = self._sequence
        receives = [work for q in self._peers() for work in self._transfer("recv", incoming[q], q, tag)]
        sends = [work for q in self._peers() for work in self._transfer("send", outgoing[q], q, tag)]
        return [*receives, *sends]

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Transfer:
        pieces = list(out.view(self.size, -1).unbind(0))
        pieces[self.rank].copy_(shard)
        return self._posted(self._exchange([shard] * self.size, pieces), [out, shard])

    def reduce_scatter(self, full: torch.Tensor, into: torch.Tensor) -> Transfer:
        outgoing = list(full.view(self.size, -1).unbind(0))
        incoming = [torch.empty_like(piece) if q != self.rank else piece for q, piece in enumerate(outgoing)]
        return self._posted(self._exchange(outgoing, incoming), [full], incoming, into)

    def all_reduce(self, tensor: torch.Tensor) -> Transfer:
        if self.size == 1:
            return self._posted((), ())
        mine = tensor.clone()
        incoming = [torch.empty_like(mine) if q != self.rank else mine for q in range(self.size)]
        works = self._exchange([mine] * self.size, incoming)
        tensor.zero_()
        return self._posted(works, [mine], incoming, tensor)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._posted(self._transfer("send", tensor, peer, tag), [tensor])

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._posted(self._transfer("recv", tensor, peer, tag), [tensor])

    def close(self) -> None:
        # A receive that times out closes all sockets of its group: whoever waits comes free, here and at the peers.
        # gloo's own abort() and shutdown() free no peer, and to drop the last reference is not in our hands: a wait
        # that blocks holds one, and so does each transfer of an aborted step.
        for peer in self._peers():
            with suppress(RuntimeError):  # it timed out, or the socket is closed already
                self._post("recv", torch.empty(1), peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        self._backend = None


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of one epoch meet: the store that the driver serves, and the time that may take.

    ``timeout_s``: of a transfer. ``form_s``: of a group's forming, which must fail soon if a member dies meanwhile.
    ``transport``: what training's tensors go over, gloo or nccl.
    """

    host: str
    port: int
    epoch: int
    timeout_s: float
    form_s: float = FORM_S
    transport: str = "gloo"

    def store(self) -> dist.TCPStore:
        """A connection to it. Raises PeerLost."""
        try:
            return dist.TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.form_s))
        except RuntimeError as error:
            text = f"the driver at {self.host}:{self.port} was not reached within {self.form_s:g} s"
            raise PeerLost(text) from error


def serve(host: str) -> dist.TCPStore:
    """A store for a rendezvous, on a port of the address ``host`` and of no other; it ends with its last reference."""
    with socket.create_server((host, 0)) as listening:  # left to itself it listens on all addresses
        port = listening.getsockname()[1]
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
        )


class Former:
    """Forms the groups of one member, each on the same ``store``. ``host``: the address of its network interface."""

    def __init__(self, at: Rendezvous, store: dist.TCPStore, host: str) -> None:
        self._at, self._store, self._host = at, store, host

    def __call__(self, name: str, rank: int, size: int, waits: Waits | None = None) -> GlooGroup:
        """A group, proven with an all-reduce of a known answer. All members of it call this, in any order.

        ``waits``: of the thread that will use it, if they count. Raises PeerLost when a peer does not come in time,
        RuntimeError when the proof fails.
        """
        if size == 1:
            return GlooGroup(0, 1, None)
        at, forming = self._at, timedelta(seconds=self._at.form_s)
        gloo: Any = dist.ProcessGroupGloo  # its type stubs lack half of what it has
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = forming  # for good: to set it later does not reach the transfers, so each wait has its own
        prefix = dist.PrefixStore(f"epoch{at.epoch}/{name}", self._store)
        proof = torch.tensor([rank + 1.0])
        try:
            group = GlooGroup(rank, size, gloo(prefix, rank, size, options), waits, forming)
            group.all_reduce(proof).wait()
        except RuntimeError as error:
            text = f"group {name} of epoch {at.epoch} was not formed within {at.form_s:g} s"
            raise PeerLost(f"{text}: {' '.join(str(error).split())}") from error
        group.limit = timedelta(seconds=at.timeout_s)
        if proof.item() != size * (size + 1) / 2:
            raise RuntimeError(f"group {name} of epoch {at.epoch} failed its proof: {proof.item()}")
        return group

    def background(self, layout: Layout, me: Member) -> tuple[GlooGroup, GlooGroup]:
        """The groups of checkpoints and of copies, whose traffic is in host memory whatever training goes over."""
        ring = layout.ring(me)
        return (
            self(f"checkpoint-{me.p}-{me.r // layout.splits}", layout.piece(me), layout.pieces),
            self("copies-{}-{}-{}".format(*ring[0]), ring.index(me), len(ring)),
        )


def connect(at: Rendezvous, layout: Layout, me: Member, *, host: str) -> Links:
    """Form this member's groups. ``host`` is the address of its network interface.

    Every member of the epoch calls this once, in any order. Raises PeerLost when the driver or a peer does not come
    within ``form_s``, RuntimeError when a proof fails.
    """
    form, waits = Former(at, at.store(), host), Waits()  # of the main thread; a checkpoint's are of another
    pipeline = form(f"pipeline-{me.f}-{me.r}", me.p, layout.stages, waits)
    stage = form(f"stage-{me.p}-{me.r}", me.f, layout.shards, waits)
    replicas = form(f"replicas-{me.p}-{me.f}", me.r, layout.replicas, waits)
    checkpoint, copies = form.background(layout, me)
    return Links(pipeline, stage, replicas, checkpoint, copies, waits)
