"""Where a member is in its program, readable after it was killed.

A member writes (step, position, clock) into a small mapped file in the run's scratch folder before every instruction,
which costs well under a microsecond; whoever looks reads the file. A killed process cannot be asked, and polling every
member would cost the driver more than a step may.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple

_RECORD = struct.Struct("<qqd")


class Position(NamedTuple):
    """Step ``step`` (0: building;

    -1: evaluation), about to run instruction ``position``, written at ``clock`` (Unix seconds).
    """

    step: int
    position: int
    clock: float


STARTING = Position(0, 0, 0.0)


class ProgressFile:
    """The writing end, held by the member."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self.step = 0

    def __call__(self, position: int) -> None:
        _RECORD.pack_into(self._map, 0, self.step, position, time.time())


def read_progress(path: Path) -> Position | None:
    """What was written last, or None if there is no such file on this node."""
    try:
        return Position(*_RECORD.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
