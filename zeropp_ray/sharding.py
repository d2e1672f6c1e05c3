"""ZeRO-3 of one chunk: its parameters as one flat tensor, sharded over the members of the stage.

The flat tensor has three ranges, so that what is treated alike lies together::

    deferred matrices (dW in W) | other matrices | vectors (norms, biases) | padding to a multiple of F
    `------------- weight decay ----------------'
                                `---- gradient made by B: the side buffer ----'

Member ``f`` owns elements ``[f * n, (f + 1) * n)``, ``n = padded / F``: the fp32 master weights, their moments and
their reduced gradient. The full tensor exists between :meth:`FlatChunk.gather` and :meth:`FlatChunk.release` only.
The model's own Parameters are views of it; a release shrinks the storage to nothing and a gather fills it again, so
views that autograd has saved stay valid.

Flat shards: Rajbhandari et al., ZeRO, arXiv 1910.02054. Gradient buffers that open at the first ``W`` of a unit and are
reduced after the last: Tang et al., ZeroPP, arXiv 2402.03791.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zeropp_ray.comm.base import Counters, Group, Transfer


class Slot(NamedTuple):
    """One parameter's place in the flat tensor of its chunk."""

    name: str
    parameter: nn.Parameter
    offset: int
    numel: int


class GradientBuffers:
    """The unsharded gradient buffers of one member, shared by its chunks:

    one open, and one whose reduce is in flight.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype
        self._free: list[torch.Tensor] = []
        self.allocated = 0
        self.open = 0
        self.peak_open = 0

    def take(self, numel: int) -> torch.Tensor:
        """A zeroed buffer [numel]; its whole storage has room for the largest chunk."""
        if not self._free:
            self._free.append(torch.empty(self.numel, dtype=self.dtype))
            self.allocated += 1
        self.open += 1
        self.peak_open = max(self.peak_open, self.open)
        return self._free.pop()[:numel].zero_()

    def posted(self) -> None:
        """The buffer's reduce is in flight: it is no longer open."""
        self.open -= 1

    def give_back(self, buffer: torch.Tensor) -> None:
        base = buffer._base
        self._free.append(base if base is not None else buffer)


class FlatChunk:
    """The flat parameters of one chunk at one member.

    Args:
        parameters: (full name, Parameter) of every parameter of the chunk, materialised, all of one dtype.
        deferred: those whose gradient ``W`` computes.
        stage: the group over which the chunk is sharded.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        deferred: Iterable[nn.Parameter],
        stage: Group,
        counters: Counters,
    ) -> None:
        self._stage, self._counters = stage, counters
        deferred = set(deferred)  # by identity; tensors in a list would be compared by value

        def region(item: tuple[str, nn.Parameter]) -> int:
            return 0 if item[1] in deferred else 1 if item[1].ndim >= 2 else 2

        self.slots: list[Slot] = []
        offset = 0
        for name, parameter in sorted(parameters, key=region):  # stable: by range, then in the model's order
            self.slots.append(Slot(name, parameter, offset, parameter.numel()))
            offset += parameter.numel()
        self.numel = offset
        self.padded = -(-offset // stage.size) * stage.size
        self.shard_numel = self.padded // stage.size
        self.deferred_numel = sum(s.numel for s in self.slots if s.parameter in deferred)
        self.decayed_numel = sum(s.numel for s in self.slots if s.parameter.ndim >= 2)
        self._bind(deferred)

    @torch.no_grad()
    def _bind(self, deferred: set[nn.Parameter]) -> None:
        """Move the parameters into the flat tensor, keep this member's shard of it, and leave it released."""
        first = self.slots[0].parameter
        self._full = torch.zeros(self.padded, dtype=first.dtype)
        self._side = torch.zeros(self.numel - self.deferred_numel, dtype=first.dtype)
        for slot in self.slots:
            shape = slot.parameter.shape
            view = self._full[slot.offset : slot.offset + slot.numel]
            view.copy_(slot.parameter.reshape(-1))
            slot.parameter.data = view.view(shape)
            if slot.parameter not in deferred:  # autograd adds to .grad in place
                start = slot.offset - self.deferred_numel
                slot.parameter.grad = self._side[start : start + slot.numel].view(shape)
        begin = self._stage.rank * self.shard_numel
        self.shard = self._full[begin : begin + self.shard_numel].clone()
        self.gradient = torch.zeros_like(self.shard)
        self._storage = self._full.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._storage.resize_(0)
        self.resident = False
        self._gathering: Transfer | None = None
        self._buffer: torch.Tensor | None = None
        self._views: dict[nn.Parameter, torch.Tensor] = {}

    @property
    def deferred(self) -> list[nn.Parameter]:
        return [slot.parameter for slot in self.slots if slot.offset < self.deferred_numel]

    @property
    def decayed_in_shard(self) -> int:
        """How many leading elements of this member's shard belong to matrices, which weight decay applies to."""
        begin = self._stage.rank * self.shard_numel
        return min(max(self.decayed_numel - begin, 0), self.shard_numel)

    def rebind(self, stage: Group) -> None:
        """Use the groups of a new epoch; the shard stays."""
        self._stage = stage

    def _moved_bytes(self) -> int:
        return (self._stage.size - 1) * self.shard_numel * self.shard.element_size()

    @torch.no_grad()
    def gather(self) -> None:
        """Post the all-gather of the full parameters; :meth:`ready` waits for it."""
        assert not self.resident, "gathered twice"
        self._storage.resize_(self._bytes)
        # .data has a version counter of its own: refilling is not a change that autograd should notice.
        self._gathering = self._stage.all_gather(self._full.data, self.shard)
        self.resident = True
        self._counters.gathers += 1
        self._counters.gathered_bytes += self._moved_bytes()

    def ready(self) -> None:
        """Before a use of the parameters."""
        assert self.resident, "used while not resident"
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        self.ready()
        self._storage.resize_(0)
        self.resident = False

    def open_gradient(self, buffers: GradientBuffers) -> dict[nn.Parameter, torch.Tensor]:
        """Views of the unsharded gradient buffer by deferred parameter;

        opened, zeroed, at the first ``W`` of a unit.
        """
        if self._buffer is None:
            self._buffer = buffers.take(self.padded)
            for slot in self.slots:
                if slot.offset < self.deferred_numel:
                    piece = self._buffer[slot.offset : slot.offset + slot.numel]
                    self._views[slot.parameter] = piece.view(slot.parameter.shape)
        return self._views

    def reduce(self, buffers: GradientBuffers, *, last: bool) -> PendingReduce:
        """Post the reduce of the open buffer into :attr:`gradient`;

        the ``last`` one of a step takes the side buffer along.
        """
        buffer = self._buffer
        assert buffer is not None, "a reduce without a W before it"
        if last:
            buffer[self.deferred_numel : self.numel].copy_(self._side)
        self._buffer = None
        self._views.clear()
        transfer = self._stage.reduce_scatter(buffer, self.gradient)
        buffers.posted()
        self._counters.reduces += 1
        self._counters.reduced_bytes += self._moved_bytes()
        return PendingReduce(transfer, buffer, buffers)

    def zero_gradient(self) -> None:
        """At the start of a step."""
        self.gradient.zero_()
        self._side.zero_()

    def drop_running_step(self) -> None:
        """Forget what an aborted step left: residency, an open buffer, posted transfers."""
        self._buffer, self._gathering = None, None
        self._views.clear()
        self._storage.resize_(0)
        self.resident = False

    def piece(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Which elements of ``slot`` lie in the shard of member ``rank`` of the stage: from, up to; equal if none."""
        begin = rank * self.shard_numel - slot.offset
        low = min(max(begin, 0), slot.numel)
        return low, min(max(begin + self.shard_numel, low), slot.numel)

    def place(self, slot: Slot) -> slice:
        """Where the local piece of ``slot`` lies in this member's shard tensors (weights, gradient); may be empty."""
        low, high = self.piece(slot, self._stage.rank)
        begin = slot.offset + low - self._stage.rank * self.shard_numel if low < high else 0
        return slice(begin, begin + high - low)


class PendingReduce:
    """A reduce in flight; its buffer is free again after :meth:`wait`."""

    def __init__(self, transfer: Transfer, buffer: torch.Tensor, buffers: GradientBuffers) -> None:
        self._transfer, self._buffer, self._buffers = transfer, buffer, buffers

    def wait(self) -> None:
        self._transfer.wait()
        self._buffers.give_back(self._buffer)
