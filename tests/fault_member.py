"""A process that a fault hits, in a module of its own: it starts in a moment, without torch."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection

from zeropp_ray.config import load_config
from zeropp_ray.faults import Fault, Sockets, Trigger, read_faults
from zeropp_ray.schedule.actions import Action, Op

MESH = load_config(None, ["parallel.stages=3", "parallel.chunks=1", "parallel.replicas=2", "train.steps=20"])
PROGRAM = [Action(op, 0) for op in (Op.GATHER, Op.F, Op.SEND, Op.F, Op.WAIT, Op.B)]


def fault(text: str) -> Fault:
    (read,) = read_faults([text], MESH)
    return read


def steps(text: str, pipe: Connection) -> None:
    """Tell each instruction of a step, and all the while that another thread runs."""
    before = Trigger(fault(text), PROGRAM, Sockets()).watch(pipe.send)

    def beat() -> None:
        while True:
            pipe.send("beat")
            time.sleep(0.05)

    threading.Thread(target=beat, daemon=True).start()
    for position in range(len(PROGRAM) + 1):
        before(position)
    time.sleep(60)
