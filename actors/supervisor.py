"""The job process as supervisor: when the driver of a run dies, it makes room for another, which goes on from disk.

Ray ends the members of a dead driver within a tenth of a second, so that no state in memory is left. The placement
groups it does not end before the job.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray

from actors.events import append_event
from actors.folder import RunFolder
from actors.locks import last_driver, without_driver
from actors.nodes import Nodes
from actors.progress import read_progress
from actors.recovery import History, choose_source, judge
from actors.room import remove_groups
from zeropp_ray.checkpoint.reader import latest
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError, Stopped, ZeroppError

Event = dict[str, Any]

EVIDENCE = "its process was killed or crashed"
CLUSTER_S = 5.0  # how long the head of the cluster may take to answer


class DriverDied(ZeroppError):
    """The process of the driver is gone, and with it the members."""


class Supervisor:
    """How far a run got, how often its driver died, and where the next one is to go on: :attr:`folder`."""

    def __init__(self, config: RunConfig, folder: RunFolder, begun: int, tell: Callable[[Event], None]) -> None:
        """``begun``: the step that the run goes on from."""
        self.folder = folder
        self._config, self._tell = config, tell
        self._history = History()
        self._from = begun  # where the driver at hand began
        self._step = begun  # the newest that was ever committed
        self.ran = False  # whether a driver came to its steps, and so set aside what is not gone on from
        self._running = False  # whether the one at hand did
        self._recovery: Event | None = None  # to be told once the new driver is there
        self._noticed = 0.0

    def started(self) -> None:
        """The driver at hand begins with its steps."""
        self.ran = self._running = True
        if self._recovery is not None:
            event = {**self._recovery, "resumed_s": time.monotonic() - self._noticed, "time": time.time()}
            append_event(self.folder.path, event)
            self._tell(event)
            self._recovery = None

    def died(self, evidence: str) -> None:
        """Clear away what a dead driver left, and choose where the next one goes on. ``evidence``: in words.

        Raises what ends the run: ZeroppError if none came to its steps yet or this death was one too many, NoProgress
        if several brought no new step, Stopped if the run was asked to stop.
        """
        noticed, alive_s = time.monotonic(), self._last_sign_of_life_s()
        place = self._note_progress()
        text = f"the driver of the run died in {place}: {evidence}"
        if not self.ran:
            raise ZeroppError(text)
        if not _cluster_answers():
            raise ZeroppError(f"{text}; and the Ray cluster that it ran on does not answer any more")
        self._clear()
        checkpoint = self._newest()
        if self.folder.stop.exists():
            raise self.stopped(text)
        judge("driver", 1, place, text, self._history, self._config.recovery)
        source = choose_source((), checkpoint)
        self.folder, self._from = replace(self.folder, resume=source.path), source.step
        where = f"the checkpoint of step {source.step}" if source.path else "the start: there is no good checkpoint"
        self._tell({"kind": "log", "text": f"{text}; another one goes on from {where}"})
        back = {"source": source.kind, "from_step": source.step, "replayed": self._step - source.step}
        if self._recovery is not None:  # it died on the way back: that is one recovery
            self._recovery |= back
            return
        self._noticed = noticed
        self._recovery = {
            "kind": "recovery",
            "cause": "driver",
            "member": last_driver(self.folder.path),
            "at": place,
            "evidence": evidence,
            "step": self._step + 1,
            "action": "restart",
            **back,
            "noticed_s": alive_s,
        }

    def _note_progress(self) -> str:
        """Take over how far the dead driver got; the place in which it died, in words."""
        if not self._running:
            return "its start"
        self._running, reached = False, self._from
        with suppress(OSError, ValueError, KeyError, IndexError):  # a line of which a full disk took a part
            metrics = (self.folder.path / "metrics.jsonl").read_text(encoding="utf-8")
            reached = json.loads(metrics.splitlines()[-1])["step"]
        if reached > self._step:
            self._history.advanced()
            self._step = reached
        return f"step {reached + 1}"

    def _last_sign_of_life_s(self) -> float:
        """How long ago a member of this node was last seen to live: the driver's death is no longer ago."""
        seen = [at for path in self.folder.scratch.glob("member-*") if (at := read_progress(path)) is not None]
        return min((min(at.age_s, at.beat_age_s) for at in seen), default=0.0)

    def _clear(self) -> None:
        """Have nothing of the dead driver left that holds a place in the cluster or writes into the run's folder."""
        remove_groups(self._config)
        nodes, alive = Nodes(), {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        members = defaultdict(list)
        with suppress(OSError, ValueError):  # it died before it wrote them
            for member in json.loads((self.folder.path / "members.json").read_text(encoding="utf-8")):
                if member.get("started"):  # or another process may have its number by now
                    members[member["node_id"]].append((member["pid"], member["started"]))
        for node in members.keys() & alive:
            nodes.kill(node, members[node])
        nodes.end()
        if not without_driver(self.folder.path):
            raise ZeroppError(f"{last_driver(self.folder.path)} of the run is lost, but still holds {self.folder.path}")

    def _newest(self) -> Any:
        """Step and path of the newest good checkpoint, or None."""
        try:
            checkpoint = latest(self.folder.run, lambda text: self._tell({"kind": "log", "text": f"warning: {text}"}))
        except ConfigError:
            return None
        return checkpoint.step, checkpoint.path.resolve()

    def stopped(self, text: str) -> ZeroppError:
        """The end of a run that was asked to stop while it could take no step, for the reason in ``text``."""
        if (checkpoint := self._newest()) is None:
            return ZeroppError(f"stopped; {text}, before there was a checkpoint")
        again = f"go on with: zeropp train --resume {shlex.quote(str(self.folder.run))}"
        return Stopped(f"stopped; {text}; the newest checkpoint is of step {checkpoint[0]}, {again}")


def _cluster_answers() -> bool:
    """Whether the head of the cluster lives. Ray's other questions wait for a minute, and then end the process."""
    worker: Any = ray._private.worker.global_worker
    try:
        worker.gcs_client.internal_kv_get(b"zeropp", None, timeout=CLUSTER_S)
    except ray.exceptions.RayError:
        return False
    return True
