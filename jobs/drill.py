"""``zeropp drill``: a run with a fault put into it against the same run undisturbed, for one fault after the other."""

from __future__ import annotations

import dataclasses
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from actors.events import EVENTS
from actors.locks import only_job
from jobs.config import configured
from jobs.quiet import quiet
from jobs.train import completed, with_text
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.faults import Fault, read_faults
from zeropp_ray.files import expanded

# What is drilled without FILE: seconds of training, and limits that do not make a hang wait.
SMALL = (
    "model.dim=64",
    "model.seq_len=64",
    "parallel.chunks=1",
    "parallel.microbatches=4",
    "parallel.microbatch_size=1",
    "train.steps=12",
    "train.warmup_steps=4",
    "train.eval_every=0",
    "train.eval_sequences=16",
    "checkpoint.every_steps=4",
    "recovery.copy_every=1",
    "recovery.suspect_s=2",
    "recovery.hang_s=4",
)

COLUMNS = ("recoveries", "noticed after", "resumed after", "replayed", "state", "losses")


@click.command(short_help="Put faults into runs, and see that they end as if undisturbed.")
@configured
@click.option("--inject", multiple=True, metavar="FAULTS", help="A run with these faults; can be repeated.")
@click.option("--address", metavar="ADDRESS", help="Join the Ray cluster at HOST:PORT, or 'auto'; else start one here.")
def drill(file: Path | None, overrides: tuple[str, ...], inject: tuple[str, ...], address: str | None) -> None:
    """Train once undisturbed, and once more for each --inject, with its faults. The weights, the optimizer's state and
    every loss must come out equal, bit for bit.

    FILE is a run configuration; without it a small model is trained. Without --inject a member is killed, one stopped,
    one hung, one cut off, and the driver killed: some minutes in all.

    A fault is a kind and then, in any order, where and when:

    \b
      kill stage=1 member=0 step=5 at=B     SIGKILL
      stop stage=0 member=1 step=5 for=2    SIGSTOP; with for=2 it goes on after 2 seconds
      hang stage=1 member=0 step=5 at=W     a thread holds the interpreter lock for ever
      slow=3x stage=0 member=0 step=5       all that it runs from then on takes 3 times as long
      net stage=0 member=0 step=5 at=send   its connections are cut
      disk-full stage=0 member=0 step=5     its next part of a checkpoint finds no space
      node stage=1 member=0 step=5          the node that this member is on is killed
      driver step=5                         the driver is killed
      corrupt-checkpoint step=5             a byte of the next checkpoint is altered
      random seed=7 rate=0.05               kill, stop, hang or net somewhere, in one step of twenty;
                                            kinds=kill,stop to have these alone

    \b
    stage, member  which: member f·R + r of the stage is shard f of replica r; 0 if left out
    at             before an instruction of the step: F B W RF gather release reduce send recv;
                   or at a point: vote commit copy checkpoint recovery; F if left out
    nth            which of them; 1 if left out

    Several in one run are parted by `;`:

    \b
      zeropp drill --inject 'kill stage=0 step=5; kill stage=1 step=5 at=recovery'
      zeropp drill run.toml --inject 'random rate=0.1'

    Exit code: 0 all equal, 1 one differs or failed, 2 wrong usage or configuration.
    """
    config = completed(load_config(file, overrides if file else (*SMALL, *overrides)))
    config, _ = with_text(config)
    texts = inject or usual(config)
    chosen = [read_faults([text], config) for text in texts]
    folder = _new_folder(config)
    click.echo(f"{len(texts)} runs with faults and one without, {config.train.steps} steps each, in {folder}\n")
    twin = _train(_in(folder, config, "undisturbed"), (), address)
    if twin.error:
        raise ZeroppError(f"the undisturbed run failed: {twin.error}")
    width = max(len("fault"), *map(len, texts))
    click.echo("  ".join(("fault".ljust(width), *COLUMNS)))
    bad = 0
    for number, (text, faults) in enumerate(zip(texts, chosen, strict=True), start=1):
        click.echo(text.ljust(width), nl=False)
        run = _train(_in(folder, config, f"{number}-{faults[0].kind}" if faults else str(number)), faults, address)
        cells = run.against(twin)
        click.echo("".join(f"  {cell:>{len(column)}}" for cell, column in zip(cells, COLUMNS, strict=True)))
        if run.error:
            click.echo(f"  failed: {run.error}")
        bad += not run.equals(twin)
    if bad:
        raise ZeroppError(f"{bad} of {len(texts)} runs did not end as the undisturbed one; see {folder}")


def usual(config: RunConfig) -> list[str]:
    """A fault of each common kind, in the middle of the run and of the mesh."""
    last, half = config.parallel.stages - 1, max(1, config.train.steps // 2)
    member = config.parallel.shards * config.parallel.replicas - 1
    return [
        f"kill stage={last} member=0 step={half} at=B",
        f"stop stage=0 member={member} step={half} at=F",
        f"hang stage={last} member={member} step={half} at=W",
        *([f"net stage=0 member=0 step={half} at=reduce"] if config.parallel.members > 1 else []),
        f"driver step={half}",
    ]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its digest with moments and cursor, every line of losses, its recoveries; or why it failed."""

    digest: str
    losses: list[tuple[Any, ...]]
    recoveries: list[dict[str, Any]]
    error: str = ""

    def equals(self, twin: Outcome) -> bool:
        return not self.error and (self.digest, self.losses) == (twin.digest, twin.losses)

    def against(self, twin: Outcome) -> tuple[str, ...]:
        """A cell for each of COLUMNS; of several recoveries the longest times, and all steps that were replayed."""
        return (
            str(len(self.recoveries)),
            self._longest("noticed_s"),
            self._longest("resumed_s"),
            str(sum(event["replayed"] for event in self.recoveries)),
            "equal" if self.digest == twin.digest else "differs",
            "equal" if self.losses == twin.losses else "differ",
        )

    def _longest(self, name: str) -> str:
        """Of the recoveries that tell it; when a connection broke is not known."""
        seconds = [event[name] for event in self.recoveries if event[name] is not None]
        return f"{max(seconds):.2f} s" if seconds else "-"


def _in(folder: Path, config: RunConfig, name: str) -> RunConfig:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name, dir=str(folder)))


def _new_folder(config: RunConfig) -> Path:
    name = f"drill-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = expanded(config.run.dir, f"run.dir = {config.run.dir!r}") / name
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir = {config.run.dir!r}: cannot make {folder}: {error.strerror};"
            " choose a folder that you can write to with --set run.dir=FOLDER"
        ) from None
    return folder


def _train(config: RunConfig, faults: Sequence[Fault], address: str | None) -> Outcome:
    from actors.run import run_training
    from zeropp_ray.data.text import keep_tokenizer

    folder, error = Path(config.run.dir) / config.run.name, ""
    folder.mkdir()
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    keep_tokenizer(config, folder)
    with only_job(folder), quiet(folder / "log.txt"):
        try:
            summary = run_training(config, address=address, run_dir=folder, on_event=_note, inject=tuple(faults))
            error = summary["error"] or ""
        except ZeroppError as caught:
            traceback.print_exc()  # into the log
            error = str(caught)
    return _outcome(folder, error)


def _note(event: Mapping[str, Any]) -> None:
    if event["kind"] == "log":
        print(event["text"])  # into the log


def _outcome(folder: Path, error: str) -> Outcome:
    from zeropp_ray.checkpoint.reader import latest

    try:
        digest = latest(folder).digest(state=True)
    except ConfigError as caught:
        digest, error = "", error or str(caught)
    losses = [
        (line["step"], line.get("loss"), line.get("validation_loss")) for line in _lines(folder / "metrics.jsonl")
    ]
    recoveries = [line for line in _lines(folder / EVENTS) if line["kind"] == "recovery"]
    return Outcome(digest, losses, recoveries, error)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
