"""The checkpoints of a run as its driver keeps them: begun, made visible, set aside, removed.

On a disk one is written under a name that starts with a dot, and renamed. An object store cannot rename: there the
manifest makes a checkpoint visible. It is written last and deleted first, and what has none is never loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeropp_ray.checkpoint.manifest import CHECKPOINTS, NAME, Manifest, folder_name, publish
from zeropp_ray.errors import ZeroppError
from zeropp_ray.uri import Place, StoreError, UriPath, remove_tree


class Shelf:
    """In a folder."""

    def __init__(self, run: Place) -> None:
        self._folder: Any = run / CHECKPOINTS

    def sweep(self) -> None:
        """Remove what was begun and never became visible."""
        for left in self._folder.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)

    def drop(self) -> None:
        """A save was given up: see to it that what it left is removed."""
        self.sweep()

    def settle(self) -> None:
        """Wait for what is under way: the run is about to end."""

    def begin(self, step: int) -> Any:
        """Where the files of the checkpoint after ``step`` are to be written. OSError if that cannot be made."""
        partial = self._folder / f".{folder_name(step)}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def publish(self, partial: Any, manifest: Manifest) -> Future[Place]:
        """Make the checkpoint visible, once its files are in ``partial``; what it is called then. Here it has happened,
        or failed, when this returns.
        """
        done: Future[Place] = Future()
        try:
            final = self._folder / folder_name(manifest.progress.step)
            if final.exists():  # put there by someone else since the start
                self.set_aside(final)
            publish(partial, final, manifest)
            done.set_result(final)
        except Exception as error:
            done.set_exception(error)
        return done

    def set_aside(self, checkpoint: Any) -> None:
        """It stays, but is no longer one of the run's."""
        number = 1
        while (to := self._folder / f"aside-{number}-{checkpoint.name}").exists():
            number += 1
        self._move(checkpoint, to)

    def _move(self, checkpoint: Any, to: Any) -> None:
        checkpoint.rename(to)

    def remove(self, checkpoint: Any) -> None:
        """Out of sight first: a folder that is half removed must not look like a checkpoint."""
        hidden = checkpoint.with_name(f".{checkpoint.name}.old")
        with suppress(FileNotFoundError):  # somebody else removed it
            checkpoint.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


class UriShelf(Shelf):
    """In an object store. What happens between steps happens in a thread: a store that does not answer keeps no step
    waiting.
    """

    def __init__(self, run: UriPath, record: Path, check: Callable[[], None], lost: Path) -> None:
        """``record``: the run's metrics, of which each checkpoint gets a copy, since steps are recorded on the driver's
        node and may be lost with it. ``check`` raises ZeroppError if the run is another job's by now; if that is known,
        there is a file ``lost``.
        """
        super().__init__(run)
        self._record, self._check, self._lost = record, check, lost
        self._published = set[UriPath]()
        self._thread = ThreadPoolExecutor(1, "publish")

    def sweep(self) -> None:
        for path in self._folder.glob("step-*"):
            if not (path / NAME).exists():
                remove_tree(path)

    def drop(self) -> None:
        """After the next checkpoint: deleting now could hit the files of another try, which have the same names."""

    def settle(self) -> None:
        self._thread.submit(lambda: None).result()

    def begin(self, step: int) -> Any:
        if self._lost.exists():
            self._check()  # and begin no checkpoint over those of the job that has the run now
        folder = self._folder / folder_name(step)
        if folder in self._published:  # a step that is taken again, after a fault
            (folder / NAME).unlink(missing_ok=True)
        return folder

    def publish(self, partial: Any, manifest: Manifest) -> Future[Place]:
        return self._thread.submit(self._publish, partial, manifest)

    def _publish(self, folder: UriPath, manifest: Manifest) -> Place:
        try:
            self._check()
        except StoreError:
            raise
        except ZeroppError:
            self._lost.touch()  # the job process, which would, may stand still
            raise
        (folder / self._record.name).write_bytes(self._record.read_bytes())
        (folder / NAME).write_text(manifest.to_json())
        self._published.add(folder)
        with suppress(StoreError):  # no save is under way now
            self.sweep()
        return folder

    def _move(self, checkpoint: UriPath, to: UriPath) -> None:
        """Through this process: stores copy objects of some GB at most by themselves."""
        names = sorted(path.name for path in checkpoint.iterdir())
        for name in sorted(names, key=lambda name: name == NAME):
            with (checkpoint / name).open() as source, (to / name).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 24)
        (checkpoint / NAME).unlink(missing_ok=True)  # or the run would be gone on from it
        _delete(checkpoint)

    def remove(self, checkpoint: UriPath) -> None:
        self._thread.submit(_delete, checkpoint)


def _delete(checkpoint: UriPath) -> None:
    """What keeps it from being deleted whole leaves what is swept later, or a whole one more than ought to be kept."""
    with suppress(StoreError):
        (checkpoint / NAME).unlink(missing_ok=True)
        remove_tree(checkpoint)
