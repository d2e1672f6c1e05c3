"""The injected faults that the driver carries out: its own death, that of a node, and a checkpoint that is altered.

Those that hit a member are sent to it and carried out there, see ``zeropp_ray/faults.py``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from actors.members import Members
from actors.stage_group import MemberHandle
from zeropp_ray.checkpoint.reader import open_checkpoint
from zeropp_ray.errors import ConfigError
from zeropp_ray.faults import Fault
from zeropp_ray.uri import Place, UriPath

KILLED_S = 0.5  # how long the end of a node is waited for; Ray says so only seconds later


def carry_out(fault: Fault, member: MemberHandle) -> None:
    """A fault of :meth:`~zeropp_ray.faults.Faults.due_at_driver`, before the calls of its step. ``member``: whose node
    it is about.
    """
    if fault.kind == "driver":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "node":
        kill_node(member)


def check(faults: Sequence[Fault], members: Members) -> None:
    """ConfigError if one of the ``faults`` is to kill the node of this process, which nobody would survive."""
    for fault in faults:
        if fault.kind == "node":
            _check_elsewhere(members.of(fault.member))


def kill_node(member: MemberHandle) -> None:
    """Kill the node that ``member`` is on, as a loss of power does: its raylet and all workers at once."""
    _check_elsewhere(member)  # it may have moved
    with suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):  # who is gone cannot answer
        ray.get(member.actor.__ray_call__.remote(_end_node), timeout=KILLED_S)


def _check_elsewhere(member: MemberHandle) -> None:
    assert member.identity is not None
    if member.identity.node_id == ray.get_runtime_context().get_node_id():
        raise ConfigError(
            f"--inject node: {member} is on the node of the driver and of this command; join a cluster of more nodes "
            "with --address, and name a member on another one (members.json tells where they are)"
        )


def _end_node(worker: Any) -> None:
    """In a worker: its parent is the node's raylet, and the other workers are its siblings."""
    raylet = os.getppid()
    if Path(f"/proc/{raylet}/comm").read_text().strip() != "raylet":
        raise ConfigError("--inject node: the parent of the member's process is no raylet, so its node is not known")
    siblings = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent(path) == raylet]
    for pid in (raylet, *sorted(siblings, key=lambda pid: pid == os.getpid())):  # this one last
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _parent(process: Path) -> int:
    with suppress(OSError):
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def corrupt(checkpoint: Place) -> None:
    """Alter a byte of a tensor in a published checkpoint, as a failing disk does: sizes and names stay as they are."""
    file = checkpoint / max(open_checkpoint(checkpoint).manifest.files)  # the largest name: of the last stage
    if isinstance(file, UriPath):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        return
    with file.open("r+b") as data:
        data.seek(-1, os.SEEK_END)
        byte = data.read(1)[0]
        data.seek(-1, os.SEEK_END)
        data.write(bytes([byte ^ 1]))
