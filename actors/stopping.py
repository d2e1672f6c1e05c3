"""Requests to stop: SIGINT, SIGTERM and SIGHUP of the job process."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# What follows a request this soon belongs to it: GNU `timeout` signals its child, and then the child's whole group.
REPEAT_S = 2.0


class StopSignals:
    """Inside ``with``, in the main thread, these signals are requests to stop, and interrupt nothing by themselves: an
    exception out of nowhere takes the process down while torch is imported.
    """

    def __init__(self) -> None:
        self._ask: Callable[[], None] | None = None
        self._requests = 0
        self._last = -math.inf
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.getsignal(number)
                if number != signal.SIGHUP or handler != signal.SIG_IGN:  # as under nohup
                    self._before[number] = handler
            self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """Take the signals; again after ray.init, whose C++ takes SIGTERM, and on one sets an alarm that kills."""
        for number in self._before:
            signal.signal(number, self._heard)
        if self._before:
            signal.alarm(0)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a request."""
        if self._requests:
            raise KeyboardInterrupt

    def hand_to(self, ask: Callable[[], None] | None) -> None:
        """From here on the first request calls ``ask``, at once if it was before, and the next one interrupts. None:
        requests wait for who comes next.
        """
        self._ask = ask
        if self._requests and ask is not None:
            ask()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last < REPEAT_S:
            return
        self._last = now
        self._requests += 1
        if self._ask is None:
            return
        if self._requests > 1:
            raise KeyboardInterrupt
        self._ask()


def interrupt() -> None:
    """What to do on a request if there is nothing to save."""
    raise KeyboardInterrupt
