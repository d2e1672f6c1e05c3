"""What to say when a member runs out of memory: what the plan gave it, what it had, and what to change."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch

from zeropp_ray.config import RunConfig
from zeropp_ray.metrics import kinds
from zeropp_ray.planner.memory import predict_memory

if TYPE_CHECKING:
    from zeropp_ray.planner.plan import Plan

_TOLD = 3  # kinds of memory that are named
_REFUSED = (
    "can't allocate memory",  # by torch's allocator on the CPU
    "CUDA error: out of memory",  # what is not from its allocator on the GPU, such as pinned memory
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was refused, on the GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _REFUSED)
    )


def out_of_memory(plan: Plan, config: RunConfig, stage: int, device: torch.device) -> str:
    """One line: the predicted peak of a member of ``stage``, the real one, and settings that lower it."""
    predicted = predict_memory(plan, config, stage)
    if device.type == "cuda":
        predicted.pop(kinds.COPIES)  # they are on the host
    largest = sorted(predicted, key=lambda kind: -predicted[kind])[:_TOLD]
    parts = ", ".join(f"{kind} {_gib(predicted[kind])}" for kind in largest)
    return (
        f"out of memory. The plan gives this member {_gib(sum(predicted.values()))} at its fullest ({parts}), "
        f"{_real(device)}; {_advice(config)}"
    )


def _real(device: torch.device) -> str:
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return f"its process has had {_gib(most)} in memory at most"
    free, total = torch.cuda.mem_get_info(device)
    held, most = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
    return (
        f"its tensors have had {_gib(most)} at most, torch holds {_gib(held)} of the GPU's {_gib(total)}, and "
        f"{_gib(free)} are free"
    )


def _advice(config: RunConfig) -> str:
    parallel, train = config.parallel, config.train
    ways = []
    if parallel.microbatch_size > 1:
        ways.append(f"lower parallel.microbatch_size = {parallel.microbatch_size}")
    if parallel.recompute != "full":
        ways.append("set parallel.recompute=full")
    if parallel.prefetch:
        ways.append("set parallel.prefetch=false")
    if train.dtype != "bfloat16":
        ways.append("set train.dtype=bfloat16")
    ways.append(f"raise parallel.shards = {parallel.shards} or parallel.stages = {parallel.stages}")
    return f"{', '.join(ways[:-1])}, or {ways[-1]}" if len(ways) > 1 else ways[0]


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"
