"""The driver's side of checkpoints: when one is due, publishing it once all members have written, and what is kept."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from zeropp_ray.checkpoint import run_id
from zeropp_ray.checkpoint.manifest import (
    CHECKPOINTS,
    VERSION,
    Manifest,
    Progress,
    entries,
    folder_name,
    folders,
    publish,
)
from zeropp_ray.checkpoint.reader import latest, open_checkpoint
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError

Event = dict[str, Any]
Call = Callable[..., list[Any]]
Wait = Callable[[list[Any]], None]

TRIES = 3  # of the last save, which no later one makes up for
AGAIN_S = 1.0  # between them
SLOW_S = 10.0  # a save that takes longer is told if the next one has to wait for it


class Checkpoints:
    """At most one save is under way; one that falls due meanwhile waits. A failed one is told, and the run goes on."""

    def __init__(self, config: RunConfig, run: Path, units: list[int], data: dict[str, Any], saved: int) -> None:
        self._config, self._units, self._data = config, units, data
        self._id, self._folder = run_id.read(run), run / CHECKPOINTS
        self._last_time = time.monotonic()  # of the last begin or end of a save
        self._saving: tuple[Progress, Path, list[Any]] | None = None
        self.saved_step = saved  # newest step that is on disk; 0: none
        self._begun = saved  # step of the last save that was begun
        self._overdue = self._told = False  # whether the next one waits for it, and whether that was told
        self._failure = ""  # of the last save that failed
        self._finishing = False
        self.blocked_s: list[float] = []  # how long the members' main threads stood still for each
        for left in self._folder.glob(".step-*"):  # of a run that was killed while it saved
            shutil.rmtree(left, ignore_errors=True)
        self._own: list[Path] = []  # newest first; what is not the run's, or damaged, is never removed
        for path in folders(run):
            if path.name > folder_name(saved):  # of an attempt that is given up by going on from before it, or not good
                path.rename(self._aside(path.name))
            elif _is_own(path, run):
                self._own.append(path)

    def _aside(self, name: str) -> Path:
        """A name under which a checkpoint stays, but is no longer one of the run's."""
        number = 1
        while (path := self._folder / f"aside-{number}-{name}").exists():
            number += 1
        return path

    def due(self, step: int) -> bool:
        """Whether to save after ``step``."""
        every = self._config.checkpoint
        by_time = every.every_minutes and time.monotonic() - self._last_time >= every.every_minutes * 60
        by_steps = every.every_steps and step // every.every_steps > self._begun // every.every_steps
        due = bool(by_time or by_steps)
        if self._saving is None:
            return due
        self._overdue |= due
        return False

    def begin(self, progress: Progress, call: Call) -> list[Event]:
        """Have all members copy their committed state; they write while training goes on. ``call`` waits for a call at
        all of them.
        """
        assert self._saving is None
        self._begun, self._last_time, self._overdue, self._told = progress.step, time.monotonic(), False, False
        start = time.perf_counter()
        partial = self._folder / f".{folder_name(progress.step)}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            return [self._failed(progress, str(error))]
        self._saving = progress, partial, call("snapshot", partial)
        self.blocked_s.append(time.perf_counter() - start)
        return []

    def poll(self, wait: Wait | None = None) -> list[Event]:
        """Publish the save under way if all members are done with it; ``wait`` for them, if it is given."""
        if self._saving is None:
            return []
        progress, partial, files = self._saving
        if wait is not None:
            wait(files)
        if ray.wait(files, num_returns=len(files), timeout=0)[1]:
            return self._slow(progress)
        self._saving = None
        self._last_time = time.monotonic()
        try:
            manifest = Manifest(
                version=VERSION,
                run=self._id,
                progress=progress,
                config=self._config.to_dict(),
                units=self._units,
                data=self._data,
                files=entries(ray.get(files)),
            )
            final = self._folder / folder_name(progress.step)
            if final.exists():  # put there by someone else since the start
                final.rename(self._aside(final.name))
            publish(partial, final, manifest)
        except (OSError, RayTaskError, RayActorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            cause = error.cause if isinstance(error, RayTaskError) else error
            return [self._failed(progress, " ".join(str(cause).split()))]
        self.saved_step = progress.step
        self._own.insert(0, final)
        if keep := self._config.checkpoint.keep:
            for old in self._own[keep:]:
                _remove(old)
            del self._own[keep:]
        return [{"kind": "checkpoint", "step": progress.step, "path": str(final)}]

    def give_up(self) -> None:
        """Forget the save under way, or about to be: members were lost."""
        self._saving, self._begun = None, self.saved_step
        for partial in self._folder.glob(".step-*"):
            shutil.rmtree(partial, ignore_errors=True)

    def went_back(self, step: int) -> None:
        """The run goes on from the checkpoint of ``step``, since newer ones are no good."""
        self.saved_step = self._begun = step

    def finish(self, progress: Progress, call: Call, wait: Wait) -> Iterator[Event]:
        """Save the end of the run unless it is saved, by trying several times. ``wait``: until all references are there
        or a member is lost, which it raises.
        """
        self._finishing = True
        yield from self.poll(wait)
        for attempt in range(TRIES):
            if self.saved_step == progress.step:
                return
            time.sleep(AGAIN_S if attempt else 0.0)
            yield from self.begin(progress, call)
            yield from self.poll(wait)

    def unsaved(self, progress: Progress) -> str:
        """Why the end of the run is not saved and what there is to go on from, in words; empty if it is saved."""
        if self.saved_step == progress.step:
            return ""
        text, run = f"step {progress.step} could not be saved ({self._failure})", self._folder.parent
        try:
            newest = latest(run).path.name
        except (ConfigError, OSError):
            return f"{text}, and the run has no good checkpoint: what it learned is lost"
        return (
            f"{text}; the newest good checkpoint is {newest}, go on with: zeropp train --resume {shlex.quote(str(run))}"
        )

    def _slow(self, progress: Progress) -> list[Event]:
        """Once in a save that takes long and has the next one wait."""
        seconds = time.monotonic() - self._last_time
        if self._told or not self._overdue or seconds < SLOW_S:
            return []
        self._told = True
        text = f"checkpoint of step {progress.step} is still being written after {seconds:.0f} s: the next one waits"
        return [{"kind": "log", "text": text}]

    def _failed(self, progress: Progress, cause: str) -> Event:
        self._failure = cause
        then = "" if self._finishing else "; the run goes on without it"
        return {"kind": "log", "text": f"checkpoint of step {progress.step} failed: {cause}{then}"}


def _is_own(path: Path, run: Path) -> bool:
    try:
        return not open_checkpoint(path).misplaced(run)
    except ConfigError:
        return False


def _remove(checkpoint: Path) -> None:
    """Out of sight first: a folder that is half removed must not look like a checkpoint."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    with suppress(FileNotFoundError):  # somebody else removed it
        checkpoint.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
