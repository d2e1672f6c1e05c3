"""Keeps the terminal for what we say: everything that the process and its libraries print goes to the run's log."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO


class _Log(io.FileIO):
    """What a full disk does not take is lost: no run ends for its log."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


@contextmanager
def quiet(log: Path) -> Iterator[TextIO]:
    """Send standard output and error to the end of ``log``; yields the original standard output.

    The descriptors too, not only Python's files: Ray and torch write from C++, and the processes of a cluster that is
    started inside inherit them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    lines = io.TextIOWrapper(io.BufferedWriter(_Log(log, "a")), encoding="utf-8", line_buffering=True)
    with lines as file, redirect_stdout(file), redirect_stderr(file):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            with os.fdopen(os.dup(saved[0]), "w", encoding="utf-8", errors="replace") as console:
                yield console
        finally:
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            os.close(saved[0])
            os.close(saved[1])
