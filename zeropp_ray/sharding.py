"""ZeRO-3: parameters as one flat tensor, sharded over the members of the stage.

What the same model chunks use is one *set* (:class:`FlatParameters`). A chunk's own parameters are a set; those that it
shares with other chunks (tied embeddings) are sets apart, sharded alike at every stage that uses them; and frozen ones
are sets apart, which have no gradient. The flat tensor has three ranges, so that what is treated alike lies together::

    deferred matrices (dW in W) | other matrices | vectors (norms, biases) | padding to a multiple of F, or F * R
    `------------- weight decay ----------------'
                                `---- gradient made by B: the side buffer ----'

Member ``f`` holds the shard ``[f * n, (f + 1) * n)``, ``n = padded / F``, of weights and reduced gradient. The full
tensor exists between :meth:`FlatParameters.gather` and :meth:`FlatParameters.release` only. The model's own Parameters
are views of it; a release shrinks the storage to nothing and a gather fills it again, so views that autograd has saved
stay valid.

What a member *owns* are the master weights and their moments: those of its shard, or with ZeRO-1 of one of ``R`` pieces
of it. The shard follows them after each update (:meth:`FlatParameters.refresh`). It is in the dtype that is computed
with; masters and sums of gradients may be in a wider one. Where they are not, masters are views of the shard.

Flat shards, and the optimizer's state split alone: Rajbhandari et al., ZeRO, arXiv 1910.02054. Gradient buffers that
open at the first ``W`` of a unit and are reduced after the last: Tang et al., ZeroPP, arXiv 2402.03791.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zeropp_ray.comm.base import Group, Transfer
from zeropp_ray.device import CPU
from zeropp_ray.layout import Layout, Member
from zeropp_ray.metrics import kinds


class Slot(NamedTuple):
    """One parameter's place in the flat tensor of its set."""

    name: str
    parameter: nn.Parameter
    offset: int
    numel: int

    def within(self, begin: int, numel: int) -> tuple[int, int]:
        """Which of its elements lie in ``[begin, begin + numel)`` of the flat tensor: from, up to; equal if none."""
        low = min(max(begin - self.offset, 0), self.numel)
        return low, min(max(begin + numel - self.offset, low), self.numel)


class GradientBuffers:
    """Unsharded gradient buffers: one open, and one whose reduce is in flight.

    The chunks of a member share one such pool for what is their own; each set that is shared by chunks has a pool, and
    so has each chunk where all buffers stay open up to the end of the step.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._numel, self._device = 0, device
        self.peak_open = 0
        self.reset()

    def reset(self) -> None:
        """Forget all buffers, those in use too: the step was aborted."""
        self._free: list[torch.Tensor] = []
        self.all: list[torch.Tensor] = []
        self.open = 0

    def reserve(self, numel: int) -> None:
        """A buffer shall have room for ``numel`` elements."""
        self._numel = max(self._numel, numel)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed buffer [numel]; its whole storage has room for the largest set."""
        if not self._free:
            self.all.append(torch.empty(self._numel, dtype=dtype, device=self._device))
            self._free.append(self.all[-1])
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
        parameters: (full name, Parameter) of each, materialised in the masters' dtype on the CPU, all trained or all
            frozen.
        deferred: those whose gradient ``W`` computes, others may be among them.
        stage: the group over which the set is sharded.
        layout, me: which piece of the set this member owns.
        dtype: of the weights that are gathered and computed with.
        device: where all of it lies from here on.
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
        layout: Layout,
        me: Member,
        dtype: torch.dtype,
        device: torch.device = CPU,
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
        self.padded = -(-offset // layout.pieces) * layout.pieces
        self._splits = layout.splits  # in how many pieces the shard is owned
        self._shard = me.f * (self.padded // layout.shards), self.padded // layout.shards  # begin and length
        self._owned = layout.piece(me) * (self.padded // layout.pieces), self.padded // layout.pieces
        self._deferred = [slot for slot in self.slots if slot.parameter in deferred]
        self.deferred_numel = sum(slot.numel for slot in self._deferred)
        self.decayed_numel = sum(slot.numel for slot in self.slots if slot.parameter.ndim >= 2)
        self._bind(dtype, device)

    @torch.no_grad()
    def _bind(self, dtype: torch.dtype, device: torch.device) -> None:
        """Keep this member's part of the parameters, and make them views of the flat tensor, which is left released."""
        masters = self.slots[0].parameter.dtype
        begin = self._owned[0] - self._shard[0]
        self.shard = torch.zeros(self._shard[1], dtype=dtype, device=device)
        self._mine = self.shard[begin : begin + self._owned[1]]
        self.master = self._mine.to(masters)  # the same memory if the dtype is the same
        # Of the shard: summed over the stage. The owned part of it: summed over the replicas too.
        self.gradient = self.master.new_zeros(self.shard.numel() if self.trained else 0)
        self.owned_gradient = self.gradient
        if self._splits > 1 and self.trained:
            self.owned_gradient = torch.zeros_like(self.master)
        # What B makes: narrow where weights are, for autograd wants the gradient of a parameter in its dtype.
        self._side = self.gradient.new_zeros(self.numel - self.deferred_numel if self.trained else 0)
        self._made = self._side.to(dtype)
        self._by_hand: dict[nn.Parameter, torch.Tensor] = {}
        self._full = torch.empty(self.padded, dtype=dtype, device=device)
        for slot in self.slots:
            shape = slot.parameter.shape
            self.fill(slot, slot.parameter.data)
            slot.parameter.data = self._full[slot.offset : slot.offset + slot.numel].view(shape)
            start = slot.offset - self.deferred_numel
            if self.trained and start >= 0:  # autograd adds to .grad in place
                slot.parameter.grad = self._made[start : start + slot.numel].view(shape)
        if self.trained:
            self._buffers.reserve(self.padded)
        self._storage = self._full.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._storage.resize_(0)
        self._users = 0  # chunks that have gathered the set and not released it
        self._gathering: Transfer | None = None
        self._buffer: torch.Tensor | None = None
        self._views: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def fill(self, slot: Slot, whole: torch.Tensor) -> None:
        """Take what this member holds of a parameter, in the shard and as master, from the ``whole`` of it."""
        for part, (begin, numel) in ((self.shard, self._shard), (self.master, self._owned)):
            low, high = slot.within(begin, numel)
            if low < high:
                values = whole.reshape(-1)[low:high].to(self.master.dtype)
                part[slot.offset + low - begin : slot.offset + high - begin] = values

    def holds(self, slot: Slot) -> bool:
        """Whether a part of it lies in this member's shard."""
        low, high = slot.within(*self._shard)
        return low < high

    @property
    def decayed_owned(self) -> int:
        """How many leading elements of what this member owns belong to matrices, which weight decay applies to."""
        begin, numel = self._owned
        return min(max(self.decayed_numel - begin, 0), numel)

    @property
    def gathered_bytes(self) -> int:
        """Payload of one gather at this member."""
        return (self._stage.size - 1) * self.shard.nbytes

    @property
    def reduced_bytes(self) -> int:
        """Payload of one reduce at this member."""
        return (self._stage.size - 1) * self.gradient.nbytes

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
        """Views of the unsharded gradient buffer by deferred parameter; opened at the first ``W`` after a reduce."""
        if self._buffer is None:
            self._buffer = self._buffers.take(self.padded, self.gradient.dtype)
            for slot in self._deferred:
                piece = self._buffer[slot.offset : slot.offset + slot.numel]
                self._views[slot.parameter] = piece.view(slot.parameter.shape)
        return self._views

    @torch.no_grad()
    def collect(self) -> None:
        """After each ``B``: what it made is added to the sum over micro-batches, which would be too coarse in the dtype
        of narrow weights. Where weights are as wide as masters, autograd has added it up.
        """
        if self._made is self._side:
            return
        self._side.add_(self._made)
        self._made.zero_()
        for slot in self._deferred:
            made, slot.parameter.grad = slot.parameter.grad, None
            if made is not None:
                made = made.to(self._side.dtype)
                kept = self._by_hand.setdefault(slot.parameter, made)
                if kept is not made:
                    kept.add_(made)

    @torch.no_grad()
    def reduce(self, *, last: bool) -> PendingReduce:
        """Post the reduce of the open buffer into :attr:`gradient`; the ``last`` one of a step takes the side buffer
        along.
        """
        buffer = self._buffer
        assert buffer is not None, "a reduce without a W before it"
        for slot in self._deferred:
            # What the model did by hand with a deferred weight, functional.linear(x, layer.weight), autograd added up.
            made = self._by_hand.pop(slot.parameter, slot.parameter.grad)
            if made is not None:
                self._views[slot.parameter].add_(made)
                slot.parameter.grad = None
        if last:
            buffer[self.deferred_numel : self.numel].copy_(self._side)
        self._buffer = None
        self._views.clear()
        transfer = self._stage.reduce_scatter(buffer, self.gradient)
        self._buffers.posted()
        return PendingReduce(transfer, buffer, self._buffers)

    def sum_over(self, replicas: Group) -> Transfer:
        """Post the sum of the gradients of all replicas, into :attr:`owned_gradient`."""
        if self._splits == 1:
            return replicas.all_reduce(self.gradient)
        self.owned_gradient.zero_()
        return replicas.reduce_scatter(self.gradient, self.owned_gradient)

    @torch.no_grad()
    def refresh(self, replicas: Group) -> Transfer | None:
        """After an update of the masters: the shard anew. With ZeRO-1 from those of all replicas, which is posted."""
        if self.master is not self._mine:
            self._mine.copy_(self.master)
        return replicas.all_gather(self.shard, self._mine) if self._splits > 1 else None

    def zero_gradient(self) -> None:
        """At the start of a step."""
        self.gradient.zero_()
        self._side.zero_()

    def drop_running_step(self) -> None:
        """Forget what an aborted step left: residency, an open buffer, posted transfers."""
        self._buffer, self._gathering = None, None
        self._views.clear()
        self._by_hand.clear()
        self._made.zero_()
        for slot in self._deferred:
            slot.parameter.grad = None
        self._storage.resize_(0)
        self._users = 0
        self._buffers.reset()

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the set, with their kind of memory."""
        yield from ((kinds.WEIGHTS, tensor) for tensor in (self.shard, self.master))
        yield from ((kinds.GRADIENT_SHARDS, tensor) for tensor in (self.gradient, self.owned_gradient))
        yield kinds.RESIDENT, self._full
        by_hand = [slot.parameter.grad for slot in self._deferred if slot.parameter.grad is not None]
        made_by_b = (self._side, self._made, *by_hand, *self._by_hand.values())
        yield from ((kinds.GRADIENT_BUFFERS, tensor) for tensor in made_by_b)
        yield from ((kinds.GRADIENT_BUFFERS, buffer) for buffer in self._buffers.all)

    def piece(self, slot: Slot, number: int) -> tuple[int, int]:
        """Which elements of ``slot`` lie in piece ``number`` of those that the set is owned in."""
        return slot.within(number * self._owned[1], self._owned[1])

    def first(self, slot: Slot) -> int:
        """The first element of ``slot`` that this member owns."""
        return slot.within(*self._owned)[0]

    def place(self, slot: Slot) -> slice:
        """Where ``slot`` lies in what this member owns (masters, their gradient and moments); may be empty."""
        low, high = slot.within(*self._owned)
        begin = slot.offset + low - self._owned[0] if low < high else 0
        return slice(begin, begin + high - low)


class PendingReduce:
    """A reduce in flight; its buffer is free again after :meth:`wait`."""

    def __init__(self, transfer: Transfer, buffer: torch.Tensor, buffers: GradientBuffers) -> None:
        self._transfer, self._buffer, self._buffers = transfer, buffer, buffers

    def wait(self) -> None:
        self._transfer.wait()
        self._buffers.give_back(self._buffer)
