"""The record of a run: ``metrics.jsonl``, one line a step or evaluation, and ``summary.json``."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.checkpoints import Checkpoints
from actors.events import EVENTS, append_event
from zeropp_ray.checkpoint.manifest import CHECKPOINTS, Progress, folder_name

Event = dict[str, Any]


class Record:
    """Written while a run goes on. A resumed run keeps the lines up to its checkpoint and takes the later ones anew."""

    def __init__(self, folder: Path, progress: Progress, job: str = "") -> None:
        """``job``: the job process, whose time the run takes, over several drivers if it must be."""
        self._folder, self._job = folder, job
        append_event(folder, {"kind": "begin", "job": job, "step": progress.step, "time": time.time()})
        metrics, kept = folder / "metrics.jsonl", folder / ".metrics.jsonl"
        lines = _lines_up_to(metrics, progress.step)
        kept.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        kept.replace(metrics)  # at once, so that the history is never lost
        (folder / "summary.json").unlink(missing_ok=True)  # of a shorter run
        self._metrics, self._unwritten = metrics.open("ab", buffering=0), b""
        self._losses: dict[int, float | None] = {line["step"]: line["loss"] for line in lines if "loss" in line}
        self._took = {line["step"]: line.get("seconds", 0.0) for line in lines if "loss" in line}
        self._tokens = self._tokens_before = progress.tokens
        self._committed = progress.commits
        self._skipped, self._reason = progress.step - progress.commits, ""
        self._seconds: list[float] = []
        self._own: list[tuple[float, float]] = []  # the driver's process time and its blocked time, of each step
        self.step = progress.step  # the newest that was recorded
        self._validation = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
        self._memory: dict[str, Any] | None = None

    def begin_step(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def committed(self, decision: Any, lr: float, busiest_s: float, steps: int) -> Iterator[Event]:
        """Record a step; the events for whoever watches. ``busiest_s``: the longest that a member worked on it.

        A step that is taken again after a fault is not recorded again: it must come to the same.
        """
        seconds, process_s = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        loss = _finite(decision.loss)
        if decision.step <= self.step:
            before = self._losses.get(decision.step)
            if loss != before:
                text = f"step {decision.step} came to another loss when it was taken again: {loss}, {before} before"
                yield {"kind": "log", "text": text}
            return
        self.step = decision.step
        self._seconds.append(seconds)
        self._own.append((process_s, seconds - busiest_s))
        self._losses[decision.step], self._took[decision.step] = loss, seconds
        self._tokens += decision.tokens
        self._committed += decision.commit
        self._skipped += not decision.commit
        line = {
            "step": decision.step,
            "loss": loss,
            "tokens": self._tokens,
            "tokens_per_s": decision.tokens / seconds,
            "grad_norm": _finite(decision.grad_norm),
            "lr": lr,
            "skipped": not decision.commit,
            "seconds": seconds,
        }
        if decision.reason:
            line["reason"] = self._reason = decision.reason
        self._write(line)
        yield {"kind": "step", "steps": steps, "driver_process_s": process_s, **line}

    def has_evaluation(self, step: int) -> bool:
        """Whether the evaluation after ``step`` is recorded."""
        return step in self._validation

    def evaluated(self, step: int, validation_loss: float) -> Event:
        line = {"step": step, "validation_loss": _finite(validation_loss)}
        self._validation[step] = line["validation_loss"]
        self._write(line)
        return {"kind": "eval", **line}

    def measured(self, step: int, members: list[dict[str, Any]]) -> Event:
        """Keep what was measured of the members' memory in ``step``; the event tells of the fullest."""
        self._memory = {"step": step, "members": members}
        return {"kind": "memory", "step": step, **max(members, key=lambda member: sum(member["measured"].values()))}

    def _write(self, line: dict[str, Any]) -> None:
        """What a full disk does not take waits for the next line: a run does not end for it."""
        self._unwritten += json.dumps(line).encode() + b"\n"
        with suppress(OSError):
            self._unwritten = self._unwritten[self._metrics.write(self._unwritten) :]

    def finish(self, reports: list[Any], checkpoints: Checkpoints, error: str) -> dict[str, Any]:
        """Write and return the summary. Counts are totals over all members; the driver's times are medians per step.

        ``error``: what went wrong with a run that has all its steps, in words; empty if nothing did.
        """
        from zeropp_ray.comm.base import Counters

        if not self._committed:
            error = error or (
                f"nothing was learned: all {self._skipped} steps were skipped, the last because {self._reason}; check "
                "the model's starting weights, its forward and the text"
            )
        total = Counters()
        for report in reports:
            total.add(report.counters)
        counts = total.as_dict()
        settled = self._own[1:] or self._own  # the first step warms up
        summary = {
            "version": 3,
            "outcome": "failed" if error else "done",
            "error": error or None,
            "steps": len(self._losses),
            "tokens": self._tokens,
            "skipped_steps": self._skipped,
            "first_loss": self._losses[min(self._losses)],
            "last_loss": self._losses[max(self._losses)],
            "validation_loss": self._validation.get(max(self._losses)),
            "tokens_per_s": (self._tokens - self._tokens_before) / sum(self._seconds) if self._seconds else 0.0,
            "seconds": sum(self._seconds),
            "step_s": _median(self._seconds[1:] or self._seconds) if self._seconds else None,  # the first warms up
            "gathers": total.gathers,
            "reduces": total.reduces,
            "bytes": sum(
                value for name, value in counts.items() if name.endswith("bytes") and name != "received_bytes"
            ),
            "traffic": counts,
            "peak_live_chunks": [report.measured.peak_live_chunks for report in reports],
            "peak_chunk_inputs": [report.measured.peak_chunk_inputs for report in reports],
            "peak_resident_elements": [report.measured.peak_resident_elements for report in reports],
            "peak_open_gradient_buffers": [report.peak_open_gradient_buffers for report in reports],
            "memory": self._memory,
            **self._faults(),
            "checkpoint": f"{CHECKPOINTS}/{folder_name(checkpoints.saved_step)}"
            if checkpoints.saved_step > 0
            else None,
            "checkpoint_blocked_s": _median(checkpoints.blocked_s) if checkpoints.blocked_s else None,
            "driver_process_s_per_step": _median([process for process, _ in settled]) if settled else None,
            "driver_blocked_s_per_step": _median([blocked for _, blocked in settled]) if settled else None,
        }
        self._metrics.close()
        path = self._folder / "summary.json"
        try:
            path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        except OSError as caught:
            path.unlink(missing_ok=True)
            summary |= {"outcome": "failed", "error": error or f"{path} could not be written: {caught.strerror}"}
        return summary

    def _faults(self) -> dict[str, Any]:
        """What the run recovered from, whichever driver did it, and how much of the job's time went into its steps."""
        events = list(_lines_of(self._folder / EVENTS))
        recoveries = [event for event in events if event["kind"] == "recovery"]
        begin = next((e for e in events if e["kind"] == "begin" and e["job"] == self._job), None)
        useful = sum(seconds for step, seconds in self._took.items() if begin is not None and step > begin["step"])
        return {
            "recoveries": dict(Counter(event["cause"] for event in recoveries)),
            "replayed_steps": sum(event["replayed"] for event in recoveries),
            "effective_share": useful / (time.time() - begin["time"]) if begin is not None else None,
        }


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                yield json.loads(text)


def _lines_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of an earlier part of the run that still hold: a resumed run takes the later ones again.

    A line that a crash left in pieces is dropped; a run does not end for it.
    """
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError, KeyError):
            line = json.loads(text)
            if line["step"] <= step:
                lines.append(line)
    return lines


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
