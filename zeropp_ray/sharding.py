"""ZeRO-3: parameters as one flat tensor, sharded over the members of the stage.

What the same model chunks use is one *set* (:class:`FlatParameters`). A chunk's own parameters are a set; those that it
shares with other chunks (tied embeddings) are sets apart, sharded alike at every stage that uses them; and frozen ones
are sets apart, which have no gradient. The flat tensor has three ranges, so that what is treated alike lies together::

    deferred matrices (dW in W) | other matrices | vectors (norms, biases) | padding to a multiple of F
    `------------- weight decay ----------------'
                                `---- gradient made by B: the side buffer ----'

Member ``f`` owns elements ``[f * n, (f + 1) * n)``, ``n = padded / F``: the fp32 master weights, their moments and
their reduced gradient. The full tensor exists between :meth:`FlatParameters.gather` and :meth:`FlatParameters.release`
only. The model's own Parameters are views of it; a release shrinks the storage to nothing and a gather fills it again,
so views that autograd has saved stay valid.

Flat shards: Rajbhandari et al., ZeRO, arXiv 1910.02054. Gradient buffers that open at the first ``W`` of a unit and are
reduced after the last: Tang et al., ZeroPP, arXiv 2402.03791.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zeropp_ray.comm.base import Group, Transfer


class Slot(NamedTuple):
    """One parameter's place in the flat tensor of its set."""

    name: str
    parameter: nn.Parameter
    offset: int
    numel: int


class GradientBuffers:
    """Unsharded gradient buffers: one open, and one whose reduce is in flight.

    The chunks of a member share one such pool for what is their own; each set that is shared by chunks has a pool.
    """

    def __init__(self) -> None:
        self._numel = 0
        self.peak_open = 0
        self.reset()

    def reset(self) -> None:
        """Forget all buffers, those in use too: the step was aborted."""
        self._free: list[torch.Tensor] = []
        self.allocated = 0
        self.open = 0

    def reserve(self, numel: int) -> None:
        """A buffer shall have room for ``numel`` elements."""
        self._numel = max(self._numel, numel)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed buffer [numel]; its whole storage has room for the largest set."""
        if not self._free:
            self._free.append(torch.empty(self._numel, dtype=dtype))
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


class FlatParameters:
    """One set of parameters at one member: gathered, reduced and updated together.

    Args:
        parameters: (full name, Parameter) of each, materialised, all of one dtype, all trained or all frozen.
        deferred: those whose gradient ``W`` computes, others may be among them.
        stage: the group over which the set is sharded.
        buffers: where it takes its unsharded gradient from.
        stages: which stages hold the set, ascending.
        number: of the set in the model, the same at all of them.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        deferred: Iterable[nn.Parameter],
        stage: Group,
        buffers: GradientBuffers,
        *,
        stages: Sequence[int],
        shared: bool = False,
        number: int = 0,
    ) -> None:
        self._stage, self._buffers = stage, buffers
        self.stages, self.shared, self.number = tuple(stages), shared, number
        self.trained = parameters[0][1].requires_grad
        deferred = set(deferred) if self.trained else set()  # by identity; a list would compare tensors by value

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
        self._deferred = [slot for slot in self.slots if slot.parameter in deferred]
        self.deferred_numel = sum(slot.numel for slot in self._deferred)
        self.decayed_numel = sum(slot.numel for slot in self.slots if slot.parameter.ndim >= 2)
        self._bind()

    @torch.no_grad()
    def _bind(self) -> None:
        """Move the parameters into the flat tensor, keep this member's shard of it, and leave it released."""
        self._full = torch.zeros(self.padded, dtype=self.slots[0].parameter.dtype)
        self._side = self._full.new_zeros(self.numel - self.deferred_numel if self.trained else 0)
        for slot in self.slots:
            shape = slot.parameter.shape
            view = self._full[slot.offset : slot.offset + slot.numel]
            view.copy_(slot.parameter.reshape(-1))
            slot.parameter.data = view.view(shape)
            start = slot.offset - self.deferred_numel
            if self.trained and start >= 0:  # autograd adds to .grad in place
                slot.parameter.grad = self._side[start : start + slot.numel].view(shape)
        begin = self._stage.rank * self.shard_numel
        self.shard = self._full[begin : begin + self.shard_numel].clone()
        self.gradient = self.shard.new_zeros(self.shard_numel if self.trained else 0)
        if self.trained:
            self._buffers.reserve(self.padded)
        self._storage = self._full.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._storage.resize_(0)
        self._users = 0  # chunks that have gathered the set and not released it
        self._gathering: Transfer | None = None
        self._buffer: torch.Tensor | None = None
        self._views: dict[nn.Parameter, torch.Tensor] = {}

    @property
    def decayed_in_shard(self) -> int:
        """How many leading elements of this member's shard belong to matrices, which weight decay applies to."""
        begin = self._stage.rank * self.shard_numel
        return min(max(self.decayed_numel - begin, 0), self.shard_numel)

    @property
    def moved_bytes(self) -> int:
        """Payload of one gather or reduce at this member."""
        return (self._stage.size - 1) * self.shard.nbytes

    def rebind(self, stage: Group) -> None:
        """Use the groups of a new epoch; the shard stays."""
        self._stage = stage

    @torch.no_grad()
    def gather(self) -> bool:
        """Post the all-gather of the full parameters; :meth:`ready` waits for it.

        False if they are there already, for another chunk.
        """
        assert self.shared or not self._users, "gathered twice"
        self._users += 1
        if self._users > 1:
            return False
        self._storage.resize_(self._bytes)
        # .data has a version counter of its own: refilling is not a change that autograd should notice.
        self._gathering = self._stage.all_gather(self._full.data, self.shard)
        return True

    def ready(self) -> None:
        """Before a use of the parameters."""
        assert self._users, "used while not resident"
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> bool:
        """One chunk needs them no longer. True if it was the last, and they are gone."""
        self.ready()
        self._users -= 1
        if not self._users:
            self._storage.resize_(0)
        return not self._users

    def open_gradient(self) -> dict[nn.Parameter, torch.Tensor]:
        """Views of the unsharded gradient buffer by deferred parameter; opened at the first ``W`` of a unit."""
        if self._buffer is None:
            self._buffer = self._buffers.take(self.padded, self.shard.dtype)
            for slot in self._deferred:
                piece = self._buffer[slot.offset : slot.offset + slot.numel]
                self._views[slot.parameter] = piece.view(slot.parameter.shape)
        return self._views

    @torch.no_grad()
    def reduce(self, *, last: bool) -> PendingReduce:
        """Post the reduce of the open buffer into :attr:`gradient`; the ``last`` one of a step takes the side buffer
        along.
        """
        buffer = self._buffer
        assert buffer is not None, "a reduce without a W before it"
        for slot in self._deferred:
            # What the model did by hand with a deferred weight, functional.linear(x, layer.weight), autograd added up.
            if slot.parameter.grad is not None:
                self._views[slot.parameter].add_(slot.parameter.grad)
                slot.parameter.grad = None
        if last:
            buffer[self.deferred_numel : self.numel].copy_(self._side)
        self._buffer = None
        self._views.clear()
        transfer = self._stage.reduce_scatter(buffer, self.gradient)
        self._buffers.posted()
        return PendingReduce(transfer, buffer, self._buffers)

    def zero_gradient(self) -> None:
        """At the start of a step."""
        self.gradient.zero_()
        self._side.zero_()

    def drop_running_step(self) -> None:
        """Forget what an aborted step left: residency, an open buffer, posted transfers."""
        self._buffer, self._gathering = None, None
        self._views.clear()
        for slot in self._deferred:
            slot.parameter.grad = None
        self._storage.resize_(0)
        self._users = 0
        self._buffers.reset()

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
