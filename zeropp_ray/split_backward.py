"""Deferred weight gradients: the backward in two tasks, ``B`` (gradient of the input) and ``W`` (gradient of the
weights).

Every ``nn.Linear`` and ``nn.Embedding`` of a chunk keeps its module, its parameters and its name; only the instance's
``forward`` is replaced by one whose backward *stashes* what the weight gradient needs (input and output gradient)
instead of computing it. The stash belongs to the chunk (:class:`WeightQueue`), one list per micro-batch, and ``W``
empties it straight into the chunk's flat gradient buffer. Whatever else has parameters (norms, biases, a user's own)
gets its gradient in ``B`` as ever.

The split into B and W: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241; its use here: Tang et al.,
ZeroPP, arXiv 2402.03791. Walking the autograd graph instead, as ``torch.distributed.pipelining`` does, costs about
three times as much under activation checkpointing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional


class WeightQueue:
    """The deferred weight gradients of one chunk, by micro-batch. Empty at the end of every step."""

    def __init__(self) -> None:
        self._items: dict[int, list[tuple[str, nn.Parameter, torch.Tensor, torch.Tensor]]] = {}
        self._recording: list[tuple[str, nn.Parameter, torch.Tensor, torch.Tensor]] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def clear(self) -> None:
        """Forget everything: the step was aborted."""
        self._items.clear()

    @contextmanager
    def recording(self, microbatch: int, deferred: Iterable[nn.Parameter]) -> Iterator[None]:
        """Collect what the backward inside stashes as the ``W`` of ``microbatch``.

        A deferred parameter that the model also uses by hand (``functional.linear(x, layer.weight)``) receives that
        part of its gradient from autograd, in ``.grad``; it joins the queue, so that each gradient takes one way only.
        """
        self._recording = self._items.setdefault(microbatch, [])
        try:
            yield
            for parameter in deferred:
                if parameter.grad is not None:
                    self._recording.append(("direct", parameter, parameter.grad, parameter.grad))
                    parameter.grad = None
        finally:
            self._recording = None

    def stash(self, kind: str, parameter: nn.Parameter, x: torch.Tensor, dy: torch.Tensor) -> None:
        if self._recording is None:
            raise RuntimeError("a deferred layer ran its backward outside of a B of its chunk")
        self._recording.append((kind, parameter, x, dy))

    @torch.no_grad()
    def run(self, microbatch: int, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """``W``: add the weight gradients of ``microbatch`` to ``gradients``, views of the chunk's flat gradient
        buffer.
        """
        for kind, parameter, x, dy in self._items.pop(microbatch):
            gradient = gradients[parameter]
            if kind == "linear":  # dW [out, in] += dy^T x; accumulates in place, without a temporary
                gradient.addmm_(dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]))
            elif kind == "embedding":
                gradient.index_add_(0, x.reshape(-1), dy.reshape(-1, dy.shape[-1]))
            else:
                gradient.add_(x)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, queue: WeightQueue
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        # The Parameter itself: under checkpointing a saved tensor comes back detached, and the buffer's views hang on
        # it.
        ctx.weight, ctx.queue = weight, queue
        return functional.linear(x, weight, bias)

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


def _linear(module: nn.Linear, queue: WeightQueue, x: torch.Tensor) -> torch.Tensor:
    return _DeferredLinear.apply(x, module.weight, module.bias, queue)


def _embedding(module: nn.Embedding, queue: WeightQueue, ids: torch.Tensor) -> torch.Tensor:
    return _DeferredEmbedding.apply(ids, module.weight, module.padding_idx, queue)


def defer(modules: Iterable[nn.Module], queue: WeightQueue) -> list[nn.Parameter]:
    """Let every plain Linear and Embedding among ``modules`` stash its weight gradient in ``queue``.

    Returns those weights. A subclass, a parametrized layer or an Embedding with ``max_norm``, ``sparse`` or
    ``scale_grad_by_freq`` means something else by its forward or its gradient and is left to autograd.
    """
    weights: dict[nn.Parameter, None] = {}
    for module in modules:
        if type(module) is nn.Linear:
            module.forward = functools.partial(_linear, module, queue)  # type: ignore[method-assign]
        elif type(module) is nn.Embedding and not (module.max_norm or module.sparse or module.scale_grad_by_freq):
            module.forward = functools.partial(_embedding, module, queue)  # type: ignore[method-assign]
        else:
            continue
        weights[cast(nn.Parameter, module.weight)] = None
    return list(weights)
