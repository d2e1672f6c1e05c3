"""What was found, as JSON for programs and as Markdown for people."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.rounds import Found, Outcome, Row, Setting, Spread

VERSION = 1
WHAT = {
    "speed": "times as fast",
    "memory": "memory of the peer / ours",
    "gradients": "memory saved / gradients of all chunks but one",
}
MB = 1e6


def machine() -> dict[str, Any]:
    """Where it ran."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def as_dict(outcomes: Sequence[Outcome], setting: Setting) -> dict[str, Any]:
    """All results. Bytes are of one step: the peak of the fullest process, and what one process gathered."""
    return {
        "version": VERSION,
        "machine": machine(),
        "setting": {
            "model": dict(setting.shared["model"]),
            "train": dict(setting.shared["train"]),
            "rounds": setting.rounds,
            "steps_of_a_round": setting.steps,
            "device": setting.device,
            "load_before": setting.load,
        },
        "limits": {outcome.suite.name: outcome.suite.limit for outcome in outcomes},
        "rows": [_row(outcome, row) for outcome in outcomes for row in outcome.rows.values()],
        "failed": [
            {"suite": outcome.suite.name, "name": name, "reason": reason}
            for outcome in outcomes
            for name, reason in outcome.failed.items()
        ],
        "aims": [_aim(outcome, found) for outcome in outcomes for found in outcome.aims()],
    }


def _row(outcome: Outcome, row: Row) -> dict[str, Any]:
    ratio = outcome.ratio_to_limit(row)
    first = row.watched[0]
    return {
        "suite": outcome.suite.name,
        "name": row.variant.name,
        "processes": row.processes,
        "parallel": dict(row.variant.parallel),
        "tokens_per_s": row.tokens_per_s,
        "tokens_per_s_median": row.speed.middle,
        "ratio_to_limit": ratio.middle if ratio else None,
        "ratio_to_limit_quartiles": [ratio.low, ratio.high] if ratio else None,
        "peak_tensor_bytes": row.peak_tensor_bytes,
        "peak_tensor_bytes_by_process": [found.peak_tensor_bytes for found in row.watched],
        "cpu_s_per_step": Spread.of(row.cpu_seconds).middle,
        "gathers": first.gathers,
        "gathered_bytes": first.gathered_bytes,
        "loss": row.loss,
        "loss_agrees": row.agrees if row.variant.checked else None,
    }


def _aim(outcome: Outcome, found: Found) -> dict[str, Any]:
    return {
        "suite": outcome.suite.name,
        "ours": found.aim.ours,
        "what": found.aim.what,
        "peer": found.peer,
        "of": list(found.aim.peers),
        "aim": found.aim.least,
        "found": found.ratio.middle,
        "quartiles": [found.ratio.low, found.ratio.high],
        "met": found.met,
    }


def markdown(outcomes: Sequence[Outcome], setting: Setting) -> str:
    """One table per suite, and the aims."""
    where, model = machine(), setting.shared["model"]
    text = [
        f"{where['cores']} cores of {where['processor']} ({where['simd']}), torch {where['torch']}, {setting.device}. "
        f"{model['layers']} layers, dim {model['dim']}, sequences of {model['seq_len']} bytes, 16 of them a step. "
        f"{setting.rounds} interleaved rounds of {setting.steps} steps; medians, and quartiles in brackets. CPU is the "
        "processor time of a step, of all processes; memory is the peak of tensors at the fullest process; gathers are "
        "those of one process in a step.",
    ]
    for outcome in outcomes:
        text += ["", f"### {outcome.suite.title}", ""]
        text += _table(
            ["", "processes", "tokens/s", f"/ {outcome.suite.limit}", "CPU s", "memory MB", "gathers", "gathered MB"],
            [_cells(outcome, row) for row in outcome.rows.values()],
        )
        text += [f"\nDid not run: {name}: {reason.splitlines()[-1]}" for name, reason in outcome.failed.items()]
    aims = [found for outcome in outcomes for found in outcome.aims()]
    if aims:
        text += ["", "### Aims", ""]
        text += _table(
            ["ours", "against", "what", "aim", "found", ""],
            [
                [f.aim.ours, f.peer, WHAT[f.aim.what], f"{f.aim.least:g}", str(f.ratio), "met" if f.met else "missed"]
                for f in aims
            ],
        )
    return "\n".join(text) + "\n"


def _cells(outcome: Outcome, row: Row) -> list[str]:
    speed, ratio = row.speed, outcome.ratio_to_limit(row)
    name = row.variant.name if row.agrees else f"{row.variant.name} (another loss: {row.loss:.4f})"
    return [
        name,
        str(row.processes),
        f"{speed.middle:.0f} [{speed.low:.0f}, {speed.high:.0f}]",
        str(ratio) if ratio else "",
        f"{Spread.of(row.cpu_seconds).middle:.2f}",
        f"{row.peak_tensor_bytes / MB:.0f}",
        str(row.watched[0].gathers),
        f"{row.watched[0].gathered_bytes / MB:.1f}",
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
