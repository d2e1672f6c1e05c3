"""One plot of all suites: speed in relation to the limit of the suite, and peak tensor memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench import figures
from bench.rounds import Outcome

OURS, PEERS = "#c44e52", "#8c9cb0"


def plot(outcomes: Sequence[Outcome], file: Path) -> None:
    """Write a row of two panels for each suite. Whiskers are quartiles over the rounds."""
    outcomes = [outcome for outcome in outcomes if outcome.rows]
    pyplot = figures.pyplot(file)
    if pyplot is None or not outcomes:
        return
    sizes = [len(outcome.rows) + 1 for outcome in outcomes]
    figure, panels = pyplot.subplots(
        len(outcomes),
        2,
        figsize=(11, 0.6 * len(outcomes) + 0.28 * sum(sizes)),
        height_ratios=sizes,
        squeeze=False,
        layout="constrained",
    )
    for outcome, (speed, memory) in zip(outcomes, panels, strict=True):
        rows = list(outcome.rows.values())
        names = [row.variant.name for row in rows]
        colors = [OURS if row.variant.kind == "ours" else PEERS for row in rows]
        spreads = [outcome.ratio_to_limit(row) or row.speed for row in rows]
        middle = [spread.middle for spread in spreads]
        whiskers = [[s.middle - s.low for s in spreads], [s.high - s.middle for s in spreads]]
        speed.barh(names, middle, color=colors, xerr=whiskers, error_kw={"lw": 1, "capsize": 2})
        if outcome.suite.limit in outcome.rows:
            speed.axvline(1, color="black", lw=0.6, ls=":")
        speed.set_title(outcome.suite.title, loc="left", fontsize="medium")
        speed.set_xlabel(f"speed / {outcome.suite.limit}", fontsize="small")
        memory.barh(names, [row.peak_tensor_bytes / 1e6 for row in rows], color=colors)
        memory.set_yticks([])
        memory.set_xlabel("peak of tensors at the fullest process, MB", fontsize="small")
        for panel in (speed, memory):
            panel.invert_yaxis()
    figure.savefig(file, dpi=100)
