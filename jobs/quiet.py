"""Keeps the terminal for what we say: everything that the process and its libraries print goes to the run's log."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO


@contextmanager
def quiet(log: Path) -> Iterator[TextIO]:
    """Send standard output and error to the end of ``log``; yields the original standard output.

    The descriptors too, not only Python's files: Ray and torch write from C++, and the processes of a cluster that is
    started inside inherit them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with log.open("a", buffering=1, encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
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
