"""Where a run lives: what job process and driver must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """What a driver needs to know of where it runs:

    the run's folder, scratch for progress files, and the directory it was started from.
    """

    path: Path
    scratch: Path
    start_directory: str
    resume: Path | None = None  # the checkpoint to go on from

    @property
    def stop(self) -> Path:
        """A file whose existence asks the driver to stop at the next commit; both run on one node."""
        return self.scratch / "stop"
