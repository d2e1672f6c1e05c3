"""A run in an object store works in a folder of its own on the driver's node, whose files are copied out as it goes on.

Checkpoints do not pass here: members write theirs to the store. What is here is small: configuration, metrics, events,
log. An object cannot be added to, so a file that has grown is written again whole, the less often the longer that
takes.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from actors import lease
from actors.folder import METRICS
from actors.lease import leased
from actors.locks import only_job
from actors.scratch import scratch
from zeropp_ray.errors import ZeroppError
from zeropp_ray.uri import Place, UriPath

EVERY_S = 10.0  # what is seen in the store is this old, or
SHARE = 0.05  # as old as it takes to spend no more than this part of the time on it


@dataclass(frozen=True)
class Held:
    """A run that this process may write: ``run`` is what a person names, ``folder`` where its files are here."""

    run: Place
    folder: Path
    lease: str = ""

    def go_on_from(self, checkpoint: Place) -> None:
        """Have the metrics that the checkpoint brings: what is newer than it may not have come to the store."""
        if isinstance(checkpoint, UriPath):
            with suppress(FileNotFoundError):
                (self.folder / METRICS).write_bytes((checkpoint / METRICS).read_bytes())


@contextmanager
def held(run: Place, tell: Callable[[str], None]) -> Iterator[Held]:
    """Hold the run for this process. ``tell`` hears, in words, what is slow or goes wrong on the way.

    ConfigError if another process trains it.
    """
    if isinstance(run, Path):
        with only_job(run):
            yield Held(run, run)
        return
    with (
        scratch() as folder,
        only_job(folder),
        leased(run, folder, tell) as token,
        mirrored(folder, run, token, tell),
    ):
        yield Held(run, folder, token)


@contextmanager
def mirrored(folder: Path, run: UriPath, token: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Begin with the files that the run has, and keep it up to date with those in ``folder``, the last time at the end.
    What the store does not take then is kept on this machine.
    """
    mirror, end = Mirror(folder, run, token), threading.Event()
    mirror.fetch()

    def go_on() -> None:
        took = 0.0
        while not end.wait(max(EVERY_S, took / SHARE)):
            began = time.monotonic()
            with suppress(ZeroppError, OSError):  # the next time; a lost lease stops the run
                mirror.copy()
            took = time.monotonic() - began

    thread = threading.Thread(target=go_on, name="mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        try:
            mirror.copy()
        except ZeroppError as error:
            kept = tempfile.mkdtemp(prefix="zeropp-kept-")
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            tell(f"{error}; what the run recorded is kept in {kept}")


def fetch(run: UriPath, folder: Path) -> None:
    """Copy the files of a run, checkpoints aside, to ``folder``."""
    for path in run.iterdir():
        if not path.name.startswith(".") and path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())


class Mirror:
    """Copies the files of ``folder`` to ``run`` when they have changed; hidden ones stay."""

    def __init__(self, folder: Path, run: UriPath, token: str) -> None:
        """``token``: of the lease under which it is written."""
        self._folder, self._run, self._token = folder, run, token
        self._there: dict[str, tuple[int, int]] = {}  # what the store has: time and size of the file it is a copy of

    def fetch(self) -> None:
        """Have here what the run has there."""
        fetch(self._run, self._folder)
        self._there = self._here()

    def copy(self) -> None:
        """Copy what has changed. Raises StoreError, or ZeroppError if the run is another job's by now."""
        here = self._here()
        if here == self._there:
            return
        lease.check(self._run, self._token)
        for name in here.keys() | self._there.keys():
            if name not in here:
                (self._run / name).unlink(missing_ok=True)
                del self._there[name]
            elif here[name] != self._there.get(name):
                (self._run / name).write_bytes((self._folder / name).read_bytes())
                self._there[name] = here[name]

    def _here(self) -> dict[str, tuple[int, int]]:
        found = ((path.name, path.stat()) for path in self._folder.iterdir() if path.is_file())
        return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in found if not name.startswith(".")}
