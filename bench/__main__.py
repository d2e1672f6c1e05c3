"""Ours against what a user would pick: ``python -m bench [SUITE ...]``, all suites unless some are named.

Besides those that train: ``sleep``, schedules of eight stages whose layers sleep, ``growth``, cost against size, and
``replay``, what a replay says of a step against what the step takes. Each has a command of its own with more options,
such as ``python -m bench.sleep``, and files of its own beside the results.

Every suite trains the same model on the same text from the same weights in several ways, at the same time: their
processes wait, and take turns in rounds. All must reach the same loss. Written are latest.json with all numbers,
latest.md with the tables and latest.png with a plot. Exits with 1 if a variant fails or its loss is another.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import click

from bench.suites import MODEL, SUITES, TINY, TRAIN

OTHERS = ("sleep", "growth", "replay")


@click.command(help=__doc__, context_settings={"show_default": True})
@click.argument("suites", nargs=-1, type=click.Choice([*SUITES, *OTHERS]))
@click.option("--rounds", default=0, type=click.IntRange(0), help="Rounds of every suite; 0: 10, or 3 with --quick.")
@click.option("--steps", default=2, type=click.IntRange(1), help="Steps of a variant in a round.")
@click.option("--quick", is_flag=True, help="A small model and few rounds: minutes, and rough.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), help="Where tensors are; ours: cpu alone.")
@click.option("--out", default="bench/results", type=click.Path(path_type=Path), help="Folder for the results.")
def main(suites: tuple[str, ...], rounds: int, steps: int, quick: bool, device: str, out: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # a process has one thread; read when torch is imported
    from bench.clock import Clock
    from bench.plot import plot
    from bench.rounds import Setting, run_suite
    from bench.table import as_dict, markdown

    load = os.getloadavg()[0]
    if load > 0.5:
        click.echo(f"Other programs are at work here (load {load:.1f}); what is measured will be noisy.")
    shared = {"model": TINY if quick else MODEL, "train": TRAIN}
    setting = Setting(shared, rounds or (3 if quick else 10), steps, device=device, load=load)
    chosen = [SUITES[name] for name in suites or SUITES if name in SUITES]
    starts = sum(len(suite.variants) for suite in chosen)
    clock = Clock(start=starts, run=starts * setting.rounds)
    outcomes = []
    for suite in chosen:
        outcomes.append(run_suite(suite, setting, _say, clock))
        out.mkdir(parents=True, exist_ok=True)  # after every suite: what is done is kept
        (out / "latest.json").write_text(json.dumps(as_dict(outcomes, setting), indent=1) + "\n")
        (out / "latest.md").write_text(markdown(outcomes, setting))
    if chosen:
        plot(outcomes, out / "latest.png")
        click.echo("\n" + markdown(outcomes, setting))
        click.echo(f"Written: {out / 'latest.json'}, latest.md, latest.png")
    for name in suites or OTHERS:
        if name in OTHERS:
            click.echo(f"{name}: some minutes")
            importlib.import_module(f"bench.{name}").run(setting.rounds, quick, out)
            click.echo((out / f"{name}.md").read_text(encoding="utf-8"))
    if not all(outcome.well for outcome in outcomes):
        sys.exit(1)


def _say(line: str) -> None:
    click.echo(line)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
