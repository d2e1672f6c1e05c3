"""Which layout to take: all that are worth a look, by estimated step time, among those whose memory fits.

The closed form of ``cost_model.py`` ranks tens of thousands; the best are then replayed: their own order, made from the
costs of their own chunks, is timed (``schedule/replay.py``). A long step is timed over two and three units, and goes on
as the third did.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from zeropp_ray.config import ParallelSection
from zeropp_ray.errors import ConfigError
from zeropp_ray.planner.cost_model import Choice, Estimate, Rival, cut, estimate, hop, memory_limit
from zeropp_ray.planner.hardware import Cluster, cluster, device_names
from zeropp_ray.planner.sizes import ModelSizes
from zeropp_ray.planner.tensor_parallel import estimate_3d
from zeropp_ray.schedule import Costs, replay, resolve, split_units, zeropp_order

_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SIZES = (1, 2, 4, 8, 16)  # of micro-batches
_UNITS = (1, 1.5, 2, 4)  # in multiples of P; and the whole step
_WIDTHS = 3  # how many numbers of micro-batches at a time are tried for each P, the largest that the batch allows
_LARGEST_STAGE = 64  # members; a gather over more is mostly latency
_REPLAYED = 3  # so many times as many as are shown
_MOVING = 0.01  # part of the time of traffic that counts even where tasks hide it
_ACTIONS = 60_000  # of a step that is replayed whole


@dataclass(frozen=True)
class Plans:
    """What a search found. ``best`` are replayed, fastest first, one of each ``P``, ``F`` and ``R``; ``refused`` would
    be faster than the best and do not fit, closest first; ``rival`` is the best of 3D parallelism, None if none fits.
    """

    model: ModelSizes
    cluster: Cluster
    global_batch: int
    best: tuple[Estimate[Choice], ...]
    refused: tuple[Estimate[Choice], ...]
    rival: Estimate[Rival] | None
    considered: int

    def tokens_per_s(self, step: Estimate[Any]) -> float:
        return self.global_batch * self.model.seq_len / step.step_s

    def utilisation(self, step: Estimate[Any]) -> float:
        """Model FLOPs over what all devices of the cluster could do, those without work included."""
        flops = self.global_batch * self.model.flops
        return flops / step.step_s / self.cluster.count / self.cluster.device.peak


def search(model: ModelSizes, on: Cluster, global_batch: int, show: int = 5) -> Plans:
    """The best layouts of ``model`` for a step of ``global_batch`` sequences.

    Raises ConfigError if none fits, with what is missing and what would do.
    """
    ranking = _Ranking(model, on, global_batch)
    if not ranking.fits:
        raise _nothing_fits(model, on, global_batch, ranking.least)
    first = sorted(ranking.fits.values(), key=_step_s)[: _REPLAYED * show]
    best = sorted((replayed(model, on, each) for each in first), key=_step_s)
    refused = [each for each in ranking.refused.values() if each.step_s < best[0].step_s]
    refused.sort(key=lambda each: each.memory_bytes)
    rival = best_3d(model, on, global_batch)
    return Plans(model, on, global_batch, tuple(best[:show]), tuple(refused[:show]), rival, ranking.considered)


def best_3d(model: ModelSizes, on: Cluster, global_batch: int, tensor: int = 0) -> Estimate[Rival] | None:
    """The fastest layout of 3D parallelism that fits, of ``tensor`` devices to a tensor-parallel group, 0: any."""
    steps = (estimate_3d(model, on, each) for each in _rivals(model, on, global_batch) if tensor in (0, each.tensor))
    return min((each for each in steps if each.memory_bytes <= on.device.usable), key=_step_s, default=None)


def _mesh(choice: Choice) -> tuple[int, int, int]:
    return choice.stages, choice.shards, choice.replicas


def _step_s(step: Estimate[Any]) -> float:
    return step.step_s


def replayed(model: ModelSizes, on: Cluster, step: Estimate[Choice]) -> Estimate[Choice]:
    """The same step with the makespan of its own program in place of the closed form."""
    choice = step.choice
    P, V, N = choice.stages, choice.chunks, choice.microbatches
    parts = cut(model, on, P, V, choice.microbatch_size)
    unit = sum(map(sum, parts.F)) / (P * V)  # seconds: the mean forward is 1, as in a run's plan
    F, B, W = ([round(row[p][v] / unit, 4) for v in range(V) for p in range(P)] for row in (parts.F, parts.B, parts.W))
    costs = Costs(tuple(max(f, 1e-4) for f in F), tuple(B), tuple(W), round(hop(model, on, choice) / unit, 4))

    def makespan(microbatches: int) -> float:
        least = min(choice.unit, microbatches)
        spec = resolve(P, V, microbatches, least, choice.memory_limit, choice.prefetch, costs, choice.recompute)
        return replay(zeropp_order(spec), spec).makespan * unit

    units = split_units(N, choice.unit)
    if len(units) <= 3 or 4 * P * V * N <= _ACTIONS:
        return estimate(model, on, choice, makespan(N))
    u = N / len(units)
    two, three = (makespan(round(k * u)) for k in (2, 3))
    return estimate(model, on, choice, three + (three - two) * (N - round(3 * u)) / (round(3 * u) - round(2 * u)))


def choices(model: ModelSizes, on: Cluster, global_batch: int) -> Iterator[Choice]:
    """Layouts worth a look, without the variants that only take more memory. Replicas share the optimizer's state
    (ZeRO-1): under this cost model that is never worse.
    """
    for P in _stages(model, on):
        for width in _widths(global_batch, on.count // P, P):
            for F, V, b in product(_shards(width, on), _chunks(model, P), _SIZES):
                N, rest = divmod(global_batch, width * b)
                if rest or N < P:
                    continue
                for U, recompute in product(_units(N, P), ("none", *["selective"] * (V > 1), "full")):
                    u = max(split_units(N, U))
                    for ramp in _ramps(P, recompute):
                        limit = memory_limit(u, P, V, recompute, ramp)
                        yield Choice(P, V, F, width // F, width > F, N, b, U, limit, False, recompute, "unit")


def choice_of(parallel: ParallelSection) -> Choice:
    """The layout of a configuration, its automatic values filled in."""
    spec = parallel.schedule()
    given = {name: getattr(parallel, name) for name in Choice._fields}
    return Choice(**{**given, "unit": spec.unit, "memory_limit": spec.memory_limit})


class _Ranking:
    """The best estimate that fits of each mesh; of each ``P`` and recomputation what comes closest and does not fit;
    and what takes the least memory of all.
    """

    def __init__(self, model: ModelSizes, on: Cluster, global_batch: int) -> None:
        self.fits: dict[tuple[int, ...], Estimate[Choice]] = {}
        self.refused: dict[tuple[int, str], Estimate[Choice]] = {}
        self.least: Estimate[Choice] | None = None
        self.considered = 0
        for choice in choices(model, on, global_batch):
            best = self.fits.get(_mesh(choice))
            work = cut(model, on, choice.stages, choice.chunks, choice.microbatch_size).work[choice.recompute]
            if best and best.step_s <= choice.microbatches * max(work):
                continue  # its tasks alone take longer
            if not self._add(choice, estimate(model, on, choice), on):
                continue  # variants take more memory
            variants = [choice]
            if choice.shards > 1 and choice.chunks > 1:
                variants.append(choice._replace(prefetch=True))
            if choice.shards > 1 and choice.unit < choice.microbatches:
                variants += [each._replace(reduce="step") for each in variants]
            for variant in variants[1:]:
                self._add(variant, estimate(model, on, variant), on)

    def _add(self, choice: Choice, step: Estimate[Choice], on: Cluster) -> bool:
        self.considered += 1
        good = step.memory_bytes <= on.device.usable
        if good:
            best = self.fits.get(_mesh(choice))
            if best is None or _score(step, on) < _score(best, on):
                self.fits[_mesh(choice)] = step
        else:
            closest = self.refused.get((choice.stages, choice.recompute))
            if closest is None or step.memory_bytes < closest.memory_bytes:
                self.refused[choice.stages, choice.recompute] = step
        if self.least is None or step.memory_bytes < self.least.memory_bytes:
            self.least = step
        return good


def _score(step: Estimate[Choice], on: Cluster) -> float:
    """Seconds of a step, and a little for all that moves, so that of equals the quieter one is taken."""
    return step.step_s + _MOVING * sum(step.traffic.values()) / on.intra.bandwidth


def _rivals(model: ModelSizes, on: Cluster, global_batch: int) -> Iterator[Rival]:
    """3D parallelism on the same devices for the same batch."""
    for T in (2**k for k in range(on.per_node.bit_length())):
        for P in _stages(model, on):
            for D in _widths(global_batch, on.count // (T * P), 1):
                for b, V, recompute in product(_SIZES, _chunks(model, P), ("none", "full")):
                    N, rest = divmod(global_batch, D * b)
                    if N and not rest and (V == 1 or (P > 1 and N % P == 0)):
                        yield Rival(T, P, V, D, N, b, recompute)


def _stages(model: ModelSizes, on: Cluster) -> list[int]:
    most = min(model.layers, on.count)
    return [P for P in range(1, most + 1) if on.count % P == 0 or model.layers % P == 0 or P & (P - 1) == 0]


def _widths(global_batch: int, most: int, microbatches: int) -> list[int]:
    """Micro-batches at a time, F·R: the largest that divide the batch and leave at least ``microbatches`` of them."""
    most = min(most, global_batch // microbatches)
    return [width for width in range(most, 0, -1) if global_batch % width == 0][:_WIDTHS]


def _shards(width: int, on: Cluster) -> Iterator[int]:
    """Members of a stage: those that fill whole nodes, or leave room for whole others."""
    for F in range(1, min(width, _LARGEST_STAGE) + 1):
        if width % F == 0 and (on.per_node % F == 0 or F % on.per_node == 0 or width == F):
            yield F


def _chunks(model: ModelSizes, P: int) -> list[int]:
    return sorted({V for V in (*_CHUNKS, model.layers // P) if model.layers >= P * V})


def _units(N: int, P: int) -> list[int]:
    return sorted({min(N, max(P, round(multiple * P))) for multiple in _UNITS} | {N})


def _ramps(P: int, recompute: str) -> list[int]:
    """Chunk activations beyond those of whole units; what recomputes everything goes on with one."""
    return [1] if P == 1 else [*[1] * (recompute == "full"), P, 2 * P]


def _nothing_fits(model: ModelSizes, on: Cluster, global_batch: int, least: Estimate[Choice] | None) -> ConfigError:
    if least is None:
        return ConfigError(
            f"--global-batch = {global_batch}: no layout of {on.count} devices divides it into whole micro-batches"
        )
    missing = least.memory_bytes - on.device.usable
    kind, size = max(least.memory.items(), key=lambda item: item[1])
    ways = []
    for more in (replace(on, count=on.count * factor) for factor in (2, 4, 8)):
        steps = (estimate(model, more, choice) for choice in choices(model, more, global_batch))
        if any(step.memory_bytes <= on.device.usable for step in steps):
            ways.append(f"--gpus {more.count}")
            break
    for name in device_names():
        other = cluster(name, on.count, on.nodes)
        if other.device.usable >= least.memory_bytes and other.device.dtype == on.device.dtype:
            ways.append(f"--device {name}")
            break
    advice = f"; {' or '.join(ways)} would do" if ways else "; shorter sequences (--seq) take less"
    return ConfigError(
        f"--device = {on.device.name}: no plan fits its {on.device.usable / 1e9:.1f} GB. The smallest, {least.choice}, "
        f"takes {least.memory_bytes / 1e9:.1f} GB, {missing / 1e9:.1f} GB too much, of it {kind} {size / 1e9:.1f} GB"
        f"{advice}"
    )
