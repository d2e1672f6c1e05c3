"""The device that a member computes on: which one, how it is prepared, and what goes between it and the host.

A member has one device. On a GPU node Ray gives it one (``CUDA_VISIBLE_DEVICES``), which is then ``cuda:0`` whatever
its number on the node; nothing here counts ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zeropp_ray.config import ResourcesSection, TrainSection
from zeropp_ray.errors import ConfigError

CPU = torch.device("cpu")

_QUEUES = 32  # hardware queues of a GPU, the most there are


def prepare(resources: ResourcesSection, train: TrainSection) -> None:
    """Tell CUDA and NCCL what they read from the environment alone, before the first use of either.

    Raises ConfigError if it says what cannot be.
    """
    if resources.device != "cuda":
        return
    if resources.transport == "nccl" and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        raise ConfigError(
            "CUDA_LAUNCH_BLOCKING = '1': each launch would wait for its end, and a receive that is posted ahead would "
            "stand for ever; unset it, or use resources.transport=gloo"
        )
    # Each stream needs a hardware queue of its own. Where two share one, what waits in it for a peer keeps back what
    # the peer waits for. The usual number is 8, and some set it to 1.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(_QUEUES)
    # The first launch of a kernel that is not loaded waits until the device has nothing to do. Behind a receive that is
    # posted ahead it would wait for a peer, which may wait for what that kernel computes.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # A transfer of an edge that waits for its peer holds so many blocks of the device; NCCL itself would take up to 32.
    os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", "4")
    if resources.gpus < 1:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if train.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"] = "Ring", "Simple"  # one order of sums for all sizes
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def pick(resources: ResourcesSection) -> torch.device:
    """This member's device. Raises ConfigError if there is none of the kind that was asked for."""
    if resources.device != "cuda":
        return CPU
    if torch.version.cuda is None:
        raise ConfigError(
            f"resources.device = 'cuda': torch {torch.__version__} here is built without CUDA; install one with it, "
            "or use resources.device=cpu"
        )
    if not torch.cuda.is_available():
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        raise ConfigError(
            f"resources.device = 'cuda': no GPU can be used here (CUDA_VISIBLE_DEVICES = {given!r}); see what "
            "nvidia-smi says on this node, or use resources.device=cpu"
        )
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def label(device: torch.device) -> str:
    """Which device that is, the same name from every process that sees it; empty for the CPU."""
    if device.type == "cpu":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} GPU-{properties.uuid}"


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """The tensors of a model that are no parameters, which nothing gathers."""
    if device.type != "cpu":
        for buffer in model.buffers():
            if not buffer.is_meta:
                buffer.data = buffer.data.to(device)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor of the host on ``device``, without waiting for the device."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Aside:
    """Copies from the device to host memory beside the computation, on a stream of their own. On the CPU: just copies.

    The host memory is pinned, so that the device writes it by itself. What is being copied must not change until it is
    (:meth:`hold`), and the copy must not be read until it is there (:meth:`finish`).
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._done: Any = None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory to copy to."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._cuda)

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory; inside of :meth:`copying`."""
        if not self._cuda:
            return tensor.clone()
        return self.empty(tensor.numel(), tensor.dtype).copy_(tensor.view(-1), non_blocking=True)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, ``host.copy_(tensor, non_blocking=True)`` only begins to copy."""
        if not self._cuda:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
            self._done = self._stream.record_event()

    def hold(self) -> None:
        """Before what was copied is changed: the device does so only once the copy is there."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def finish(self) -> None:
        """Until the copies that were begun are there; from any thread."""
        if self._done is not None:
            self._done.synchronize()


def in_range(do: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same as an NVTX range that is named after its argument, so that a profiler shows what ran for it."""

    def ranged(action: Any) -> None:
        torch.cuda.nvtx.range_push(str(action))
        try:
            do(action)
        finally:
            torch.cuda.nvtx.range_pop()

    return ranged
