"""Deferred weight gradients: the backward in two tasks, ``B`` (gradient of the input) and ``W`` (gradient of the
weights).

Every ``nn.Linear`` and ``nn.Embedding`` of a chunk keeps its module, its parameters and its name; only the instance's
``forward`` is replaced by one whose backward *stashes* what the weight gradient needs (input and output gradient)
instead of computing it. The stash belongs to the running engine (:class:`WeightQueue`), one list per chunk and
micro-batch, and ``W`` empties it straight into flat gradient buffers. Whatever else has parameters (norms, biases, a
user's own), and whatever else is done with a deferred weight, gets its gradient in ``B`` as ever.

The split into B and W: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241; its use here: Tang et al.,
ZeroPP, arXiv 2402.03791. Walking the autograd graph instead, as ``torch.distributed.pipelining`` does, costs about
three times as much under activation checkpointing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

Key = tuple[int, int]  # chunk and micro-batch


class WeightQueue:
    """The deferred weight gradients of one member, by chunk and micro-batch. Empty at the end of every step."""

    def __init__(self) -> None:
        self._items: dict[Key, list[tuple[str, nn.Parameter, torch.Tensor, torch.Tensor]]] = {}
        self._recording: list[tuple[str, nn.Parameter, torch.Tensor, torch.Tensor]] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def clear(self) -> None:
        """Forget everything: the step was aborted."""
        self._items.clear()

    def held(self) -> Iterator[torch.Tensor]:
        return (tensor for items in self._items.values() for _, _, x, dy in items for tensor in (x, dy))

    @contextmanager
    def recording(self, key: Key) -> Iterator[None]:
        """Collect what the backward inside stashes as the ``W`` of ``key``."""
        self._recording = self._items.setdefault(key, [])
        try:
            yield
        finally:
            self._recording = None

    def stash(self, kind: str, parameter: nn.Parameter, x: torch.Tensor, dy: torch.Tensor) -> None:
        if self._recording is None:
            raise RuntimeError("a deferred layer ran its backward outside of a B of its chunk")
        x = x.detach()  # else it would keep the whole graph before it until W, and all that the graph's nodes hold
        self._recording.append((kind, parameter, x, dy))

    @torch.no_grad()
    def run(self, key: Key, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """``W``: add the weight gradients of ``key`` to ``gradients``, views of flat buffers, which may be wider."""
        for kind, parameter, x, dy in self._items.pop(key):
            gradient = gradients[parameter]
            dy = dy.reshape(-1, dy.shape[-1])
            if kind == "embedding":
                gradient.index_add_(0, x.reshape(-1), dy.to(gradient.dtype))
            elif dy.dtype == gradient.dtype:  # dW [out, in] += dy^T x; accumulates in place, without a temporary
                gradient.addmm_(dy.t(), x.reshape(-1, x.shape[-1]))
            else:  # no kernel on CPU multiplies in bf16 and adds in fp32
                gradient.add_(dy.t() @ x.reshape(-1, x.shape[-1]))


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, queue: WeightQueue
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        # The Parameter itself: under checkpointing a saved tensor comes back detached.
        ctx.weight, ctx.queue = weight, queue
        # Not a view, which it is inside a Function: whoever called may work on it in place, as on any Linear's output.
        return functional.linear(x, weight, bias).data

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.queue.stash("linear", ctx.weight, x, dy)
        dx = dy @ ctx.weight if ctx.needs_input_grad[0] else None
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None


class _DeferredEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: nn.Parameter, padding: int | None, queue: WeightQueue
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.queue = weight, padding, queue
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:  # the padding row is never trained, as in nn.Embedding
            dy = dy.masked_fill((ids == ctx.padding).unsqueeze(-1), 0.0)
        ctx.queue.stash("embedding", ctx.weight, ids, dy)
        return None, None, None, None


DEFERRED = ("_DeferredLinearBackward", "_DeferredEmbeddingBackward")  # as nodes of an autograd graph


def _linear(module: nn.Linear, queue: WeightQueue, x: torch.Tensor) -> torch.Tensor:
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # it casts, and autograd knows how to undo that
        return functional.linear(x, module.weight, module.bias)
    if isinstance(x._base if x._is_view() else x, nn.Parameter):
        x = x.clone()  # parameters are released before W
    return _DeferredLinear.apply(x, module.weight, module.bias, queue)


def _embedding(module: nn.Embedding, queue: WeightQueue, ids: torch.Tensor) -> torch.Tensor:
    return _DeferredEmbedding.apply(ids, module.weight, module.padding_idx, queue)


def can_defer(module: nn.Module) -> bool:
    """Whether the weight gradient of ``module`` can wait: a plain Linear or Embedding that trains a weight of its own.

    A subclass, a parametrized layer, a replaced ``forward``, a weight with hooks, or an Embedding with ``max_norm``,
    ``sparse`` or ``scale_grad_by_freq`` means something else by its forward or gradient and is left to autograd.
    """
    weight = module._parameters.get("weight")  # under weight_norm and its kind ``weight`` is no parameter
    if weight is None or not weight.requires_grad or "forward" in vars(module):
        return False
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return False
    if type(module) is nn.Embedding:
        return not (module.max_norm or module.sparse or module.scale_grad_by_freq)
    return type(module) is nn.Linear


def defer(model: nn.Module, queue: WeightQueue) -> list[nn.Parameter]:
    """Let every module of ``model`` that can stash its weight gradient in ``queue``. Returns those weights.

    They are the same at every stage, whichever part of the model it owns.
    """
    modules = [module for module in model.modules() if can_defer(module)]
    for module in modules:
        forward = _linear if isinstance(module, nn.Linear) else _embedding
        module.forward = functools.partial(forward, module, queue)  # type: ignore[arg-type]
    return list(dict.fromkeys(cast(nn.Parameter, module.weight) for module in modules))
