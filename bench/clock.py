"""Guesses how long a benchmark still takes, from what it took so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Of events of a few kinds, such as starts and runs: how many are to come, and how long those before took."""

    def __init__(self, **expected: int) -> None:
        self._left = expected
        self._took: dict[str, list[float]] = {kind: [] for kind in expected}

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Around one event."""
        start = time.monotonic()
        yield
        self._took[kind].append(time.monotonic() - start)
        self._left[kind] -= 1

    def left(self) -> str:
        """In words; of a kind that never came yet nothing is known, and it counts as nothing."""
        seconds = sum(self._left[kind] * sum(took) / len(took) for kind, took in self._took.items() if took)
        return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
