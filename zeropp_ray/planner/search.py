"""Which layout to take: all that are worth a look, by estimated step time, among those whose memory fits.

The closed form of ``cost_model.py`` ranks tens of thousands; the best are then rated by a replay of their own program
(``rating.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from zeropp_ray.config import ParallelSection
from zeropp_ray.errors import ConfigError
from zeropp_ray.planner.cost_model import Choice, Estimate, Rival, cut, estimate, memory_limit, memory_of
from zeropp_ray.planner.hardware import Cluster, cluster, device_names
from zeropp_ray.planner.rating import rated, task_costs
from zeropp_ray.planner.sizes import ModelSizes
from zeropp_ray.planner.tensor_parallel import estimate_3d
from zeropp_ray.schedule import POLICIES, split_units

_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SIZES = (1, 2, 4, 8, 16)  # of micro-batches
_UNITS = (1, 1.5, 2, 4)  # in multiples of P; and the whole step
_WIDTHS = 3  # how many numbers of micro-batches at a time are tried for each P, the largest that the batch allows
_LARGEST_STAGE = 64  # members; a gather over more is mostly latency
_REPLAYED = 3  # so many times as many as are shown
_MOVING = 0.01  # part of the time of traffic that counts even where tasks hide it
_OTHERS = ("1f1b", "interleaved", "zb-h1", "interleaved-zb", "zb-v")  # policies whose memory does not grow with N


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
        raise _nothing_fits(model, on, global_batch)
    best: list[Estimate[Choice]] = []
    for step in sorted(ranking.fits.values(), key=_step_s):
        if len(best) < _REPLAYED * show:
            again = rated(model, on, step.choice)
            best += [again] * (again.memory_bytes <= on.device.usable)
    if not best:
        raise _nothing_fits(model, on, global_batch)
    refused = [each for each in ranking.refused.values() if each.step_s < min(map(_step_s, best))]
    refused.sort(key=lambda each: each.memory_bytes)
    refused = [rated(model, on, each.choice) for each in refused[: 2 * show]]
    # The closed form counts activations whole until their W, so some of these fit after all.
    best += [each for each in refused if each.memory_bytes <= on.device.usable]
    best.sort(key=_step_s)
    refused = [each for each in refused if each.memory_bytes > on.device.usable and each.step_s < best[0].step_s]
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


def other_policies(model: ModelSizes, on: Cluster, plan: Choice) -> Iterator[Estimate[Choice]]:
    """The same mesh, batch and residency under other policies of the engine: of each the least recomputation that fits,
    and with V to choose the faster of two; what takes the least memory, if nothing fits.
    """
    for name in _OTHERS:
        known = POLICIES[name]
        steps = []
        for V in {known.chunks} if known.chunks else {2, max(2, plan.chunks)}:
            for recompute in ("none", *["selective"] * (V > 1), "full"):
                if V * plan.stages > model.layers:
                    break
                same = plan._replace(chunks=V, policy=name, recompute=recompute, prefetch=plan.prefetch and V > 1)
                unit = plan.microbatches if known.unit == "N" else plan.stages
                steps.append(rated(model, on, same._replace(unit=unit)))
                if steps[-1].memory_bytes <= on.device.usable:
                    break
        fitting = [step for step in steps if step.memory_bytes <= on.device.usable]
        if steps:
            yield min(fitting, key=_step_s) if fitting else min(steps, key=lambda step: step.memory_bytes)


def choices(model: ModelSizes, on: Cluster, global_batch: int, least: bool = False) -> Iterator[Choice]:
    """Layouts worth a look, without the variants that only take more memory. Replicas share the optimizer's state
    (ZeRO-1): under this cost model that is never worse. ``least``: those of each mesh that may take the least memory.
    """
    some = slice(1 if least else None)
    for P in _stages(model, on):
        for width in _widths(global_batch, on.count // P, P):
            for F, V, b in product(_shards(width, on), _chunks(model, P), _sizes(model)[some]):
                N, rest = divmod(global_batch, width * b)
                if rest or N < P:
                    continue
                for U, recompute in product(_units(N, P)[some], ("none", *["selective"] * (V > 1), "full")):
                    u = max(split_units(N, U))
                    for ramp in _ramps(P, recompute)[some]:
                        limit = memory_limit(u, P, V, recompute, ramp)
                        # One chunk needs no second buffer if it is reduced once.
                        reduce = "unit" if V > 1 else "step"
                        yield Choice(P, V, F, width // F, width > F, N, b, U, limit, False, recompute, reduce)


def choice_of(parallel: ParallelSection, model: ModelSizes, on: Cluster) -> Choice:
    """The layout of a configuration, its automatic values filled in as for a run whose tasks take what ``model`` takes
    on these devices."""
    choice = Choice(**{name: getattr(parallel, name) for name in Choice._fields})
    if choice.stages * choice.chunks > model.layers:
        raise ConfigError(
            f"parallel.stages x parallel.chunks = {choice.stages * choice.chunks}: each chunk needs a block and the "
            f"model has {model.layers}; use stages x chunks <= {model.layers}"
        )
    spec = parallel.schedule(task_costs(model, on, choice)[0])
    return choice._replace(unit=spec.unit, memory_limit=spec.memory_limit, reduce=spec.reduce)


class _Ranking:
    """The best estimate that fits of each mesh; of each ``P`` and recomputation what comes closest and does not fit."""

    def __init__(self, model: ModelSizes, on: Cluster, global_batch: int) -> None:
        self.fits: dict[tuple[int, ...], Estimate[Choice]] = {}
        self.refused: dict[tuple[int, str], Estimate[Choice]] = {}
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
            if choice.shards > 1 and choice.chunks > 1 and choice.unit < choice.microbatches:
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
        return good


def _score(step: Estimate[Choice], on: Cluster) -> float:
    """Seconds of a step, and a little for all that moves, so that of equals the quieter one is taken."""
    return step.step_s + _MOVING * sum(step.traffic.values()) / on.intra.bandwidth


def _rivals(model: ModelSizes, on: Cluster, global_batch: int) -> Iterator[Rival]:
    """3D parallelism on the same devices for the same batch."""
    for T in (2**k for k in range(on.per_node.bit_length())):
        for P in _stages(model, on):
            for D in _widths(global_batch, on.count // (T * P), 1):
                for b, V, recompute in product(_sizes(model), _chunks(model, P), ("none", "full")):
                    N, rest = divmod(global_batch, D * b)
                    if N and not rest and (V == 1 or (P > 1 and N % P == 0)):
                        yield Rival(T, P, V, D, N, b, recompute)


def _sizes(model: ModelSizes) -> tuple[int, ...]:
    """Of micro-batches: what was measured tells nothing of others."""
    return (model.measured.microbatch_size,) if model.measured else _SIZES


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


def _smallest(model: ModelSizes, on: Cluster, global_batch: int) -> tuple[float, Choice, dict[str, float]] | None:
    """What takes the least memory: its bytes, in all and by kind."""
    each = choices(model, on, global_batch, least=True)
    memories = ((choice, memory_of(model, on, choice)) for choice in each)
    sizes = ((sum(memory.values()), choice, memory) for choice, memory in memories)
    return min(sizes, key=lambda size: size[0], default=None)


def _nothing_fits(model: ModelSizes, on: Cluster, global_batch: int) -> ConfigError:
    """By how much, what takes it, and what would do: a device, more of these, shorter sequences."""
    least = _smallest(model, on, global_batch)
    if least is None:
        return ConfigError(
            f"--global-batch = {global_batch}: no layout of {on.count} devices divides it into whole micro-batches"
        )
    size, choice, memory = least
    largest = sorted(memory.items(), key=lambda item: -item[1])[:3]
    ways = []
    for name in device_names():
        other = cluster(name, on.count, on.nodes)
        if other.device.usable >= size and other.device.dtype == on.device.dtype:
            ways.append(f"--device {name}")
            break
    for factor in (2, 4, 8):
        more = _smallest(model, replace(on, count=on.count * factor), global_batch)
        if more and more[0] <= on.device.usable:
            ways.append(f"--gpus {on.count * factor}")
            break
    shorter = model
    while shorter.seq_len >= 2 and not model.measured:
        shorter = shorter.halved()
        less = _smallest(shorter, on, global_batch)
        if less and less[0] <= on.device.usable:
            ways.append(f"--seq {shorter.seq_len}")
            break
    return ConfigError(
        f"--device = {on.device.name}: no plan fits its {on.device.usable / 1e9:.1f} GB. The smallest, {choice}, takes "
        f"{size / 1e9:.1f} GB, {(size - on.device.usable) / 1e9:.1f} GB too much, most of it "
        f"{', '.join(f'{kind} {bytes / 1e9:.1f}' for kind, bytes in largest)}"
        f"; {' or '.join(ways) or 'nothing that was tried'} would do"
    )
