"""What a schedule is made for: the resolved numbers, checked, and which chunk sends to which."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from zeropp_ray.errors import ConfigError
from zeropp_ray.placement import model_chunk, stage_and_chunk
from zeropp_ray.schedule.costs import Costs
from zeropp_ray.schedule.policies import POLICIES, fixed_order, most_live
from zeropp_ray.schedule.units import default_limit, default_unit, least_limit_chunks, split_units

RECOMPUTE = ("none", "full", "selective")
"""Whose activations are made again for ``B``: nobody's; every chunk's; every chunk's but the last one's of a stage,
whose ``B`` follow its ``F`` closely, for they share a residency."""

REDUCE = ("unit", "step")
"""When a chunk's gradient buffer is reduced: after each unit, so that one is open at a time; or once a step, with all
``V`` open and a ``K``-th of the traffic."""

AUTO = "auto"
"""The unit that leaves its size to :func:`~zeropp_ray.schedule.tune.tune`."""

_SLACK = 1e-9  # a limit of 8.6666666667 with V=3 means 26 chunks


class Edge(NamedTuple):
    """One FIFO of messages between two ranks: ``kind`` "F" carries activations, "B" gradients."""

    source: int
    destination: int
    kind: str

    def __str__(self) -> str:
        return f"{self.source}→{self.destination} {self.kind}"


class Hop(NamedTuple):
    """Where a chunk's message goes to, or comes from: the edge, and the chunk at its other end."""

    edge: Edge
    chunk: int


@dataclass(frozen=True)
class ScheduleSpec:
    """Resolved input of the schedule passes; make it with :func:`resolve`.

    ``memory_limit`` is in whole-stage micro-batches: a chunk's activation counts ``1/V`` from its ``F`` to its ``W``,
    that of a recomputed chunk from its ``RF``. ``recomputed`` says of each chunk ``v`` of a stage whether it is.
    ``policy`` is a key of :data:`~zeropp_ray.schedule.policies.POLICIES`.
    """

    stages: int
    chunks: int
    microbatches: int
    unit: int
    units: tuple[int, ...]
    memory_limit: float
    prefetch: bool
    costs: Costs
    recomputed: tuple[bool, ...]
    reduce: str  # one of REDUCE
    policy: str = "zeropp"

    @property
    def placement(self) -> str:
        """How model chunks lie on the ranks: "looped" or "v" (placement.py)."""
        return POLICIES[self.policy].placement

    @property
    def model_chunks(self) -> int:
        return self.stages * self.chunks

    @property
    def live_chunks(self) -> int:
        """The memory limit as a whole number of chunk activations."""
        return math.floor(min(self.memory_limit, self.microbatches) * self.chunks + _SLACK)

    @property
    def input_limit(self) -> int:
        """Most inputs of recomputed chunks that a rank keeps from ``F`` to ``RF``: a unit's, and a ramp of ``P``, or of
        ``2P`` in a fixed order.
        """
        ramp = 1 if POLICIES[self.policy].order is None else 2
        return max(self.units) * sum(self.recomputed) + ramp * self.stages

    @property
    def unit_bounds(self) -> list[tuple[int, int]]:
        """First and past-the-last micro-batch of each unit."""
        bounds, start = [], 0
        for size in self.units:
            bounds.append((start, start + size))
            start += size
        return bounds

    @property
    def reduce_bounds(self) -> list[tuple[int, int]]:
        """First and past-the-last of the micro-batches whose gradients are reduced together."""
        return self.unit_bounds if self.reduce == "unit" else [(0, self.microbatches)]

    @property
    def gradient_buffers(self) -> int:
        """Most gradient buffers that may be open at once."""
        return 1 if self.reduce == "unit" else self.chunks

    def model_chunk(self, rank: int, chunk: int) -> int:
        """The model chunk that is chunk ``v`` of a rank."""
        return model_chunk(self.placement, self.stages, rank, chunk)

    def outgoing(self, rank: int, chunk: int, kind: str) -> Hop | None:
        """Where a chunk's output activation ("F") or input gradient ("B") goes. None at the model's ends, and where the
        next chunk is the rank's own: it hands over locally.
        """
        target = self.model_chunk(rank, chunk) + (1 if kind == "F" else -1)
        if not 0 <= target < self.model_chunks:
            return None
        owner, other = stage_and_chunk(self.placement, self.stages, target)
        return Hop(Edge(rank, owner, kind), other) if owner != rank else None

    def incoming(self, rank: int, chunk: int, kind: str) -> Hop | None:
        """Where a chunk's input activation ("F") or output gradient ("B") comes from; None as for :meth:`outgoing`."""
        hop = self.outgoing(rank, chunk, "B" if kind == "F" else "F")
        return hop and Hop(Edge(hop.edge.destination, rank, kind), hop.chunk)

    def local(self, rank: int, chunk: int, kind: str) -> bool:
        """Whether a chunk's input activation ("F") or output gradient ("B") comes from the rank's own chunk."""
        end = 0 if kind == "F" else self.model_chunks - 1
        return self.model_chunk(rank, chunk) != end and self.incoming(rank, chunk, kind) is None


def resolve(
    stages: int,
    chunks: int,
    microbatches: int,
    unit: int | str = 0,
    memory_limit: float = 0.0,
    prefetch: bool = False,
    costs: Costs | None = None,
    recompute: str = "none",
    reduce: str = "unit",
    policy: str = "zeropp",
    name: Callable[[str], str] = "parallel.{}".format,
) -> ScheduleSpec:
    """Fill in the defaults and check the numbers against each other.

    Args:
        stages, chunks, microbatches: ``P``, ``V``, ``N``, each at least 1, with ``N ≥ P``.
        unit: the least unit size ``U``, ``P ≤ U ≤ N``; 0 takes ``min(N, 2P)``, or what the policy is known for.
            :data:`AUTO`, for :func:`~zeropp_ray.schedule.tune.tune` to choose, takes ``P`` where there is a choice.
        memory_limit: live activations in whole-stage micro-batches; 0 takes ``default_limit`` (units.py), or what the
            policy's fixed order keeps.
        costs: per model chunk; None takes 1, 1, 1, 0. ``RF`` costs what ``F`` does.
        recompute, reduce, policy: one of :data:`RECOMPUTE`, of :data:`REDUCE`, and of
            :data:`~zeropp_ray.schedule.policies.POLICIES`.
        name: how an error calls a field; the default names the key of the run configuration.

    Raises:
        ConfigError: naming the field, its value and a value that works.
    """
    words = (("recompute", recompute, RECOMPUTE), ("reduce", reduce, REDUCE), ("policy", policy, tuple(POLICIES)))
    for field, word, known in words:
        if word not in known:
            raise ConfigError(f"{name(field)} = {word!r}: unknown; known are {', '.join(known)}")
    for field, value in (("stages", stages), ("chunks", chunks), ("microbatches", microbatches)):
        if value < 1:
            raise ConfigError(f"{name(field)} = {value}: must be at least 1")
    if microbatches < stages:
        raise ConfigError(
            f"{name('microbatches')} = {microbatches}: fewer than {name('stages')} = {stages} fill no pipeline; "
            f"{name('microbatches')} = {stages} or more works"
        )
    if isinstance(unit, str):
        if unit != AUTO:
            raise ConfigError(f"{name('unit')} = {unit!r}: expected a whole number, or {AUTO!r}")
        unit = stages if POLICIES[policy].unit == "2P" else 0
    _check_policy(policy, chunks, microbatches, unit, name)
    if unit < 0 or (unit and not stages <= unit <= microbatches):
        side = f"below {name('stages')}" if unit < stages else f"above {name('microbatches')}"
        raise ConfigError(
            f"{name('unit')} = {unit}: {side}; a unit holds {stages} to {microbatches} micro-batches here, "
            f"{name('unit')} = {default_unit(microbatches, stages)} works"
        )
    if recompute == "selective" and chunks == 1:
        raise ConfigError(
            f"{name('recompute')} = 'selective': keeps the last chunk of a stage, and with {name('chunks')} = 1 there "
            f"is no other; use {name('recompute')} = 'full' or 'none', or {name('chunks')} = 2 or more"
        )
    unit = unit or {"2P": default_unit(microbatches, stages), "P": stages, "N": microbatches}[POLICIES[policy].unit]
    if costs is None:
        costs = Costs.uniform(stages * chunks)
    if len(costs.F) != stages * chunks:
        raise ConfigError(
            f"cost: {len(costs.F)} values for {stages} × {chunks} model chunks; give {stages * chunks}, one for each"
        )
    spec = ScheduleSpec(
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        unit=unit,
        units=tuple(split_units(microbatches, unit)),
        memory_limit=memory_limit,
        prefetch=prefetch,
        costs=costs,
        recomputed=(recompute != "none",) * (chunks - 1) + (recompute == "full",),
        reduce="step" if POLICIES[policy].open_buffers else reduce,
        policy=policy,
    )
    least, default = limits(spec)
    if not math.isfinite(memory_limit) or memory_limit < 0:
        raise ConfigError(
            f"{name('memory_limit')} = {memory_limit}: not a number of micro-batches; 0 takes the default, "
            f"{_number(default)}"
        )
    spec = replace(spec, memory_limit=memory_limit or default)
    if spec.live_chunks < least:
        raise ConfigError(
            f"{name('memory_limit')} = {_number(spec.memory_limit)}: no schedule exists for units of {max(spec.units)} "
            f"micro-batches, {chunks} chunks; the least limit is {_rounded_up(least, chunks)} "
            "(in whole-stage micro-batches)"
        )
    return spec


def _check_policy(policy: str, chunks: int, microbatches: int, unit: int, name: Callable[[str], str]) -> None:
    known = POLICIES[policy]
    if (known.chunks and chunks != known.chunks) or chunks < known.least_chunks:
        works = known.chunks or known.least_chunks
        raise ConfigError(
            f"{name('chunks')} = {chunks}: {name('policy')} = {policy!r} takes {works}"
            f"{'' if known.chunks else ' or more'} a stage; use {name('chunks')} = {works}"
        )
    if known.unit == "N" and unit not in (0, microbatches):
        raise ConfigError(
            f"{name('unit')} = {unit}: {name('policy')} = {policy!r} has one unit of all {microbatches} micro-batches; "
            f"use {name('unit')} = 0"
        )


def limits(spec: ScheduleSpec) -> tuple[int, float]:
    """The least limit of live activations, in chunks, and the default one, in whole-stage micro-batches."""
    if POLICIES[spec.policy].order is not None:
        least = most_live(fixed_order(spec), spec.recomputed)
        return least, least / spec.chunks
    recompute = any(spec.recomputed)
    least = least_limit_chunks(spec.units, spec.chunks, recompute)
    if not POLICIES[spec.policy].shared:  # all forwards of a unit come before its first backward
        least = max(least, max(spec.units) * (spec.chunks - sum(spec.recomputed)))
    return least, max(least / spec.chunks, default_limit(spec.units, spec.stages, spec.chunks, recompute))


def _number(value: float) -> str:
    return f"{value:.10g}"


def _rounded_up(numerator: int, denominator: int) -> str:
    """The quotient in decimals, rounded up where it does not end, so that typing it back in works."""
    return _number(math.ceil(numerator * 10**4 / denominator) / 10**4)
