"""Who may write a run's folder: one job process at a time, and one driver, the job's own.

Both hold a lock on a file, which the system takes back when the process ends, however it ends. They are two because a
driver outlives a job that was killed by seconds, and goes on saving and removing checkpoints for as long; and because a
job starts another driver when its own died.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from zeropp_ray.errors import ConfigError, ZeroppError

JOB, DRIVER = ".lock", ".driver.lock"
DRIVER_S = 60.0  # how long the driver of a job that was killed, or a dead driver's process, may live on
LATE_S = 2.0  # how long one may look who holds the run, and find that it comes too late


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
        if not without_driver(run):
            raise ConfigError(f"{run}: the driver of a job that was killed still writes there; end its process")
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

    ZeroppError if another driver holds it, or that job was killed and another one holds the run by now.
    """
    with _opened(run / DRIVER) as lock:
        if not _taken(lock, LATE_S):
            raise ZeroppError(f"{run}: is trained by another driver ({last_driver(run)})")
        if holder(run) != job:
            raise ZeroppError(f"{run}: is trained by another job by now ({holder(run)})")
        with suppress(OSError):  # of a full disk
            os.truncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"driver (process {os.getpid()} on {socket.gethostname()})".encode())
        yield


def last_driver(run: Path) -> str:
    """The driver of the run, or the last there was, in words."""
    with suppress(OSError):
        return (run / DRIVER).read_text(encoding="utf-8") or "driver"
    return "driver"


def without_driver(run: Path) -> bool:
    """Wait until no driver holds the run; False if that takes longer than :data:`DRIVER_S`."""
    with _opened(run / DRIVER) as lock:
        return _taken(lock, DRIVER_S)


def _opened(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _taken(lock: TextIO, within_s: float = 0.0) -> bool:
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        else:
            return True
