"""Where a run lives: what job process and driver must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors import lease
from zeropp_ray.checkpoint.shelf import Shelf, UriShelf
from zeropp_ray.layout import Member
from zeropp_ray.uri import Place, UriPath

if TYPE_CHECKING:
    from zeropp_ray.evaluation import Request  # with torch, which commands that only read need not load

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """What a driver needs to know of where it runs: the run's folder, scratch for progress files, and the directory it
    was started from.
    """

    path: Path
    scratch: Path
    start_directory: str
    resume: Place | None = None  # the checkpoint to go on from
    text: Request | None = None  # evaluate on this, and do not train
    job: str = ""  # the job process, see locks.py
    uri: UriPath | None = None  # of a run in an object store, whose folder here is a working copy
    lease: str = ""  # under which it is written

    @property
    def run(self) -> Place:
        """What a person names, and where the checkpoints are."""
        return self.path if self.uri is None else self.uri

    def shelf(self) -> Shelf:
        """The run's checkpoints, for its driver."""
        if self.uri is None:
            return Shelf(self.path)
        uri, token = self.uri, self.lease
        return UriShelf(uri, self.path / METRICS, lambda: lease.check(uri, token), self.path / lease.LOST)

    def progress_of(self, member: Member, pid: int) -> Path:
        """The file in which a member's process notes where it is; that of a lost one says nothing of its successor."""
        return self.scratch / "member-{}-{}-{}-{}".format(*member, pid)

    @property
    def stop(self) -> Path:
        """A file whose existence asks the driver to stop at the next commit; both run on one node."""
        return self.scratch / "stop"
