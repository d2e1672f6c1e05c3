"""Where a member is in its program and whether it lives, readable while it cannot answer and after it was killed.

A member's main thread writes (step, position, clock) into a small mapped file in the run's scratch folder before every
instruction, which costs well under a microsecond. A thread beside it adds a *beat* every so often: a member that is
stopped, or of which a thread holds the interpreter lock, does not. Whoever looks reads the file: polling the members
would cost the driver more than a step may.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from zeropp_ray.schedule import Action, Op

_PLACE = struct.Struct("<qqd")
_BEAT = struct.Struct("<dqq")
_BYTES = _PLACE.size + _BEAT.size
OPS = (Op.F, Op.RF, Op.B, Op.W)  # whose time is told
START, EVALUATION, BETWEEN = 0, -1, -2  # in place of a step: before the first, and in a call that runs none


class Position(NamedTuple):
    """What a member wrote last, with ages in seconds at the time of reading.

    ``step``: or :data:`START`, :data:`EVALUATION`, :data:`BETWEEN`. ``position``: of the instruction it is about to
    run or in, reached ``age_s`` ago. ``beat_age_s`` ago its other threads could run, and its main thread had begun and
    finished so many waits for transfers.
    """

    step: int
    position: int
    age_s: float
    beat_age_s: float
    waits: int
    waited: int

    @property
    def runs(self) -> bool:
        """Whether it is in a program, a step's or an evaluation's."""
        return self.step > 0 or self.step == EVALUATION

    @property
    def waiting(self) -> bool:
        """Whether it waits for a transfer, and so for somebody else."""
        return self.waits > self.waited


STARTING = Position(START, 0, 0.0, 0.0, 0, 0)


class ProgressFile:
    """The writing end, held by the member."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._clocks: list[float] = []  # when each instruction of the step at hand began
        self.begin(START)

    def begin(self, step: int) -> None:
        """A call for ``step`` begins, or one in place of which something else stands."""
        self.step = step
        self._clocks.clear()
        _PLACE.pack_into(self._map, 0, step, 0, time.monotonic())

    def __call__(self, position: int) -> None:
        now = time.monotonic()
        self._clocks.append(now)
        _PLACE.pack_into(self._map, 0, self.step, position, now)

    def seconds(self, program: Sequence[Action]) -> dict[str, float]:
        """How long the instructions of each of :data:`OPS` took in the step that ended, which ran ``program``."""
        seconds = dict.fromkeys(OPS, 0.0)
        for action, begin, end in zip(program, self._clocks, self._clocks[1:], strict=False):
            if action.op in seconds:
                seconds[action.op] += end - begin
        return {op.name: value for op, value in seconds.items()}

    def beat(self, waits: int, waited: int) -> None:
        _BEAT.pack_into(self._map, _PLACE.size, time.monotonic(), waits, waited)

    def beat_every(self, seconds: float, waits: Callable[[], tuple[int, int]]) -> None:
        """Beat from a thread of its own, for as long as the process lives."""

        def run() -> None:
            while True:
                self.beat(*waits())
                time.sleep(seconds)

        self.beat(0, 0)
        threading.Thread(target=run, name="heartbeat", daemon=True).start()


def read_progress(path: Path) -> Position | None:
    """What was written last, or None if there is no such file on this node."""
    try:
        data = path.read_bytes()
        step, position, clock = _PLACE.unpack_from(data)
        beat, waits, waited = _BEAT.unpack_from(data, _PLACE.size)
    except (OSError, struct.error):
        return None
    now = time.monotonic()
    return Position(step, position, now - clock, now - beat, waits, waited)
