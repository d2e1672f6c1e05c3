"""What happened to a run besides its steps: ``events.jsonl``, one JSON object a line.

::

    {"kind": "recovery", "cause": "driver", "at": "step 12", "step": 12, "action": "restart", "from_step": 10, …}
    {"kind": "end", "outcome": "stopped", "exit_code": 75, "error": "stopped after step 40, which is saved; …", …}

Driver and job process both add lines. The last one says how the run ended, also to who does not get the exit code of
the job process, such as whoever asks ``ray job status``; without it the run goes on, or everything was killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"


def append_event(run: Path, event: Mapping[str, Any]) -> None:
    """Add a line in one write, so that two writers do not mix. What a full disk does not take is lost: no run ends for
    it.
    """
    with suppress(OSError), (run / EVENTS).open("ab", buffering=0) as file:
        file.write(json.dumps(event).encode() + b"\n")


def append_end(run: Path, outcome: str, exit_code: int, error: str = "") -> None:
    """How the run ended: ``outcome`` done, failed, stopped (with a checkpoint) or interrupted (at once)."""
    event = {"kind": "end", "outcome": outcome, "exit_code": exit_code, "error": error or None, "time": time.time()}
    append_event(run, event)
