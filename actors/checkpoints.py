"""The driver's side of checkpoints: when one is due, publishing it once all members have written, and what is kept."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as settled
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from zeropp_ray.checkpoint import run_id
from zeropp_ray.checkpoint.manifest import VERSION, Manifest, Progress, entries, folder_name, folders
from zeropp_ray.checkpoint.reader import latest, open_checkpoint
from zeropp_ray.checkpoint.shelf import Shelf
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.uri import Place, StoreError

Event = dict[str, Any]
Call = Callable[..., list[Any]]
Wait = Callable[[list[Any]], None]

TRIES = 3  # of the last save, which no later one makes up for
AGAIN_S = 1.0  # between them
SLOW_S = 10.0  # a save that takes longer is told if the next one has to wait for it


class Checkpoints:
    """At most one save is under way; one that falls due meanwhile waits. A failed one is told, and the run goes on."""

    def __init__(
        self,
        config: RunConfig,
        run: Place,
        units: list[int],
        data: dict[str, Any],
        saved: int,
        shelf: Shelf | None = None,
    ) -> None:
        """``shelf``: of the run, if it is not in a folder."""
        self._config, self._units, self._data = config, units, data
        self._id, self._run = run_id.read(run), run
        self._shelf = shelf or Shelf(run)
        self._last_time = time.monotonic()  # of the last begin or end of a save
        self._saving: tuple[Progress, Place, list[Any]] | None = None
        self._publishing: Future[Place] | None = None  # once all its files are there
        self.saved_step = saved  # newest step that is on disk; 0: none
        self._begun = saved  # step of the last save that was begun
        self._overdue = self._told = False  # whether the next one waits for it, and whether that was told
        self._failure = ""  # of the last save that failed
        self._finishing = False
        self.blocked_s: list[float] = []  # how long the members' main threads stood still for each
        self._shelf.sweep()  # what a run left that was killed while it saved
        self._own: list[Place] = []  # newest first; what is not the run's, or damaged, is never removed
        for path in folders(run):
            if path.name > folder_name(saved):  # of an attempt that is given up by going on from before it, or not good
                self._shelf.set_aside(path)
            elif _is_own(path, run):
                self._own.append(path)

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
        try:
            partial = self._shelf.begin(progress.step)
        except (OSError, ZeroppError) as error:
            return [self._failed(progress, str(error))]
        self._saving = progress, partial, call("snapshot", partial)
        self.blocked_s.append(time.perf_counter() - start)
        return []

    def poll(self, wait: Wait | None = None) -> list[Event]:
        """Publish the save under way if all members are done with it; ``wait`` for them, if it is given."""
        if self._saving is None:
            return []
        progress, partial, files = self._saving
        if self._publishing is None:
            if wait is not None:
                wait(files)
            if ray.wait(files, num_returns=len(files), timeout=0)[1]:
                return self._slow(progress)
        try:
            if self._publishing is None:
                self._publishing = self._shelf.publish(partial, self._manifest(progress, ray.get(files)))
            if wait is None and not self._publishing.done():
                return self._slow(progress)
            final = self._publishing.result()
        except (OSError, ZeroppError, RayTaskError, RayActorError) as error:
            self._ended()
            self._shelf.drop()
            cause = error.cause if isinstance(error, RayTaskError) else error
            return [self._failed(progress, " ".join(str(cause).split()))]
        self._ended()
        self.saved_step = progress.step
        self._own = [final, *(path for path in self._own if path != final)]
        if keep := self._config.checkpoint.keep:
            for old in self._own[keep:]:
                self._shelf.remove(old)
            del self._own[keep:]
        return [{"kind": "checkpoint", "step": progress.step, "path": str(final)}]

    def _manifest(self, progress: Progress, files: list[Any]) -> Manifest:
        return Manifest(
            version=VERSION,
            run=self._id,
            progress=progress,
            config=self._config.to_dict(),
            units=self._units,
            data=self._data,
            files=entries(files),
        )

    def _ended(self) -> None:
        """The save under way is, well or not."""
        self._saving = self._publishing = None
        self._last_time = time.monotonic()

    def give_up(self) -> None:
        """Forget the save under way, or about to be: members were lost."""
        if self._publishing is not None:  # all that it needs of them is there
            settled([self._publishing])
            return
        self._saving, self._begun = None, self.saved_step
        self._shelf.drop()

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
                break
            time.sleep(AGAIN_S if attempt else 0.0)
            yield from self.begin(progress, call)
            yield from self.poll(wait)
        self._shelf.settle()

    def unsaved(self, progress: Progress) -> str:
        """Why the end of the run is not saved and what there is to go on from, in words; empty if it is saved."""
        if self.saved_step == progress.step:
            return ""
        text, run = f"step {progress.step} could not be saved ({self._failure})", str(self._run)
        try:
            newest = latest(self._run).path.name
        except StoreError:
            return f"{text}; once it can be reached, go on with: zeropp train --resume {shlex.quote(run)}"
        except (ConfigError, OSError):
            return f"{text}, and the run has no good checkpoint: what it learned is lost"
        return f"{text}; the newest good checkpoint is {newest}, go on with: zeropp train --resume {shlex.quote(run)}"

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


def _is_own(path: Place, run: Place) -> bool:
    try:
        return not open_checkpoint(path).misplaced(run)
    except ConfigError:
        return False
