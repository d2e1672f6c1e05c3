"""Temporary folders that do not outlive their processes by long."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.processes import running


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder of this process. Those of processes that were killed are removed on the way."""
    for left in Path(tempfile.gettempdir()).glob("zeropp-*-*"):
        pid = left.name.split("-")[1]
        if pid.isdigit() and not running(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"zeropp-{os.getpid()}-"))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
