"""Processes of this node, told from later ones with the same id by the time of their start."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def running(pid: int) -> bool:
    """Whether a process with this id exists here, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def started_at(pid: int) -> int:
    """When a process of this node started, in clock ticks since the boot; 0 where the system does not tell."""
    fields = _status(pid)
    return int(fields[19]) if fields else 0


def stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False where the system does not tell."""
    fields = _status(pid)
    return bool(fields) and fields[0] in ("T", "t")


def alive(pid: int, started: int) -> bool:
    """Whether the process ``pid`` that started at ``started`` is still there; a zombie is not."""
    if not started:
        return running(pid)
    fields = _status(pid)
    return bool(fields) and int(fields[19]) == started and fields[0] not in ("Z", "X")


def kill(processes: Iterable[tuple[int, int]], wait_s: float) -> bool:
    """SIGKILL the (pid, started) of this node and wait until they are gone, with all that they held; whether they are.

    A stopped process is killed too, and at once, where ``ray.kill`` leaves it for seconds.
    """
    left = [process for process in processes if alive(*process)]
    for pid, _ in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + wait_s
    while any(alive(*process) for process in left) and time.monotonic() < deadline:
        time.sleep(0.005)
    return not any(alive(*process) for process in left)


def _status(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: state first, start time as number 19."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
