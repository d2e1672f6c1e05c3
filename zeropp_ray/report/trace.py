"""The timeline in Chrome's trace format, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zeropp_ray.report.timeline import Held, Lane, lanes
from zeropp_ray.schedule.actions import Action, Op
from zeropp_ray.schedule.held import Curve
from zeropp_ray.schedule.program import Program
from zeropp_ray.schedule.render import summary, title

UNIT_OF_TIME = 1000.0  # microseconds that stand for one unit of time of the costs
_TASKS, _RESIDENT = 1, 2  # threads of a rank; then one for each chunk that is resident at once, and each open buffer


def to_trace(program: Program) -> dict[str, Any]:
    """A process for each rank; in it a thread of tasks, one for each row of resident chunks and of open gradient
    buffers, one of gathers and reduces, which are instants there where they take no time, and counters of what is held.

    One unit of time of the costs is shown as a millisecond.
    """
    timeline, ranks = lanes(program)
    events = [event | {"pid": p} for p, lane in enumerate(ranks) for event in _rank(program, p, lane)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": title(program.spec), "summary": summary(program.spec, timeline)},
    }


def _rank(program: Program, p: int, lane: Lane) -> Iterator[dict[str, Any]]:
    spec = program.spec
    buffers = _RESIDENT + _rows(lane.resident)
    exchanges = buffers + _rows(lane.buffers)
    yield _name("process_name", 0, f"rank {p}")
    yield {"ph": "M", "name": "process_sort_index", "tid": 0, "args": {"sort_index": p}}
    yield _name("thread_name", _TASKS, "tasks")
    for tid in range(_RESIDENT, buffers):
        yield _name("thread_name", tid, "parameters resident")
    for tid in range(buffers, exchanges):
        yield _name("thread_name", tid, "gradient buffer open")
    if lane.timed_exchanges:
        yield _name("thread_name", exchanges, "gathers and reduces")
    for other in lane.others:
        yield _slice(other.name, _TASKS, other.start, other.end) | {"cat": "other"}
    for task in lane.tasks:
        yield {
            **_slice(str(Action(task.op, task.chunk, task.microbatch)), _TASKS, task.start, task.end),
            "cat": task.op.value,
            "args": {
                "chunk": task.chunk,
                "model_chunk": spec.model_chunk(p, task.chunk),
                "microbatch": task.microbatch,
                "unit": task.unit,
            },
        }
    for first, spans in ((_RESIDENT, lane.resident), (buffers, lane.buffers)):
        for span in spans:
            yield _slice(f"chunk {span.chunk}", first + span.row, span.start, span.end) | {"cat": "memory"}
    for each in lane.collectives:
        tid = exchanges if lane.timed_exchanges else each.row + (_RESIDENT if each.op is Op.GATHER else buffers)
        name = str(Action(each.op, each.chunk))
        when = {"ph": "i", "s": "t", "name": name, "tid": tid, "ts": each.start * UNIT_OF_TIME}
        yield (_slice(name, tid, each.start, each.end) if each.end > each.start else when) | {"cat": "collective"}
    yield from _counter("live activations (micro-batches)", lane.live)
    yield from _counter("of these, from B to W (micro-batches)", lane.waiting)
    if any(spec.recomputed):
        yield from _counter("chunk inputs kept (micro-batches)", lane.inputs)
    yield from _counter("chunks resident", lane.resident_chunks)
    yield from _counter("gradient buffers open", lane.open_buffers)
    for kind, curve in lane.held.items():
        yield from _counter(f"{kind} (bytes)", curve)


def _rows(held: list[Held]) -> int:
    return max((span.row + 1 for span in held), default=0)


def _name(kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "tid": tid, "args": {"name": name}}


def _slice(name: str, tid: int, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "tid": tid, "ts": start * UNIT_OF_TIME, "dur": (end - start) * UNIT_OF_TIME}


def _counter(name: str, curve: Curve) -> Iterator[dict[str, Any]]:
    for time, value in curve:
        yield {"ph": "C", "name": name, "tid": 0, "ts": time * UNIT_OF_TIME, "args": {"held": value}}
