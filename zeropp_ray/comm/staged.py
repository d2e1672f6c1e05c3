"""A group whose tensors are on a GPU, over one whose tensors are in host memory: for debugging, and without NCCL.

Everything goes through pinned memory, and the host waits for the device at each post. Sums are made on the host, in
the order and with the bytes of the group behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from zeropp_ray.comm.base import Group, Links, Transfer


class _Staged:
    """A transfer of host tensors, and what is copied before and after the wait for it."""

    def __init__(self, inner: Transfer, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._inner, self._before, self._after = inner, before, after

    def wait(self) -> None:
        self._before()
        self._inner.wait()
        self._after()
        self._before = self._after = _nothing


def _nothing() -> None:
    pass


def _host(tensor: torch.Tensor, *, filled: bool) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor) if filled else host


class StagedGroup(Group):
    """``inner`` for tensors of a GPU."""

    def __init__(self, inner: Group) -> None:
        self.rank, self.size, self._inner = inner.rank, inner.size, inner

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Transfer:
        whole = _host(out, filled=False)
        inner = self._inner.all_gather(whole, _host(shard, filled=True))
        return _Staged(inner, _nothing, lambda: _copy(out, whole))

    def reduce_scatter(self, full: torch.Tensor, into: torch.Tensor) -> Transfer:
        sums = _host(into, filled=False)
        inner = self._inner.reduce_scatter(_host(full, filled=True), sums)
        return _Staged(inner, lambda: _copy(sums, into), lambda: _copy(into, sums))  # others may add to it until then

    def all_reduce(self, tensor: torch.Tensor) -> Transfer:
        host = _host(tensor, filled=True)
        return _Staged(self._inner.all_reduce(host), _nothing, lambda: _copy(tensor, host))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._inner.send(_host(tensor, filled=True), peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        host = _host(tensor, filled=False)
        return _Staged(self._inner.receive(host, peer, tag), _nothing, lambda: _copy(tensor, host))

    def close(self) -> None:
        self._inner.close()


@torch.no_grad()
def _copy(to: torch.Tensor, tensor: torch.Tensor) -> None:
    to.copy_(tensor)


def staged(links: Links) -> Links:
    """``links`` over gloo, for a member that trains on a GPU. Checkpoints and copies are in host memory anyway."""

    def stage(group: Group) -> Group:
        return group if group.size == 1 else StagedGroup(group)  # one that is alone moves nothing

    return replace(links, pipeline=stage(links.pipeline), stage=stage(links.stage), replicas=stage(links.replicas))
