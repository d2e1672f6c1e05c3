"""The tensor memory of one member over a step, at its fullest: its program is replayed with the sizes of what each
instruction makes and frees, so that kinds which are never large at the same time do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeropp_ray.metrics import kinds
from zeropp_ray.schedule.actions import Action, Op


class TaskBytes(NamedTuple):
    """Bytes that the tasks of a chunk take, save, leave for ``W``, and make and drop, for a micro-batch."""

    input: float
    saved: float
    stashed: float
    forward: float
    backward: float


@dataclass(frozen=True)
class StageBytes:
    """Bytes at one member of a stage; sequences are by chunk of the stage."""

    between_steps: Mapping[str, float]  # by kind, there from the first step on
    tasks: Sequence[TaskBytes]
    recomputed: Sequence[bool]
    message: float  # an activation or gradient between stages
    before: Sequence[bool]  # whether an activation comes from a chunk before
    behind: Sequence[bool]  # whether one goes to a chunk behind
    resident: Callable[[Collection[int]], float]  # parameters of these chunks, whole
    incoming: Sequence[float]  # what comes from other shards in a reduce
    exchanged: float  # what comes from other stages and replicas at the end


def peak(program: Iterable[Action], stage: StageBytes) -> dict[str, float]:
    """Bytes by kind at the moment when their sum is largest. Of a program without transfers messages are not counted
    while they are on their way.
    """
    tasks, recomputed, message = stage.tasks, stage.recomputed, stage.message
    resident = set[int]()
    incoming = 0.0  # of the reduce in flight
    now = {**stage.between_steps}
    fullest = dict(now)

    def moment(rest: float = 0) -> None:
        nonlocal fullest
        if sum(now.values()) + rest > sum(fullest.values()):
            fullest = {**now, kinds.REST: rest}

    for op, v, _, _ in program:
        if op is Op.F:
            now[kinds.MESSAGES] += message * (stage.behind[v] - stage.before[v])
            if recomputed[v]:
                now[kinds.CHUNK_INPUTS] += tasks[v].input
                moment(tasks[v].backward)  # a forward that saves nothing makes and drops about as much
            else:
                now[kinds.ACTIVATIONS] += tasks[v].saved
                moment(tasks[v].forward)
        elif op is Op.RF:
            now[kinds.CHUNK_INPUTS] -= tasks[v].input
            now[kinds.ACTIVATIONS] += tasks[v].saved
            moment(tasks[v].forward)
        elif op is Op.B:
            moment(tasks[v].backward)
            now[kinds.ACTIVATIONS] -= tasks[v].saved
            now[kinds.WEIGHT_INPUTS] += tasks[v].stashed
            now[kinds.MESSAGES] += message * (stage.before[v] - stage.behind[v])
            moment()
        elif op is Op.W:
            now[kinds.WEIGHT_INPUTS] -= tasks[v].stashed
        elif op in (Op.RECV, Op.DRAIN):
            now[kinds.MESSAGES] += message if op is Op.RECV else -message
        elif op in (Op.GATHER, Op.RELEASE):
            resident ^= {v}
            now[kinds.RESIDENT] = stage.resident(resident)
        elif op is Op.REDUCE:
            now[kinds.GRADIENT_BUFFERS] += stage.incoming[v] - incoming
            incoming = stage.incoming[v]
            moment()
    now[kinds.GRADIENT_BUFFERS] -= incoming
    now[kinds.GRADIENT_SHARDS] += stage.exchanged
    moment()
    return fullest
