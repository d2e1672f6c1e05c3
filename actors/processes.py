"""Processes of this node."""

from __future__ import annotations

import os


def running(pid: int) -> bool:
    """Whether a process with this id exists here, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
