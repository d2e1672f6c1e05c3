"""Groups over gloo, for CPU tensors.

Process groups are built directly on a store, not through ``torch.distributed``'s global state: a member holds several
epochs' groups in turn, and a test holds several members. Gathers and reduces are exchanges of shards with
point-to-point transfers:

- gloo's own reduce-scatter is an all-reduce in disguise (6.0 tensors on the wire for 4 ranks, where 1.5 is due);
- adding in rank order gives the same bytes in every run and after any fault;
- they can be posted early and waited for late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeropp_ray.comm.base import Group, Links, PeerLost, Transfer
from zeropp_ray.layout import Layout, Member


class _Posted:
    """Works of one operation with the tensors they touch, and pieces to add up in order once all have come."""

    __slots__ = ("_add", "_into", "_tensors", "_works")

    def __init__(
        self,
        works: Sequence[dist.Work],
        tensors: Sequence[torch.Tensor],
        add: Sequence[torch.Tensor] = (),
        into: torch.Tensor | None = None,
    ) -> None:
        self._works, self._tensors, self._add, self._into = works, tensors, add, into

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise PeerLost(f"transfer failed: {str(error).splitlines()[0]}") from error
        if self._into is not None:
            with torch.no_grad():
                for piece in self._add:
                    self._into.add_(piece)
        self._works, self._tensors, self._add, self._into = (), (), (), None


class GlooGroup(Group):
    """A gloo process group of ``size`` members; a group of one needs no store and moves nothing."""

    def __init__(self, rank: int, size: int, backend: Any) -> None:
        self.rank, self.size = rank, size
        self._backend = backend
        self._sequence = 0

    def _gloo(self) -> Any:
        if self._backend is None:
            raise RuntimeError("the group is closed")
        return self._backend

    def _peers(self) -> list[int]:
        return [q for q in range(self.size) if q != self.rank]

    def _exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Send ``outgoing[q]`` to and receive ``incoming[q]`` from every peer ``q``.

        All members call in the same order.
        """
        self._sequence += 1
        if self.size == 1:
            return []
        gloo, tag = self._gloo(), self._sequence
        receives = [gloo.recv([incoming[q]], q, tag) for q in self._peers()]
        sends = [gloo.send([outgoing[q]], q, tag) for q in self._peers()]
        return [*receives, *sends]

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Transfer:
        pieces = list(out.view(self.size, -1).unbind(0))
        pieces[self.rank].copy_(shard)
        return _Posted(self._exchange([shard] * self.size, pieces), [out, shard])

    def reduce_scatter(self, full: torch.Tensor, into: torch.Tensor) -> Transfer:
        outgoing = list(full.view(self.size, -1).unbind(0))
        incoming = [torch.empty_like(piece) if q != self.rank else piece for q, piece in enumerate(outgoing)]
        return _Posted(self._exchange(outgoing, incoming), [full], incoming, into)

    def all_reduce(self, tensor: torch.Tensor) -> Transfer:
        if self.size == 1:
            return _Posted((), ())
        mine = tensor.clone()
        incoming = [torch.empty_like(mine) if q != self.rank else mine for q in range(self.size)]
        works = self._exchange([mine] * self.size, incoming)
        tensor.zero_()
        return _Posted(works, [mine], incoming, tensor)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return _Posted([self._gloo().send([tensor], peer, tag)], [tensor])

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return _Posted([self._gloo().recv([tensor], peer, tag)], [tensor])

    def close(self) -> None:
        # Dropping the last reference closes the sockets; gloo's own abort() and shutdown() do not free a waiting peer.
        self._backend = None


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of one epoch meet: the store that the driver serves, and the time a transfer may take."""

    host: str
    port: int
    epoch: int
    timeout_s: float


def connect(at: Rendezvous, layout: Layout, me: Member, *, host: str) -> Links:
    """Form this member's groups and prove each with an all-reduce of a known answer.

    ``host`` is the address of this member's network interface. Every member of the epoch calls this once, in any order.
    Raises RuntimeError when a peer does not come within the time limit or the proof fails.
    """
    timeout = timedelta(seconds=at.timeout_s)
    gloo: Any = dist.ProcessGroupGloo  # its type stubs lack half of what it has
    try:
        store = dist.TCPStore(at.host, at.port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise PeerLost(f"the driver at {at.host}:{at.port} was not reached within {at.timeout_s:g} s") from error

    def form(name: str, rank: int, size: int) -> GlooGroup:
        if size == 1:
            return GlooGroup(0, 1, None)
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timeout
        prefix = dist.PrefixStore(f"epoch{at.epoch}/{name}", store)
        group = GlooGroup(rank, size, gloo(prefix, rank, size, options))
        proof = torch.tensor([rank + 1.0])
        group.all_reduce(proof).wait()
        if proof.item() != size * (size + 1) / 2:
            raise RuntimeError(f"group {name} of epoch {at.epoch} failed its proof: {proof.item()}")
        return group

    return Links(
        pipeline=form(f"pipeline-{me.f}-{me.r}", me.p, layout.stages),
        stage=form(f"stage-{me.p}-{me.r}", me.f, layout.shards),
        replicas=form(f"replicas-{me.p}-{me.f}", me.r, layout.replicas),
        checkpoint=form(f"checkpoint-{me.p}-{me.r // layout.splits}", layout.piece(me), layout.pieces),
    )
