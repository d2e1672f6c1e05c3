"""Tensor memory and gathers of one step, counted alike for ours and for the peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from zeropp_ray.metrics.tensor_memory import TensorMemory

_GATHER = "c10d::_allgather_base_"  # what FSDP2 calls; ours goes past torch.distributed and counts by itself


@dataclass
class Watched:
    """What one process did in one step. A gather of ``n`` bytes among ``F`` moves ``n (F-1)/F`` at each."""

    peak_tensor_bytes: int = 0
    gathers: int = 0
    gathered_bytes: int = 0


@contextmanager
def watched() -> Iterator[Watched]:
    """Count what runs inside; slow, so not for timing."""
    found = Watched()
    memory = _Watch(found)
    with memory:
        yield found
    found.peak_tensor_bytes = memory.peak_bytes


class _Watch(TensorMemory):
    def __init__(self, found: Watched) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == _GATHER:
            whole, shard = args[:2]
            self._found.gathers += 1
            self._found.gathered_bytes += whole.nbytes - shard.nbytes
        return super().__torch_dispatch__(func, types, args, kwargs)
