"""Interleaved rounds: all variants of a suite are started, and each round runs every one once, in an order of its own.

What the machine does besides falls on all alike so, and variants are compared within rounds: a ratio is the median of
those of the rounds, with its quartiles.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median, quantiles
from typing import Any, NamedTuple

from bench.clock import Clock
from bench.crew import Crew, VariantFailed, start
from bench.suites import Aim, Suite
from bench.tensor_bytes import Watched
from bench.variant import Variant
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ZeroppError
from zeropp_ray.models import describe, resolve_factory


@dataclass
class Setting:
    """How everything is measured."""

    shared: Mapping[str, Mapping[str, Any]]  # of the run configuration: model and train
    rounds: int
    steps: int  # of a variant in a round
    warmup: int = 3  # steps, after which losses are compared
    device: str = "cpu"
    load: float = 0.0  # processes that wanted a core before it began

    @cached_property
    def parameters(self) -> int:
        """Of the model."""
        config = RunConfig.from_dict({"model": self.shared["model"]})
        return describe(resolve_factory(config.model), config.model.seq_len, seed=0).elements


class Spread(NamedTuple):
    """First quartile, median, third quartile."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(low, median(values), high)

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass
class Row:
    """What was found of one variant."""

    variant: Variant
    processes: int
    tokens: int  # of a step
    loss: float  # after the warm-up
    watched: list[Watched]  # by process
    other_gradients: float  # bytes in fp32 of a stage's gradients, unsharded, but for one chunk
    agrees: bool = True  # with the loss of the limit
    seconds: list[float] = field(default_factory=list)  # of a step, by round
    cpu_seconds: list[float] = field(default_factory=list)  # of all processes for a step, by round

    @property
    def tokens_per_s(self) -> list[float]:
        return [self.tokens / seconds for seconds in self.seconds]

    @property
    def speed(self) -> Spread:
        """Tokens per second."""
        return Spread.of(self.tokens_per_s)

    @property
    def peak_tensor_bytes(self) -> int:
        """At the fullest process."""
        return max(found.peak_tensor_bytes for found in self.watched)

    def speed_against(self, other: Row) -> Spread:
        """How many times as fast as ``other``."""
        return Spread.of([theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True)])


@dataclass
class Found:
    """An aim, the peer that came best, and how ours compares with it."""

    aim: Aim
    peer: str
    ratio: Spread

    @property
    def met(self) -> bool:
        return self.ratio.middle >= self.aim.least


@dataclass
class Outcome:
    """What was found of a suite; ``failed``: why a variant did not run, by name."""

    suite: Suite
    rows: dict[str, Row] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def well(self) -> bool:
        """Whether all ran, and to the same loss."""
        return not self.failed and all(row.agrees for row in self.rows.values())

    def ratio_to_limit(self, row: Row) -> Spread | None:
        limit = self.rows.get(self.suite.limit)
        return row.speed_against(limit) if limit else None

    def aims(self) -> list[Found]:
        """All aims of which ours and a peer ran; not against a peer with another loss, which trains something else."""
        found = []
        for aim in self.suite.aims:
            ours = self.rows.get(aim.ours)
            peers = [row for name in aim.peers if (row := self.rows.get(name)) and row.agrees]
            if ours and peers:
                ratios = {peer.variant.name: _ratio(aim, ours, peer) for peer in peers}
                best = min(ratios, key=lambda name: ratios[name].middle)
                found.append(Found(aim, best, ratios[best]))
        return found


def _ratio(aim: Aim, ours: Row, peer: Row) -> Spread:
    saved = peer.peak_tensor_bytes - ours.peak_tensor_bytes
    if aim.what == "memory":
        return Spread.of([peer.peak_tensor_bytes / ours.peak_tensor_bytes])
    if aim.what == "gradients":
        return Spread.of([saved / ours.other_gradients])
    return ours.speed_against(peer)


def run_suite(suite: Suite, setting: Setting, say: Callable[[str], None], clock: Clock) -> Outcome:
    """Start all variants, warm up, watch a step, compare losses, and run the rounds, without those that fail."""
    outcome, crews = Outcome(suite), dict[str, Crew]()
    try:
        for variant in suite.variants:
            with clock.timed("start"):
                _start(variant, setting, outcome, crews, say)
        _compare_losses(outcome, say)
        for number in range(1, setting.rounds + 1):
            say(f"{suite.name}: round {number} of {setting.rounds}, about {clock.left()} left")
            for name in random.Random(number).sample(sorted(crews), len(crews)):
                with clock.timed("run"):
                    _take_turn(crews[name], outcome.rows[name], setting.steps)
    finally:
        for crew in crews.values():
            crew.close()
    return outcome


def _take_turn(crew: Crew, row: Row, steps: int) -> None:
    before = crew.cpu_time()
    row.seconds.append(crew.run(steps) / steps)
    row.cpu_seconds.append((crew.cpu_time() - before) / steps)


def _start(
    variant: Variant, setting: Setting, outcome: Outcome, crews: dict[str, Crew], say: Callable[[str], None]
) -> None:
    crew = None
    try:
        if variant.kind == "ours" and setting.device != "cpu":
            raise VariantFailed("ours runs on CPUs alone so far")
        config = variant.config(setting.shared)
        crew = start(variant, config, setting.device)
        crew.run(setting.warmup)
        loss = crew.loss
        watched = crew.watch()
    except (VariantFailed, ZeroppError) as error:
        if crew is not None:
            crew.close()
        outcome.failed[variant.name] = str(error)
        say(f"{outcome.suite.name}: {variant.name} does not run: {str(error).strip().splitlines()[-1]}")
        return
    crews[variant.name] = crew
    parallel, tokens = config.parallel, config.parallel.global_batch * config.model.seq_len
    other = 4 * setting.parameters * (parallel.chunks - 1) / (parallel.chunks * parallel.stages)
    outcome.rows[variant.name] = Row(variant, parallel.members, tokens, loss, watched, other)
    say(f"{outcome.suite.name}: {variant.name} is up, loss {loss:.6f} after {setting.warmup} steps")


def _compare_losses(outcome: Outcome, say: Callable[[str], None]) -> None:
    suite, limit = outcome.suite, outcome.rows.get(outcome.suite.limit)
    if limit is None:
        return
    for row in outcome.rows.values():
        off = abs(row.loss / limit.loss - 1)
        row.agrees = not row.variant.checked or off <= suite.tolerance
        if not row.agrees:
            say(f"{suite.name}: {row.variant.name}: loss {row.loss:.6f} is off that of {suite.limit} by {off:.1e}")
    checked = [row for row in outcome.rows.values() if row.variant.checked]
    agree = sum(row.agrees for row in checked)
    say(f"{suite.name}: {agree} of {len(checked)} losses agree within {suite.tolerance:g}")
