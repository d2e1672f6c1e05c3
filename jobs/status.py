"""``zeropp status``: where a run is, from its folder alone: while it runs, when it has ended, after it was killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from actors import lease
from actors.events import EVENTS
from actors.locks import JOB, holder
from actors.mirror import fetch
from actors.processes import alive, started_at
from jobs.report import aligned, duration, short
from zeropp_ray.checkpoint.manifest import NAME as MANIFEST
from zeropp_ray.checkpoint.manifest import folders
from zeropp_ray.errors import ConfigError
from zeropp_ray.uri import Place, UriPath, place

TAIL_BYTES = 2**16  # of metrics.jsonl: some hundred steps
RECENT = 10  # steps of which the median speed is told


@click.command(short_help="Where a run is, from its folder.")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="For a program.")
def status(run: str, as_json: bool) -> None:
    """Where RUN, its folder, URI or name under runs/, is: state, step, loss, speed, recoveries, checkpoint and members.

    Only its files are read, so it can be asked at any time and from any machine that sees them.
    """
    where = place(run)
    found = read_status(run_folder(where)) if isinstance(where, Path) else _read_at(where)
    click.echo(json.dumps(found) if as_json else _table(found))


def run_folder(where: Path) -> Path:
    """The folder of a run, whatever became of it, from its path or its name under ``runs/``."""
    for path in (where, Path("runs") / where):
        if (path / JOB).is_file():
            return path
    raise ConfigError(f"{where}: neither the folder of a run nor the name of a run under runs/")


def _read_at(uri: UriPath) -> dict[str, Any]:
    """As :func:`read_status`, of a run in an object store, whose files are some seconds old."""
    with tempfile.TemporaryDirectory(prefix="zeropp-") as temporary:
        copy = Path(temporary)
        fetch(uri, copy)
        (copy / JOB).write_text(lease.holder(uri), encoding="utf-8")
        if not (copy / "config.toml").exists():
            raise ConfigError(f"{uri}: no run is there")
        return read_status(copy, uri)


def read_status(run: Path, named: Place | None = None) -> dict[str, Any]:
    """What the files in a run's folder tell, by name; None where they tell nothing. ``named``: if they are a copy."""
    named = named or run
    lines, events = _json_lines(run / "metrics.jsonl", TAIL_BYTES), _json_lines(run / EVENTS)
    steps = [line for line in lines if "loss" in line]
    last, members = (steps or [{}])[-1], _json(run / "members.json") or []
    recoveries = [event for event in events if event["kind"] == "recovery"]
    newest = next(folders(named), None)
    goal = _json(run / "summary.json") or {}
    return {
        "run": str(named),
        **_state(run, events),
        "step": last.get("step", 0),
        "steps": _goal(run) or goal.get("steps"),
        "age_s": _age_s(run / "metrics.jsonl") if steps else None,
        "loss": last.get("loss"),
        "validation_loss": next((v["validation_loss"] for v in reversed(lines) if "validation_loss" in v), None),
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in steps[-RECENT:]) if steps else None,
        "step_s": statistics.median(line["seconds"] for line in steps[-RECENT:]) if steps else None,
        "recoveries": dict(Counter(event["cause"] for event in recoveries)),
        "replayed_steps": sum(event["replayed"] for event in recoveries),
        "checkpoint": newest.name if newest else None,
        "checkpoint_age_s": _age_s(newest) if newest else None,
        "members": members,
    }


def _state(run: Path, events: list[dict[str, Any]]) -> dict[str, Any]:
    """``state``: starting, running, done, failed, stopped, interrupted or killed; and ``why``, in words."""
    end = events[-1] if events and events[-1]["kind"] == "end" else None
    trainer = holder(run)
    here = process_of(trainer)
    if end is not None and not here:
        return {"state": end["outcome"], "why": end["error"]}
    if here == 0:
        return {"state": "killed", "why": f"{trainer} is gone, and did not say how it ended"}
    # A resumed run's last event is the end of its last part until it begins.
    state = "running" if events and end is None else "starting"
    return {"state": state, "why": trainer if here else f"by its record: {trainer}"}


def process_of(trainer: str) -> int | None:
    """The process of a run's ``holder`` if it lives on this machine; 0 if it is gone, None if it is on another one."""
    found = re.fullmatch(r"process (\d+) on (\S+) since (.+)", trainer)
    if found is None:
        return 0
    pid, host, since = int(found[1]), found[2], found[3]
    if host != socket.gethostname():
        return None
    ticks = started_at(pid)
    if not alive(pid, ticks):
        return 0
    if not ticks:  # the system does not tell
        return pid
    boot = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    began = boot + ticks / os.sysconf("SC_CLK_TCK")
    return pid if began <= datetime.fromisoformat(since).timestamp() + 1 else 0  # else another one took its number


def _goal(run: Path) -> int | None:
    """How many steps the run is to take."""
    from zeropp_ray.config import load_config

    with suppress(ConfigError):
        return load_config(run / "config.toml").train.steps
    return None


def _json(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def _json_lines(path: Path, tail: int | None = None) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, or of its last ``tail`` bytes; pieces of lines are left out."""
    lines = []
    with suppress(OSError), path.open("rb") as file:
        if tail is not None:
            file.seek(max(0, path.stat().st_size - tail))
        for line in file.read().splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


def _age_s(path: Place) -> float:
    written = path.stat().st_mtime if isinstance(path, Path) else (path / MANIFEST).modified()
    return max(0.0, time.time() - written)


def _table(found: Mapping[str, Any]) -> str:
    return aligned(*((name, text) for name, text in _rows(found) if text))


def _rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    state, step, steps = found["state"], found["step"], found["steps"]
    left = ""
    if state == "running" and steps and found["step_s"]:
        left = f", {duration((steps - step) * found['step_s'])} left"
    loss = "" if found["loss"] is None else f"{found['loss']:.3f} nats per token"
    if found["validation_loss"] is not None:
        loss += f"; validation {found['validation_loss']:.3f}"
    again = f"; {found['replayed_steps']} steps taken again" if found["replayed_steps"] else ""
    recoveries = ", ".join(f"{count} {cause}" for cause, count in found["recoveries"].items())
    checkpoint = f"{found['checkpoint']}, {duration(found['checkpoint_age_s'])} ago" if found["checkpoint"] else "none"
    resumable = found["checkpoint"] and state in ("failed", "stopped", "interrupted", "killed")
    return [
        ("run", found["run"]),
        ("state", state + (f": {found['why']}" if found["why"] else "")),
        ("step", f"{step} of {steps or '?'}" + (f", {duration(found['age_s'])} ago" if found["age_s"] else "") + left),
        ("loss", loss),
        ("speed", f"{short(found['tokens_per_s'])} tok/s" if found["tokens_per_s"] else ""),
        ("recoveries", (recoveries or "none") + again),
        ("checkpoint", checkpoint),
        *(
            ("members" if i == 0 else "", f"{_member(member)}: process {member['pid']} on {member['host']}")
            for i, member in enumerate(found["members"] if state in ("starting", "running") else [])
        ),
        ("next", f"zeropp train --resume {shlex.quote(found['run'])}" if resumable else ""),
    ]


def _member(member: Mapping[str, Any]) -> str:
    return f"stage {member['stage']} shard {member['shard']} replica {member['replica']}"
