"""What a step takes with a layout: time, memory and bytes, in closed form, before anything is run or built.

Time of a step = tasks and ramp + stalls + gathers + reduces + replicas + optimizer:

- A *task* takes its FLOPs over ``peak * efficiency`` of the device, or what was measured (``measured.py``). ``B`` is
  twice the forward's attention and once its matrices, ``W`` once its matrices; a recomputed chunk runs its forward
  twice.
- *Tasks and ramp* are the lower bound of the schedule: the fullest stage's work, after the first micro-batch's way to
  it. *Stalls* come with units below ``2P``, and with a live limit that leaves a ramp ``x`` of less than ``2P`` chunk
  activations. By replay (P 4 to 16, V 2 and 4, costs near 1, 1.15, 0.9) a unit ``u`` with ``y = 2 - u/P`` then loses
  about ``P (0.3 F y⁴ + 2 comm y²)`` to the first, and ``2.4 P F (1 - x/2P)`` to the second, or 1.6 instead of 2.4 if
  all chunks are recomputed.
- Messages between stages overlap with tasks, but for the ramp, unless the link is too slow for all of them.
- *Gathers* are waited for, for ``GATHER`` stands before the task that needs it; with ``prefetch`` but for the time of
  one task. The gather of a stage that is alone (``F = 1``) is free.
- *Reduces* overlap with the rest of their unit; the last one is waited for. With gathers they share one link.
- *Replicas* sum gradients after the last reduce, and nothing overlaps with it.
- The *optimizer* reads and writes its state once.

Members are placed as a run places them (``actors/assignment.py``): the ``F`` of a stage on one node if they fit there,
and neighbouring stages on different nodes. So shards exchange over the link inside a node while ``F`` is at most its
devices, in strides of 1 (``hardware.py``); messages between stages, counted in strides of ``F R``, and sums over
replicas, in strides of ``P F``, leave it as soon as the run does not fit on one.

Not counted: the driver's round (about a millisecond), kernels that share a device with transfers, input, checkpoints,
faults.

Memory is that of the fullest stage at its fullest, by kind as in a run. Per member, with Ψ parameters in the stage and
bf16: ``2Ψ/F + 12Ψ/(F or F R)`` weights and moments, ``4Ψ/F`` gradient shards, ``2Ψ/V`` for each resident chunk,
``4Ψ/V`` for each gradient buffer (open, and in flight if ``F > 1``), and activations up to the live limit, whole from
``F`` to ``W``.

The closed form ranks layouts. Those that are shown have its tasks, ramp, stalls, numbers of gathers and memory replaced
by a replay of their own program (``rating.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from zeropp_ray.layout import Layout, Member
from zeropp_ray.metrics import kinds
from zeropp_ray.placement import model_chunk
from zeropp_ray.planner.hardware import Cluster
from zeropp_ray.planner.sizes import ModelSizes, even_cut
from zeropp_ray.schedule.policies import POLICIES
from zeropp_ray.schedule.units import split_units

UNIT_STALL = 0.3
LIMIT_STALL = {"none": 2.4, "selective": 2.4, "full": 1.6}
"""Forwards that each of ``P`` stages loses in a unit, see above."""
MASTER = 4  # bytes of an element of masters, moments and gradients
MESSAGES = 6  # receives posted ahead on two edges, and sends that are not drained


class Choice(NamedTuple):
    """A layout; the names are those of ``[parallel]`` in a run's configuration."""

    stages: int
    chunks: int
    shards: int
    replicas: int
    zero1: bool
    microbatches: int
    microbatch_size: int
    unit: int
    memory_limit: float
    prefetch: bool
    recompute: str
    reduce: str
    policy: str = "zeropp"

    @property
    def members(self) -> int:
        return self.stages * self.shards * self.replicas

    @property
    def layout(self) -> Layout:
        """The mesh."""
        return Layout(
            stages=self.stages,
            chunks=self.chunks,
            shards=self.shards,
            replicas=self.replicas,
            zero1=self.zero1,
            placement=POLICIES[self.policy].placement,
        )

    def __str__(self) -> str:
        parts = [self.policy] * (self.policy != "zeropp")
        parts += [f"P{self.stages} V{self.chunks} F{self.shards} R{self.replicas}"]
        parts += ["zero1"] * self.zero1 + [f"b{self.microbatch_size} N{self.microbatches} U{self.unit}"]
        parts += [f"recompute {self.recompute}"] * (self.recompute != "none")
        parts += ["prefetch"] * self.prefetch + ["reduce step"] * (self.reduce == "step")
        return " ".join(parts)


class Replayed(NamedTuple):
    """What a replay of a layout's own program says in place of the closed form."""

    makespan_s: float  # of the tasks, and of waiting for one another
    gathers: tuple[float, ...]  # in a step, of each chunk of a stage
    reduces: tuple[float, ...]
    memory: Mapping[str, float]  # bytes of the fullest member, by kind


class Rival(NamedTuple):
    """A layout of 3D parallelism, ``T x P x D`` devices; compared with and not run."""

    tensor: int
    stages: int
    chunks: int
    replicas: int
    microbatches: int
    microbatch_size: int
    recompute: str

    @property
    def members(self) -> int:
        return self.tensor * self.stages * self.replicas

    def __str__(self) -> str:
        mesh = f"T{self.tensor} P{self.stages} V{self.chunks} D{self.replicas}"
        again = " recompute full" if self.recompute == "full" else ""
        return f"{mesh} b{self.microbatch_size} N{self.microbatches}{again}"


L = TypeVar("L", Choice, Rival)


@dataclass(frozen=True)
class Estimate(Generic[L]):
    """A step on paper. Seconds by what they go to, bytes of the fullest member by kind, bytes that a member sends in a
    step by what for and over which link.
    """

    choice: L
    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    traffic: Mapping[str, float]
    bubble: float  # part of the stages' time, exchanges aside, in which nothing is computed
    replayed: bool = False

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())


def memory_limit(unit: int, stages: int, chunks: int, recompute: str, ramp: int) -> float:
    """Live activations in whole-stage micro-batches: a unit's of all chunks but the last one, which a recomputed chunk
    does not keep, and ``ramp`` of chunks. With a ramp of ``2P`` and units from ``2P`` on the limit costs no time.
    """
    return ((unit * (chunks - 1) if recompute == "none" else 0) + ramp) / chunks


def ramp(choice: Choice) -> float:
    """The inverse of :func:`memory_limit`, in chunk activations."""
    kept = max(split_units(choice.microbatches, choice.unit)) * (choice.chunks - 1) if choice.recompute == "none" else 0
    return choice.memory_limit * choice.chunks - kept


@dataclass(frozen=True)
class Cut:
    """A model in chunks, by stage and chunk of the stage: blocks, parameters (tied ones at both ends), and seconds of
    each task for a micro-batch; ``work`` is the sum of a stage's tasks, by what is recomputed.
    """

    blocks: tuple[tuple[int, ...], ...]
    elements: tuple[tuple[float, ...], ...]
    F: tuple[tuple[float, ...], ...]
    B: tuple[tuple[float, ...], ...]
    W: tuple[tuple[float, ...], ...]
    work: Mapping[str, tuple[float, ...]]


@lru_cache(maxsize=4096)
def cut(
    model: ModelSizes, cluster: Cluster, stages: int, chunks: int, microbatch_size: int, placement: str = "looped"
) -> Cut:
    """The model on ``P`` stages of ``V`` chunks, as a run cuts it."""
    last = stages * chunks - 1
    ranges = even_cut(model.layers, last + 1, round(model.head.flops / model.block.flops, 6))

    def table(of_embed: float, each: float, of_head: float) -> tuple[tuple[float, ...], ...]:
        values = [count * each + (c == 0) * of_embed + (c == last) * of_head for c, count in enumerate(ranges)]
        return tuple(tuple(values[model_chunk(placement, stages, p, v)] for v in range(chunks)) for p in range(stages))

    F, B, W = (table(*parts) for parts in zip(*_task_seconds(model, cluster, microbatch_size), strict=True))
    once = [sum(f) + sum(b) + sum(w) for f, b, w in zip(F, B, W, strict=True)]
    return Cut(
        blocks=tuple(tuple(ranges[model_chunk(placement, stages, p, v)] for v in range(chunks)) for p in range(stages)),
        elements=table(model.embed.elements, model.block.elements, model.head.elements),
        F=F,
        B=B,
        W=W,
        work={
            "none": tuple(once),
            "full": tuple(work + sum(f) for work, f in zip(once, F, strict=True)),
            "selective": tuple(work + sum(f[:-1]) for work, f in zip(once, F, strict=True)),
        },
    )


def _task_seconds(model: ModelSizes, cluster: Cluster, microbatch_size: int) -> tuple[tuple[float, float, float], ...]:
    """Seconds of F, B and W of a micro-batch, for the embedding, one block, and the head."""
    if model.measured:
        assert microbatch_size == model.measured.microbatch_size, "no other size was measured"
        return model.measured.embed, model.measured.block, model.measured.head
    rate = cluster.device.peak * cluster.device.efficiency / microbatch_size
    block, head = (
        (part.flops / rate, (2 * part.flops - part.linear_flops) / rate, part.linear_flops / rate)
        for part in (model.block, model.head)
    )
    return (0.0, 0.0, 0.0), block, head


def cut_of(model: ModelSizes, cluster: Cluster, choice: Choice) -> Cut:
    """The model as ``choice`` has it cut."""
    placement = POLICIES[choice.policy].placement
    return cut(model, cluster, choice.stages, choice.chunks, choice.microbatch_size, placement)


def estimate(model: ModelSizes, cluster: Cluster, choice: Choice, found: Replayed | None = None) -> Estimate[Choice]:
    """A step of ``choice``. ``found``: by replay; None: closed form, for ZeroPP's own policy alone."""
    assert found or choice.policy == "zeropp", f"no closed form for {choice.policy}"
    parts = cut_of(model, cluster, choice)
    seconds = _pipeline(model, cluster, choice, parts, found)
    works = parts.work[choice.recompute]
    bubble = max(0.0, 1 - choice.microbatches * sum(works) / len(works) / sum(seconds.values()))
    traffic = _exchanges(model, cluster, choice, parts, seconds, found)
    if found:
        return Estimate(choice, seconds, found.memory, traffic, bubble, True)
    return Estimate(choice, seconds, memory_of(model, cluster, choice), traffic, bubble)


def memory_of(model: ModelSizes, cluster: Cluster, choice: Choice) -> dict[str, float]:
    """Bytes of the fullest member at its fullest, by kind, in closed form."""
    parts = cut_of(model, cluster, choice)
    largest = max(range(choice.stages), key=lambda p: max(parts.elements[p]))
    stages = {0, largest, choice.stages - 1}
    return max((_memory(model, cluster, choice, parts, p) for p in stages), key=lambda each: sum(each.values()))


def hop(model: ModelSizes, cluster: Cluster, choice: Choice) -> float:
    """Seconds that a micro-batch takes from one stage to the next."""
    message = model.width * choice.microbatch_size * model.seq_len * model.hidden
    return cluster.send(message, choice.stages, choice.shards * choice.replicas) if choice.stages > 1 else 0.0


def _pipeline(
    model: ModelSizes, cluster: Cluster, choice: Choice, parts: Cut, found: Replayed | None
) -> dict[str, float]:
    """Seconds of the tasks and of waiting for others."""
    P, N = choice.stages, choice.microbatches
    works, way = [N * work for work in parts.work[choice.recompute]], hop(model, cluster, choice)
    seconds = {"tasks": max(works), "ramp": 0.0, "stalls": 0.0}
    if found:
        seconds["stalls"] = found.makespan_s - seconds["tasks"]
    elif P > 1:
        arrivals = accumulate((forward[0] + way for forward in parts.F[:-1]), initial=0.0)
        seconds["ramp"] = max(map(sum, zip(works, arrivals, strict=True))) - seconds["tasks"]
        units = split_units(N, choice.unit)
        short = max(0.0, 2 - max(units) / P) if choice.chunks > 1 else 0.0
        lost = parts.F[0][0] * UNIT_STALL * short**4 + 2 * way * short**2
        lost += parts.F[0][0] * LIMIT_STALL[choice.recompute] * max(0.0, 1 - ramp(choice) / (2 * P))
        seconds["stalls"] = len(units) * P * lost
    if P > 1:  # a device sends 2V messages a micro-batch, one after the other
        sending = 2 * choice.chunks * N * (way - cluster.send(0.0, P, choice.shards * choice.replicas))
        seconds["stalls"] += max(0.0, sending - sum(seconds.values()))
    return seconds


def _exchanges(
    model: ModelSizes, cluster: Cluster, choice: Choice, parts: Cut, seconds: dict[str, float], found: Replayed | None
) -> dict[str, float]:
    """Bytes that a member sends in a step; adds the seconds of what it waits for."""
    P, V, F, R = choice.stages, choice.chunks, choice.shards, choice.replicas
    units = split_units(choice.microbatches, choice.unit)
    K, u = len(units), max(units)
    chunks = [max(column) for column in zip(*parts.elements, strict=True)]
    stage = max(stage_elements(model, choice, parts, p) for p in range(P))

    counts: Sequence[float] = [1] if V == 1 else [K + 1, *[2 * K] * (V - 2), K]
    rounds: Sequence[float] = [K if choice.reduce == "unit" else 1] * V
    if found:
        counts, rounds = found.gathers, found.reduces
    gathers = [cluster.gather(model.width * size, F, 1) for size in chunks]
    tasks = [min(parts.F[0][v - 1], parts.B[0][v - 1]) * choice.prefetch for v in range(V)]
    seconds["gathers"] = sum(n * max(0.0, t - task) for n, t, task in zip(counts, gathers, tasks, strict=True))

    reduces = [cluster.gather(MASTER * size, F, 1) for size in chunks]
    behind = [u * (b + w) for b, w in zip(parts.B[0], parts.W[0], strict=True)]
    seconds["reduces"] = min(reduces[0], behind[0])  # the last one has nothing left to be behind
    seconds["reduces"] += sum(n * max(0.0, t - task) for n, t, task in zip(rounds, reduces, behind, strict=True))
    on_link = sum(n * t for n, t in zip((*counts, *rounds), (*gathers, *reduces), strict=True))
    seconds["reduces"] += max(0.0, on_link - sum(seconds.values()))

    second = model.width if choice.zero1 else MASTER  # after the sums: new weights, or the rest of an all-reduce
    seconds["replicas"] = sum(cluster.gather(size * stage / F, R, P * F) for size in (MASTER, second))
    pieces = F * (R if choice.zero1 else 1)
    seconds["optimizer"] = (7 * MASTER + model.width) * stage / pieces / cluster.device.memory_bandwidth

    message = model.width * choice.microbatch_size * model.seq_len * model.hidden * (P > 1)
    gathered, reduced = (sum(n * size for n, size in zip(each, chunks, strict=True)) for each in (counts, rounds))
    within = cluster.over(F, 1)
    return {
        f"gathers, {within}": model.width * gathered * (F - 1) / F,
        f"reduces, {within}": MASTER * reduced * (F - 1) / F,
        f"stages, {cluster.over(P, F * R)}": 2.0 * V * choice.microbatches * message,
        f"replicas, {cluster.over(R, P * F)}": (MASTER + second) * stage / F * (R - 1) / R,
    }


def stage_elements(model: ModelSizes, choice: Choice, parts: Cut, p: int) -> float:
    """Parameters of stage ``p``; what its embedding and head share counts once."""
    return sum(parts.elements[p]) - model.tied * (p == 0 and ends_meet(choice))


def ends_meet(choice: Choice) -> bool:
    """Whether the first stage holds the first and the last model chunk."""
    return choice.stages == 1 or (POLICIES[choice.policy].placement == "v" and choice.chunks % 2 == 0)


def between_steps(model: ModelSizes, cluster: Cluster, choice: Choice, parts: Cut, p: int) -> dict[str, float]:
    """Bytes that a member of stage ``p`` holds from the first step on, by kind."""
    F, width = choice.shards, model.width
    pieces = F * (choice.replicas if choice.zero1 else 1)
    stage, largest = stage_elements(model, choice, parts, p), max(parts.elements[p])
    now = dict.fromkeys(kinds.KINDS, 0.0)
    now[kinds.WEIGHTS] = width * stage / F + (2 + (width != MASTER)) * MASTER * stage / pieces
    now[kinds.GRADIENT_SHARDS] = MASTER * stage / F + MASTER * stage / pieces * (pieces != F)
    if choice.reduce == "step":
        now[kinds.GRADIENT_BUFFERS] = MASTER * stage
    else:  # one open, and one in flight while there is a next one to open
        more = choice.chunks > 1 or len(split_units(choice.microbatches, choice.unit)) > 1
        now[kinds.GRADIENT_BUFFERS] = MASTER * largest * (1 + (F > 1 and more))
    if cluster.device.host:
        guarded = choice.layout.guarded(Member(p, 0, 0))
        of = [p] if guarded is None else [p, guarded.p]
        now[kinds.COPIES] = 2 * 3 * MASTER * sum(stage_elements(model, choice, parts, q) for q in of) / pieces
    return now


def _memory(model: ModelSizes, cluster: Cluster, choice: Choice, parts: Cut, p: int) -> dict[str, float]:
    """Bytes of a member of stage ``p`` at its fullest, by kind."""
    each = model.width * choice.microbatch_size
    largest = sorted(parts.elements[p])[-2:]
    # The loss keeps its log-softmax, in fp32, and makes two gradients of that size.
    logits = MASTER * choice.microbatch_size * model.head.widest * (p == choice.stages - 1)
    now = between_steps(model, cluster, choice, parts, p)
    now[kinds.RESIDENT] = model.width * (sum(largest) if choice.prefetch else max(largest))
    now[kinds.ACTIVATIONS], now[kinds.CHUNK_INPUTS] = _activations(model, choice, parts, p)
    now[kinds.ACTIVATIONS] += logits
    now[kinds.MESSAGES] = MESSAGES * each * model.seq_len * model.hidden * (choice.stages > 1)
    now[kinds.REST] = max(3 * each * model.block.widest, 2 * logits)
    return now


def _activations(model: ModelSizes, choice: Choice, parts: Cut, p: int) -> tuple[float, float]:
    """Bytes of the live activations, whole until their ``W``, and of the inputs of recomputed chunks.

    Of the last chunk of the model the head's are only what waits for ``W``: its ``B`` follow its ``F`` at once.
    """
    P, V, each = choice.stages, choice.chunks, model.width * choice.microbatch_size
    kept = [count * model.block.saved * each for count in parts.blocks[p]]
    kept[0] += model.embed.saved * each * (p == 0)
    kept[-1] += model.head.stashed * each * (p == P - 1)
    u = max(split_units(choice.microbatches, choice.unit))
    live = math.floor(min(choice.memory_limit, choice.microbatches) * V + 1e-9)
    if choice.recompute == "none":
        others = min(live, u * (V - 1))
        return sum(kept[:-1]) * others / max(1, V - 1) + kept[-1] * (live - others), 0.0
    inputs = min(u * (V - (choice.recompute == "selective")) + P, choice.microbatches * V)
    return live * max(kept), inputs * each * model.seq_len * model.hidden
