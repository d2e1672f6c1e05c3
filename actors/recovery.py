"""What to do about a fault: pure decisions. The driver carries them out (``actors/driver.py``).

Every cause has a budget of its own, an error that a member raises by itself is tried again once, and recoveries that
bring no new step end the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from zeropp_ray.config import RecoverySection
from zeropp_ray.errors import NoProgress, ZeroppError
from zeropp_ray.uri import Place

BUDGETS = {
    "death": "max_deaths",
    "node": "max_deaths",
    "stop": "max_hangs",
    "hang": "max_hangs",
    "slow": "max_hangs",
    "error": "max_errors",
    "disconnect": "max_disconnects",
    "driver": "max_drivers",
}
"""The setting that bounds how often each cause is recovered from; causes of one setting share it."""


@dataclass
class History:
    """What a run has been through."""

    faults: Counter[str] = field(default_factory=Counter)  # by setting of BUDGETS
    stuck: int = 0  # recoveries since the last new step
    last_error: str = ""  # the last error that a member raised by itself, with its place

    def advanced(self) -> None:
        """There is a new step."""
        self.stuck, self.last_error = 0, ""


def judge(cause: str, lost: int, place: str, text: str, history: History, limits: RecoverySection) -> None:
    """Note a fault; returns if the run shall recover from it.

    ``place``: where it was, such as a step and an instruction; ``lost``: how many members need a successor. Raises
    ZeroppError with ``text`` if the run shall end for it, NoProgress if recoveries bring nothing.
    """
    if not limits.enabled:
        raise ZeroppError(text)
    setting = BUDGETS[cause]
    history.faults[setting] += max(1, lost)
    history.stuck += 1
    if cause == "error":
        if history.last_error == f"{place}: {text}":
            raise ZeroppError(f"{text} (for the second time, in the same place)")
        history.last_error = f"{place}: {text}"
    if history.stuck > limits.max_stuck:
        raise NoProgress(
            f"no new step over {limits.max_stuck} recoveries in a row (recovery.max_stuck); the last fault: {text}"
        )
    if history.faults[setting] > getattr(limits, setting):
        allowed = f"recovery.{setting} = {getattr(limits, setting)} is used up"
        raise ZeroppError(text if not getattr(limits, setting) else f"{text}; {allowed}")


@dataclass(frozen=True)
class Source:
    """Where the state comes from: ``copies`` in the members' memory, ``checkpoint``, or ``start`` of the run."""

    kind: str
    step: int
    path: Place | None = None


def choose_source(steps: Sequence[int], checkpoint: tuple[int, Place] | None) -> Source:
    """The newest state there is. ``steps``: held in memory everywhere; ``checkpoint``: the newest good one."""
    newest = max(steps, default=-1)
    if checkpoint is not None and checkpoint[0] > newest:
        return Source("checkpoint", *checkpoint)
    return Source("copies", newest) if newest >= 0 else Source("start", 0)
