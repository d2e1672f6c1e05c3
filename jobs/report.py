"""What a person sees of a run: a short table first, one live line of progress, and what was reached."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from zeropp_ray.config import RunConfig
from zeropp_ray.metrics import kinds
from zeropp_ray.uri import Place


def plan_table(plan: Mapping[str, Any], config: RunConfig, source: str) -> str:
    """The table shown before the run: the model, the layout, a step, the predicted memory and bubble, the data."""
    parallel, chunks, memory = config.parallel, plan["chunks"], {**plan["predicted_memory"]}
    copies = memory.pop(kinds.COPIES, 0) if config.resources.device == "cuda" else memory.get(kinds.COPIES, 0)
    seconds = plan.get("predicted_step_s")
    micro_batches = f"{parallel.microbatches} micro-batches of {parallel.microbatch_size}"
    parts = ", ".join(f"{kind} {size(amount)}" for kind, amount in memory.items() if amount)
    narrow = ", computed with in bf16" if config.train.dtype == "bfloat16" else ""
    shared = ", the optimizer's state shared by replicas (ZeRO-1)" if parallel.zero1 and parallel.replicas > 1 else ""
    return aligned(
        ("model", f"{plan['model']}, {short(plan['parameters'])} parameters{_special(plan)}{narrow}"),
        ("layers", f"{sum(chunks)} in {len(chunks)} chunks of {_counts(chunks)}"),
        ("layout", f"{plan['layout']}; {parallel.members} members{shared}"),
        ("step", f"{plan['global_batch']} sequences, {plan['tokens_per_step']:,} tokens"),
        ("units", f"{micro_batches} per member, in units of {_counts(plan['units'])}"),
        ("memory", f"{size(sum(memory.values()))} per member: {parts}"),
        *([("copies", _copies(copies, config))] if copies else []),
        ("bubble", f"{plan['bubble']:.1%}, with at most {plan['limit']:g} live micro-batches"),
        *([("time", f"{seconds:.3g} s a step by the measured costs")] if seconds else []),
        *([("again", _FORWARDS_AGAIN[parallel.recompute])] if parallel.recompute != "none" else []),
        ("moves", f"{plan['gathers']} gathers and {plan['reduces']} reduces a step and member"),
        ("run", _length(config, plan["tokens_per_step"])),
        ("data", source),
        *([("built", f"whole by every member, {plan['built_whole']}")] if plan["built_whole"] else []),
    )


def memory_table(memory: Mapping[str, Any]) -> str:
    """The tensor memory of one member by kind: predicted, measured, and each kind at its own largest."""
    columns = ("predicted", "measured", "highest")
    rows: dict[str, Sequence[str]] = {"": columns}
    for kind in memory["measured"]:
        if any(memory[column][kind] for column in columns):
            rows[kind] = [size(memory[column][kind]) for column in columns]
    rows["total"] = [size(sum(memory[column].values())) for column in columns[:2]]
    width = max(map(len, rows))
    allocator = ", ".join(f"{size(amount)} {what}" for what, amount in memory.get("allocator", {}).items())
    return "\n".join(
        [
            f"step {memory['step']}  memory of {memory['member']}, the fullest, at its peak in {memory['at']}",
            *(f"{kind:{width}}" + "".join(f"{text:>11}" for text in row) for kind, row in rows.items()),
            *([f"the GPU's allocator at most: {allocator}"] if allocator else []),
        ]
    )


_FORWARDS_AGAIN = {
    "full": "every forward runs a second time for its backward",
    "selective": "forwards run a second time for their backward, but those of a stage's last chunk",
}


def _copies(amount: int, config: RunConfig) -> str:
    """What a member keeps so that the run can go on without another one."""
    exchanged = config.parallel.members > 1 and (config.parallel.replicas == 1 or config.parallel.zero1)
    whose = "its state, and two of its buddy's" if exchanged else "its state"
    are = "of host memory beside that:" if config.resources.device == "cuda" else "of that are"
    return f"{size(amount)} {are} two copies of {whose}, made every {_steps(config.recovery.copy_every)}"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _special(plan: Mapping[str, Any]) -> str:
    """How many of the parameters are not the usual kind."""
    kinds = (("shared", "shared by chunks"), ("frozen", "frozen"))
    return "".join(f", {short(plan[kind])} of them {text}" for kind, text in kinds if plan[kind])


ACTIONS = {
    "spare": "a spare took the place",
    "replace": "a new process took the place",
    "retry": "all members are still there",
    "restart": "with a new driver and new members",
}
SOURCES = {"copies": "the copies in memory", "checkpoint": "the checkpoint", "start": "the start"}


def recovery_line(event: Mapping[str, Any]) -> str:
    """How a run came back from a fault."""
    again = event["replayed"]
    return (
        f"back after {event['resumed_s']:.1f} s: {ACTIONS[event['action']]}; on from step {event['from_step']}, from "
        f"{SOURCES[event['source']]}" + (f", {again} step{'s' * (again != 1)} taken again" if again else "")
    )


def placement_lines(event: Mapping[str, Any]) -> str:
    """Where the members are and listen, and what crosses the network."""
    nodes = event["nodes"]
    lines = [f"on {node['host']}, listening on {node['address']}: {_members(node['members'])}" for node in nodes]
    if len(nodes) > 1:
        split, together = event["stages_across_nodes"], event["beside_their_buddies"]
        gathers = f"gathers of {split} stages cross nodes" if split else "gathers stay on a node"
        copies = f"{together} members are on the node of their buddy" if together else "all buddies are on other nodes"
        lines.append(f"{gathers}; {copies}")
    return "\n".join(lines)


def _members(members: Sequence[Sequence[int]]) -> str:
    """The members (p, f, r) of a node, by stage."""
    stages = Counter((p, r) for p, _, r in members)
    replicas = len({r for _, r in stages}) > 1
    return ", ".join(
        f"{count} of stage {p}" + (f" replica {r}" if replicas else "") for (p, r), count in sorted(stages.items())
    )


class Reporter:
    """Turns the events of a run into lines: one that is rewritten on a terminal, few plain ones elsewhere."""

    def __init__(
        self, console: TextIO, config: RunConfig, source: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._config, self._source, self._clock = console, config, source, clock
        self._live = console.isatty()
        self._begin = self._shown = clock()
        self._first: tuple[int, float] | None = None
        self._dangling = False
        self._predicted_s: float | None = None  # of a step, by measured costs

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event; of kinds that are none of a person's business nothing."""
        kind = event["kind"]
        if kind == "plan":
            self._predicted_s = event.get("predicted_step_s")
            self.line(plan_table(event, self._config, self._source) + "\n")
        elif kind == "step":
            self._step(event)
        elif kind == "eval":
            self.line(f"step {event['step']}  validation loss {_loss(event['validation_loss'])}")
        elif kind == "memory":
            self.line(memory_table(event))
        elif kind == "checkpoint":
            self.line(f"step {event['step']}  checkpoint {event['path']}")
        elif kind == "recovery":
            self.line(recovery_line(event))
        elif kind == "placement":
            self.line(placement_lines(event))
        elif kind == "log":
            self.line(event["text"])

    def line(self, text: str) -> None:
        """A line that stays."""
        self._console.write(("\r\x1b[K" if self._dangling else "") + text + "\n")
        self._console.flush()
        self._dangling = False

    def end(self) -> None:
        """Leave the live line standing, so that what comes next starts on a line of its own."""
        if self._dangling:
            self._console.write("\n")
            self._console.flush()
            self._dangling = False

    def summary(self, summary: Mapping[str, Any], folder: Place) -> None:
        """What was reached, and where the files are."""
        seconds, named = self._clock() - self._begin, shlex.quote(str(folder))
        self.line(
            "\n"
            + aligned(
                ("done", f"{summary['steps']} steps, {summary['tokens']:,} tokens in {duration(seconds)}"),
                ("speed", f"{short(summary['tokens_per_s'])} tok/s" + self._step_times(summary.get("step_s"))),
                (
                    "loss",
                    f"{_loss(summary['first_loss'])} to {_loss(summary['last_loss'])};"
                    f" validation {_loss(summary['validation_loss'])} nats per token",
                ),
                (
                    "moved",
                    f"{size(summary['bytes'])}, {summary['gathers']} gathers, {summary['reduces']} reduces in all",
                ),
                ("files", f"{folder}: config.toml, metrics.jsonl, summary.json, log.txt, checkpoints/"),
                *(() if summary["error"] else _next(summary["steps"], named)),
            )
        )

    def _step_times(self, measured_s: float | None) -> str:
        if measured_s is None or self._predicted_s is None:
            return ""
        return f"; a step took {measured_s:.3g} s, where {self._predicted_s:.3g} s were predicted"

    def _step(self, event: Mapping[str, Any]) -> None:
        step, steps, now = event["step"], event["steps"], self._clock()
        if event["skipped"]:
            self.line(f"step {step}  skipped: {event.get('reason', 'not finite')}")
        if self._first is None:
            self._first = (step, now)
        done, since = step - self._first[0], now - self._first[1]
        text = f"step {step}/{steps}  loss {_loss(event['loss'])}  {short(event['tokens_per_s'])} tok/s"
        if done and step < steps:
            text += f"  {duration(since / done * (steps - step))} left"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._console.write(f"\r\x1b[K{text[:width]}")
            self._console.flush()
            self._dangling = True
            return
        # Every tenth of the run, and whenever a while has passed: 5 s at first, longer the longer it runs.
        tenth = step * 10 // steps > (step - 1) * 10 // steps
        if step == 1 or tenth or now - self._shown >= max(5.0, since / 20):
            self._shown = now
            self.line(text)


def _next(steps: int, run: str) -> tuple[tuple[str, str], ...]:
    """What to try with a run that is done."""
    return (
        ("next", f"{_command()} sample {run} --prompt 'The '"),
        ("", f"{_command()} eval {run}"),
        ("", f"{_command()} train --resume {run} --set train.steps={2 * steps}"),
    )


def _length(config: RunConfig, tokens_per_step: int) -> str:
    """How long the run is, and its learning rate."""
    train = config.train
    text = f"{train.steps:,} steps, {train.steps * tokens_per_step:,} tokens; "
    text += f"learning rate {train.lr:g}, {train.schedule}"
    if train.warmup_steps:
        text += f" after {train.warmup_steps:,} steps of warm-up"
    if train.schedule == "constant":
        return text
    over = f" over the last {train.decay:,}" if train.schedule == "wsd" else ""
    return f"{text}, down to {train.lr * train.min_lr_ratio:g}{over}"


def _command() -> str:
    """How this command is called here: by its name if it is on the path."""
    if shutil.which("zeropp"):
        return "zeropp"
    return "python -m zeropp_ray" if sys.argv[0].endswith(".py") else sys.argv[0]


def short(value: float) -> str:
    """A count in three digits: 870000 -> ``870k``."""
    prefix = 0
    while abs(value) >= 999.5 and prefix < 4:
        value, prefix = value / 1000, prefix + 1
    digits = max(0, 3 - len(str(int(abs(value))))) if prefix else 0
    return f"{value:.{digits}f}{' kMGT'[prefix].strip()}"


def size(count: float) -> str:
    """Bytes in binary units: 1572864 -> ``1.5 MiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log2(count)) // 10, 4)
    return f"{count / 1024**power:.1f} {' KMGT'[power]}iB"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours before them: ``0:34``, ``2:05:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def _counts(values: list[int]) -> str:
    """Near-equal counts, shortly: ``4``, ``3 and 4``, or all of them."""
    different = sorted(set(values))
    if len(different) == 1:
        return str(different[0])
    return " ".join(map(str, values)) if len(values) <= 16 else f"{different[0]} to {different[-1]}"


def aligned(*rows: tuple[str, str]) -> str:
    width = max(len(label) for label, _ in rows)
    lines = []
    for label, text in rows:
        first, *more = textwrap.wrap(text, 88 - width, break_long_words=False, break_on_hyphens=False)
        lines += [f"{label:<{width}}  {first}", *(f"{'':<{width}}  {line}" for line in more)]
    return "\n".join(lines)
