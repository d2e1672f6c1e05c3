"""Faults for the negative controls: put into every member before it is built."""

from __future__ import annotations

import torch

from zeropp_ray.engine import Engine
from zeropp_ray.layout import Member
from zeropp_ray.sharding import FlatParameters
from zeropp_ray.split_backward import WeightQueue


def drop_one_w(me: Member) -> None:
    """The weight gradients of micro-batch 1 of the last stage are taken from the queue and forgotten."""
    run = WeightQueue.run

    def forgetful(self, key, gradients):
        if me.p == 1 and key[1] == 1:
            self._items.pop(key)
        else:
            run(self, key, gradients)

    WeightQueue.run = forgetful


def drop_a_norm_gradient(me: Member) -> None:
    """One norm's gradient, made by B, does not reach the reduce."""
    reduce = FlatParameters.reduce

    def forgetful(self, *, last):
        if last:
            slot = next((s for s in self.slots if "norm" in s.name), None)
            if slot is not None:
                slot.parameter.grad.zero_()
        return reduce(self, last=last)

    FlatParameters.reduce = forgetful


def reduce_twice(me: Member) -> None:
    """A unit's gradients are added to the reduced shard a second time."""
    reduce = FlatParameters.reduce

    def twice(self, *, last):
        if me.p == 0 and self.slots[0].name.startswith("embed"):
            self._stage.reduce_scatter(self._buffer.clone(), self.gradient).wait()
        return reduce(self, last=last)

    FlatParameters.reduce = twice


def tied_on_one_side(side: int, me: Member) -> None:
    """Stage ``side`` does not count what the others add to the gradient of a shared parameter."""
    exchange = Engine._exchange_shared

    def deaf(self):
        mine = {flat: flat.gradient.clone() for flat in self.sets}
        exchange(self)
        for flat, gradient in mine.items() if me.p == side else ():
            flat.gradient.copy_(gradient)

    Engine._exchange_shared = deaf


def recompute_from_another_input(me: Member) -> None:
    """The last chunk's RF starts from what is not the input that its F had."""
    recompute = Engine._recompute

    def wrong(self, action):
        key = action.chunk, action.microbatch
        if self.chunks[action.chunk].last:
            self.step.chunk_inputs[key] = 1.01 * self.step.chunk_inputs[key]
        recompute(self, action)

    Engine._recompute = wrong


def count_the_loss_again(me: Member) -> None:
    """A recomputed forward adds its tokens to the sum a second time."""
    recompute = Engine._recompute

    def again(self, action):
        recompute(self, action)
        if self.chunks[action.chunk].last:
            self.step.tokens += self._microbatches(action.microbatch)[1].numel()

    Engine._recompute = again


def step_without_its_first_unit(me: Member) -> None:
    """A buffer that stays open over the step forgets what the first unit put into it."""
    weight_gradient = Engine._weight_gradient

    def forgetful(self, action):
        weight_gradient(self, action)
        if action.microbatch == 1:
            for flat in self.chunks[action.chunk].trained:
                flat._buffer.zero_()

    Engine._weight_gradient = forgetful


def sum_in_bf16(by_hand: bool, me: Member) -> None:
    """Gradients that B makes, or those made by hand with deferred weights, are added up over micro-batches in bf16."""

    def narrow(self):
        if by_hand:
            self._side.add_(self._made)
            self._made.zero_()

    def late(self, *, last):
        if not by_hand:
            self._side.add_(self._made)
            self._made.zero_()
        return reduce(self, last=last)

    reduce, FlatParameters.collect = FlatParameters.reduce, torch.no_grad()(narrow)
    FlatParameters.reduce = torch.no_grad()(late)
