"""A member's groups over the transport of its run."""

from __future__ import annotations

import threading

import torch

from zeropp_ray.comm import gloo
from zeropp_ray.comm.base import Links
from zeropp_ray.comm.gloo import Rendezvous
from zeropp_ray.layout import Layout, Member


def connect(
    at: Rendezvous, layout: Layout, me: Member, *, host: str, device: torch.device, left: threading.Event | None = None
) -> Links:
    """Form the groups of ``me`` in the epoch of ``at``, for tensors on ``device``.

    ``left``: set if it shall be given up; over gloo it ends within ``at.form_s`` by itself. Raises PeerLost,
    RuntimeError if a proof fails, ConfigError if the transport is not installed.
    """
    if at.transport == "nccl":
        from zeropp_ray.comm import nccl_forming

        return nccl_forming.connect(at, layout, me, host=host, device=device, left=left)
    links = gloo.connect(at, layout, me, host=host)
    if device.type == "cpu":
        return links
    from zeropp_ray.comm.staged import staged

    return staged(links)
