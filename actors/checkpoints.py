"""The driver's side of checkpoints: when one is due, publishing it once all members have written, and what is kept."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from zeropp_ray.checkpoint.manifest import VERSION, Manifest, Progress, entries, folder_name, publish
from zeropp_ray.checkpoint.reader import CHECKPOINTS, folders
from zeropp_ray.config import RunConfig

Event = dict[str, Any]
Call = Callable[..., list[Any]]


class Checkpoints:
    """At most one save is under way; one that falls due meanwhile waits. A failed one is told, and the run goes on."""

    def __init__(self, config: RunConfig, run: Path, units: list[int], data: dict[str, Any], saved: int) -> None:
        self._config, self._run, self._units, self._data = config, run, units, data
        self._folder = run / CHECKPOINTS
        self._last_time = time.monotonic()
        self._saving: tuple[Progress, Path, list[Any]] | None = None
        self.saved_step = saved  # newest step that is on disk; 0: none
        self._begun = saved  # step of the last save that was begun
        self.blocked_s: list[float] = []  # how long the members' main threads stood still for each
        for left in self._folder.glob(".step-*"):  # of a run that was killed while it saved
            shutil.rmtree(left, ignore_errors=True)
        for later in folders(run):
            if later.name > folder_name(saved):  # damaged, or of an attempt that is given up by going on from before it
                later.rename(self._aside(later.name))

    def _aside(self, name: str) -> Path:
        """A name under which a checkpoint stays, but is no longer one of the run's."""
        number = 1
        while (path := self._folder / f"aside-{number}-{name}").exists():
            number += 1
        return path

    def due(self, step: int) -> bool:
        """Whether to save after ``step``."""
        every = self._config.checkpoint
        if self._saving is not None:
            return False
        by_time = every.every_minutes and time.monotonic() - self._last_time >= every.every_minutes * 60
        by_steps = every.every_steps and step // every.every_steps > self._begun // every.every_steps
        return bool(by_time or by_steps)

    def begin(self, progress: Progress, call: Call) -> list[Event]:
        """Have all members copy their committed state; they write while training goes on. ``call`` waits for a call at
        all of them.
        """
        assert self._saving is None
        self._begun = progress.step
        start = time.perf_counter()
        partial = self._folder / f".{folder_name(progress.step)}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            self._last_time = time.monotonic()
            return [self._failed(progress, str(error))]
        self._saving = progress, partial, call("snapshot", partial)
        self.blocked_s.append(time.perf_counter() - start)
        return []

    def poll(self, *, wait: bool = False) -> list[Event]:
        """Publish the save under way if all members are done with it; ``wait`` for them."""
        if self._saving is None:
            return []
        progress, partial, files = self._saving
        if ray.wait(files, num_returns=len(files), timeout=None if wait else 0)[1]:
            return []
        self._saving = None
        self._last_time = time.monotonic()
        try:
            manifest = Manifest(
                version=VERSION,
                progress=progress,
                config=self._config.to_dict(),
                units=self._units,
                data=self._data,
                files=entries(ray.get(files)),
            )
            final = self._folder / folder_name(progress.step)
            if final.exists():  # of an earlier try at the same step, and damaged
                _remove(final)
            publish(partial, final, manifest)
        except (OSError, RayTaskError, RayActorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            cause = error.cause if isinstance(error, RayTaskError) else error
            return [self._failed(progress, " ".join(str(cause).split()))]
        self.saved_step = progress.step
        if keep := self._config.checkpoint.keep:
            for old in list(folders(self._run))[keep:]:
                if old != final:
                    _remove(old)
        return [{"kind": "checkpoint", "step": progress.step, "path": str(final)}]

    def _failed(self, progress: Progress, cause: str) -> Event:
        text = f"checkpoint of step {progress.step} failed: {cause}; the run goes on without it"
        return {"kind": "log", "text": text}


def _remove(checkpoint: Path) -> None:
    """Out of sight first: a folder that is half removed must not look like a checkpoint."""
    hidden = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old"))
    shutil.rmtree(hidden, ignore_errors=True)
