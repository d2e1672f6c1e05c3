"""Faults for the negative controls: put into every member before it is built."""

from __future__ import annotations

from zeropp_ray.layout import Member
from zeropp_ray.sharding import FlatChunk
from zeropp_ray.split_backward import WeightQueue


def drop_one_w(me: Member) -> None:
    """The weight gradients of micro-batch 1 of the last stage are taken from the queue and forgotten."""
    run = WeightQueue.run

    def forgetful(self, microbatch, gradients):
        if me.p == 1 and microbatch == 1:
            self._items.pop(microbatch)
        else:
            run(self, microbatch, gradients)

    WeightQueue.run = forgetful


def drop_a_norm_gradient(me: Member) -> None:
    """One norm's gradient, made by B, does not reach the reduce."""
    reduce = FlatChunk.reduce

    def forgetful(self, buffers, *, last):
        if last:
            slot = next((s for s in self.slots if "norm" in s.name), None)
            if slot is not None:
                slot.parameter.grad.zero_()
        return reduce(self, buffers, last=last)

    FlatChunk.reduce = forgetful


def reduce_twice(me: Member) -> None:
    """A unit's gradients are added to the reduced shard a second time."""
    reduce = FlatChunk.reduce

    def twice(self, buffers, *, last):
        if me.p == 0 and self.slots[0].name.startswith("embed"):
            self._stage.reduce_scatter(self._buffer.clone(), self.gradient).wait()
        return reduce(self, buffers, last=last)

    FlatChunk.reduce = twice
