"""In which dtypes a run computes, and keeps what it computes with.

With ``bfloat16``, forward and backward work on weights that were rounded to it, while the weights themselves, their
moments and every sum of gradients stay fp32: the *masters* (Micikevicius et al., Mixed Precision Training, arXiv
1710.03740, section 3.1). No loss scaling: bf16 has the range of fp32.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import nn


class Precision(NamedTuple):
    """The two dtypes of a run; one and the same unless it is ``bfloat16``."""

    compute: torch.dtype = torch.float32  # weights as they are gathered, activations, messages
    master: torch.dtype = torch.float32  # weights as they are updated and saved, moments, gradients and their sums

    @classmethod
    def of(cls, dtype: str) -> Precision:
        """Of a run with ``train.dtype = dtype``."""
        compute = getattr(torch, dtype)
        return cls(compute, torch.float32 if compute == torch.bfloat16 else compute)

    def apply(self, model: nn.Module) -> None:
        """Convert a whole model to what members compute with: parameters; and buffers to masters, never bf16."""
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.compute)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(self.master)


FLOAT32 = Precision()


def time_against_fp32(dtype: torch.dtype, size: int = 128) -> float:
    """How long a matrix product takes in ``dtype`` here, with that in fp32 as 1: about 0.5 for bf16 where the processor
    has instructions for it, several where it has not. Takes some milliseconds.
    """

    def best(matrix: torch.Tensor) -> float:
        times = []
        for _ in range(6):  # the first warms up, and the shortest is the one that nothing came in between
            start = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - start)
        return min(times)

    matrix = torch.ones(size, size)
    return best(matrix.to(dtype)) / best(matrix)
