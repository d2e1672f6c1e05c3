"""What a plan is made for: devices, in nodes, and the links inside and between them. The numbers, each with its source,
are in ``data/devices.toml``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from zeropp_ray.errors import ConfigError
from zeropp_ray.schedule import Link

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

USABLE = 0.9
"""Part of a device's memory that tensors may take; the rest is for the runtime, its kernels and communicators, and for
what the allocator cannot use (assumption)."""

_ALIASES = {"nvlink": ("nvlink3", "nvlink4", "nvlink5")}  # that of the device


@dataclass(frozen=True)
class Device:
    """One accelerator, or one core. FLOP/s, bytes and bytes/s."""

    name: str
    peak: float  # dense, in `dtype`
    efficiency: float  # part of the peak that tasks reach
    memory: float
    memory_bandwidth: float
    dtype: str
    intra: str
    per_node: int
    host: bool  # its memory is the host's

    @property
    def usable(self) -> float:
        """Bytes that tensors may take."""
        return USABLE * self.memory


@dataclass(frozen=True)
class NamedLink(Link):
    """What one device can send, and receive at the same time; of the bandwidth, what is reached."""

    name: str


@dataclass(frozen=True)
class Cluster:
    """``count`` devices, numbered node by node. Groups are sets of devices at a fixed distance, their *stride*."""

    device: Device
    count: int
    per_node: int
    intra: NamedLink
    inter: NamedLink

    @property
    def nodes(self) -> int:
        return -(-self.count // self.per_node)

    def crosses(self, members: int, stride: int) -> bool:
        """Whether a group reaches over the end of a node."""
        return members * stride > self.per_node

    def over(self, members: int, stride: int) -> str:
        """The name of the slowest link of a group."""
        return (self.inter if self.crosses(members, stride) else self.intra).name

    def send(self, size: float, members: int, stride: int) -> float:
        """Seconds until ``size`` bytes are at the next member of a group, at the worst place."""
        link = self.inter if self.crosses(members, stride) else self.intra
        return link.time(size)

    def gather(self, size: float, members: int, stride: int) -> float:
        """Seconds of an all-gather, or a reduce-scatter, of a tensor of ``size`` bytes over a group, as a ring.

        Members of a group that share a node share the way out of it: each has an adapter of its own.
        """
        if members == 1:
            return 0.0
        link, bandwidth = self.intra, self.intra.bandwidth
        if self.crosses(members, stride):
            link = self.inter
            bandwidth = min(bandwidth, link.bandwidth * max(1, self.per_node // stride))
        return (members - 1) * (link.latency + size / members / bandwidth)


def cluster(device: str, count: int, nodes: int = 0, intra: str = "", inter: str = "") -> Cluster:
    """The cluster of ``count`` devices; what is left out is as usual for the device.

    Raises ConfigError for names that are not known, which lists those that are, and for numbers that do not fit.
    """
    if count < 1:
        raise ConfigError(f"--gpus = {count}: must be at least 1")
    chosen = _device(device)
    if nodes < 0 or (nodes and count % nodes):
        raise ConfigError(f"--nodes = {nodes}: must divide --gpus = {count}, so that nodes are equal; 0 for the usual")
    per_node = count // nodes if nodes else min(chosen.per_node, count)
    if not nodes and count % per_node:
        raise ConfigError(
            f"--gpus = {count}: not whole nodes of {per_node} {device}; use {-(-count // per_node) * per_node}, or "
            "--nodes"
        )
    between = {"nvlink3": "ib200", "loopback": "ethernet10"}.get(chosen.intra, "ib400")
    inside = chosen.intra if intra in ("", "nvlink") and chosen.intra in _ALIASES["nvlink"] else intra or chosen.intra
    return Cluster(chosen, count, per_node, _link(inside, "--intra"), _link(inter or between, "--inter"))


def device_names() -> list[str]:
    """Names that ``cluster`` knows."""
    return list(_data()["devices"])


def _device(name: str) -> Device:
    known = _data()["devices"]
    if name not in known:
        raise ConfigError(f"--device = {name!r}: unknown; known are {', '.join(known)}")
    of = known[name]
    return Device(
        name=name,
        peak=of["peak_tflops"] * 1e12,
        efficiency=of["efficiency"],
        memory=of["memory_gb"] * 1e9,
        memory_bandwidth=of["memory_gb_s"] * 1e9,
        dtype=of["dtype"],
        intra=of["intra"],
        per_node=of["per_node"],
        host=of["host"],
    )


def _link(name: str, option: str) -> NamedLink:
    known = _data()["links"]
    if name not in known:
        raise ConfigError(f"{option} = {name!r}: unknown; known are {', '.join((*_ALIASES, *known))}")
    of = known[name]
    return NamedLink(latency=of["latency_us"] * 1e-6, bandwidth=of["gb_s"] * 1e9 * of["reached"], name=name)


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / "data" / "devices.toml").read_text(encoding="utf-8"))
