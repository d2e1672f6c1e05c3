"""Where a run lives: what job process and driver must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zeropp_ray.evaluation import Request
from zeropp_ray.layout import Member


@dataclass(frozen=True)
class RunFolder:
    """What a driver needs to know of where it runs: the run's folder, scratch for progress files, and the directory it
    was started from.
    """

    path: Path
    scratch: Path
    start_directory: str
    resume: Path | None = None  # the checkpoint to go on from
    text: Request | None = None  # evaluate on this, and do not train
    job: str = ""  # the job process, see locks.py

    def progress_of(self, member: Member, pid: int) -> Path:
        """The file in which a member's process notes where it is; that of a lost one says nothing of its successor."""
        return self.scratch / "member-{}-{}-{}-{}".format(*member, pid)

    @property
    def stop(self) -> Path:
        """A file whose existence asks the driver to stop at the next commit; both run on one node."""
        return self.scratch / "stop"
