"""A model whose layers sleep instead of computing, so that eight stages behave on two cores as on eight devices.

Every block sleeps once in its forward (``F``), once for the gradient of its input (``B``) and once for that of its
weight (``W``); the arithmetic beside it is a product of width 8. A pipeline runtime of ours and one of PyTorch run the
same model: its weights are ordinary ones, so both must reach the same loss.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8
VOCABULARY = 16


def sharpen_sleep() -> None:
    """Let the sleeps of this thread, and of those that it starts, end on time: within some microseconds.

    Linux ends them up to 50 microseconds late otherwise, to save wake-ups (PR_SET_TIMERSLACK, in nanoseconds).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, ctypes.c_ulong(1000), 0, 0, 0)


class Naps:
    """How long each task sleeps, in seconds, and how often it did. Nothing sleeps until :attr:`seconds` is set."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.taken: Counter[str] = Counter()

    def take(self, task: str) -> None:
        self.taken[task] += 1
        time.sleep(self.seconds.get(task, 0.0))


class _Nap(torch.autograd.Function):
    """The identity; sleeps in its forward and in its backward, where a task is named for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, naps: Naps, forward: str, backward: str) -> Tensor:
        ctx.naps, ctx.task = naps, backward
        if forward:
            naps.take(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.naps.take(ctx.task)
        return dy, None, None, None


class SleepingBlock(nn.Module):
    """``h + linear(h)``, after a sleep.

    ``weight_nap``: whether autograd sleeps for ``W``. Ours computes weight gradients outside of autograd, so there the
    one who runs ``W`` sleeps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.naps = Naps()
        self.weight_nap = False

    def forward(self, h: Tensor) -> Tensor:
        h = _Nap.apply(h, self.naps, "F", "B")
        if not self.weight_nap:
            return h + self.linear(h)
        return h + functional.linear(h, _Nap.apply(self.linear.weight, self.naps, "", "W"))


class SleepingModel(nn.Module):
    """``depth`` sleeping blocks between an embedding and a head that take next to no time."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(SleepingBlock() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


def wake_up(model: Any, naps: Naps, *, weight_nap: bool) -> None:
    """Let all blocks of ``model`` sleep by ``naps``."""
    for block in model.blocks:
        block.naps, block.weight_nap = naps, weight_nap


def sleep_for_weights(queue: Any, naps: Naps) -> None:
    """Let every ``W`` that ``queue``, ours, runs sleep first."""
    run: Callable[..., None] = queue.run

    def sleeping(*arguments: Any) -> None:
        naps.take("W")
        run(*arguments)

    queue.run = sleeping


class SentTimes:
    """When each message of a step was sent, in memory that all processes share: a message is usable ``delay`` later.

    The same mechanism for ours and PyTorch's: the sender stamps, the receiver sleeps for the rest of the delay.
    """

    def __init__(self, stamps: Any) -> None:
        self.delay = 0.0
        self._stamps = stamps

    def stamp(self, message: int) -> None:
        if self.delay:
            self._stamps[message] = time.monotonic()

    def wait(self, message: int) -> None:
        if self.delay and (rest := self._stamps[message] + self.delay - time.monotonic()) > 0:
            time.sleep(rest)
