"""Who may write a run's folder: one job process at a time, and one driver, the job's own.

Both hold a lock on a file, which the system takes back when the process ends, however it ends. They are two because a
driver outlives a job that was killed by seconds, and goes on saving and removing checkpoints for as long.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from zeropp_ray.errors import ConfigError, ZeroppError

JOB, DRIVER = ".lock", ".driver.lock"
DRIVER_S = 60.0  # how long the driver of a job that was killed may live on


@contextmanager
def only_job(run: Path) -> Iterator[None]:
    """Hold the run in folder ``run`` for this process. Inside, only a driver started from here writes there too.

    ConfigError if another process trains the run, or the driver of one that was killed does not end.
    """
    with _opened(run / JOB) as lock:
        if not _taken(lock):
            raise ConfigError(f"{run}: another process trains this run ({holder(run)}); wait, or choose another run")
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now()}")
        lock.flush()
        _wait_for_driver(run)
        yield


def holder(run: Path) -> str:
    """The process that trains the run, or was the last to, in words that fit no other; empty if there was none."""
    try:
        return (run / JOB).read_text(encoding="utf-8")
    except OSError:
        return ""


@contextmanager
def only_driver(run: Path, job: str) -> Iterator[None]:
    """Hold the run for the driver that ``job``, a :func:`holder`, started.

    ZeroppError if that one was killed and another job holds the run by now.
    """
    with _opened(run / DRIVER) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if holder(run) != job:
            raise ZeroppError(f"{run}: is trained by another job by now ({holder(run)})")
        yield


def _wait_for_driver(run: Path) -> None:
    deadline = time.monotonic() + DRIVER_S
    with _opened(run / DRIVER) as lock:
        while not _taken(lock):
            if time.monotonic() > deadline:
                raise ConfigError(f"{run}: the driver of a job that was killed still writes there; end its process")
            time.sleep(0.1)


def _opened(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _taken(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
