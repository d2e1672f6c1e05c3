"""How much tensor memory a member takes, by kind, before it takes it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from zeropp_ray.config import RunConfig
from zeropp_ray.layout import Member
from zeropp_ray.metrics import kinds
from zeropp_ray.planner.peak import StageBytes, TaskBytes, peak
from zeropp_ray.precision import Precision
from zeropp_ray.schedule import Op, Sizes

if TYPE_CHECKING:
    from zeropp_ray.models.describe import ParameterSet
    from zeropp_ray.planner.plan import Plan


def predict_memory(plan: Plan, config: RunConfig, stage: int) -> dict[str, int]:
    """Bytes of one member of ``stage`` at its fullest in a step, by kind.

    The stage's program is replayed with the sizes of what each instruction makes and frees (``peak.py``). Frozen
    parameters have neither moments nor gradients; those that several stages share are whole at each and sharded there.
    """
    owned, shards, pieces = plan.layout.owned(stage), plan.layout.shards, plan.layout.pieces
    compute, master = (dtype.itemsize for dtype in Precision.of(config.train.dtype))
    held = [each for each in plan.sets if {*owned} & {*each.chunks}]
    now = _between_steps(plan, stage, held, compute, master)
    if config.recovery.copies:
        now[kinds.COPIES] = master * _copied(plan, stage)

    def resident(chunks: Collection[int]) -> int:
        used = {owned[v] for v in chunks}
        return compute * _padded([each for each in held if used & {*each.chunks}], pieces)

    def incoming(v: int) -> int:
        reduced = _padded([each for each in held if each.trained and owned[v] in each.chunks], pieces)
        return master * reduced // shards * (shards - 1)

    fullest = peak(
        plan.program.ranks[stage],
        StageBytes(
            between_steps=now,
            tasks=[_task_sizes(plan, config, chunk) for chunk in owned],
            recomputed=plan.program.spec.recomputed,
            message=message_bytes(plan, config),
            before=[chunk > 0 for chunk in owned],
            behind=[chunk + 1 < len(plan.ranges) for chunk in owned],
            resident=resident,
            incoming=[incoming(v) for v in range(len(owned))],
            exchanged=master * _exchanged(plan, held),
        ),
    )
    return {kind: int(size) for kind, size in fullest.items()}


def message_bytes(plan: Plan, config: RunConfig) -> int:
    """Of an activation, or of its gradient, between two stages."""
    width = Precision.of(config.train.dtype).compute.itemsize
    return width * config.parallel.microbatch_size * plan.description.seq_len * plan.description.hidden


def chunk_sizes(plan: Plan, config: RunConfig) -> Sizes:
    """Bytes that each model chunk holds while a step runs; of parameters and gradients as the members of a stage see
    them, unsharded.
    """
    compute, master = (dtype.itemsize for dtype in Precision.of(config.train.dtype))
    rows = []
    for chunk in range(len(plan.ranges)):
        used = [each for each in plan.sets if chunk in each.chunks]
        parameters = compute * _padded(used, plan.layout.pieces)
        gradients = master * _padded([each for each in used if each.trained], plan.layout.pieces)
        sizes = _task_sizes(plan, config, chunk)
        rows.append((parameters, gradients, sizes.saved, sizes.stashed, sizes.input))
    return Sizes(*zip(*rows, strict=True))


def _between_steps(plan: Plan, stage: int, held: list[ParameterSet], compute: int, master: int) -> dict[str, int]:
    """Bytes that are there from the first step on; ``compute`` and ``master``: those of an element."""
    shards, pieces = plan.layout.shards, plan.layout.pieces
    trained = [each for each in held if each.trained]
    now = dict.fromkeys(kinds.KINDS, 0)
    now[kinds.WEIGHTS] = compute * _padded(held, pieces) // shards + master * 2 * _padded(trained, pieces) // pieces
    if master != compute:  # else masters are views of the shards
        now[kinds.WEIGHTS] += master * _padded(held, pieces) // pieces
    now[kinds.GRADIENT_SHARDS] = master * _padded(trained, pieces) // shards
    if pieces != shards:  # what the replicas' gradients are summed into
        now[kinds.GRADIENT_SHARDS] += master * _padded(trained, pieces) // pieces
    now[kinds.GRADIENT_BUFFERS] = master * _buffered(plan, stage, trained)
    now[kinds.GRADIENT_BUFFERS] += (master + compute * (master != compute)) * _side(plan, trained)
    return now


def state_elements(plan: Plan, stage: int) -> tuple[int, int]:
    """Elements of the state that a member of ``stage`` owns: what steps change, which is masters, two moments and the
    count of commits; and what they do not, frozen masters.
    """
    pieces, owned = plan.layout.pieces, plan.layout.owned(stage)
    held = [each for each in plan.sets if {*owned} & {*each.chunks}]
    trained, frozen = ([each for each in held if each.trained is kind] for kind in (True, False))
    return 3 * _padded(trained, pieces) // pieces + 1, _padded(frozen, pieces) // pieces


def _copied(plan: Plan, stage: int) -> int:
    """Elements of the copies at a member: two versions of what steps change, one of what they do not; of its own state,
    and of the state that is sent to it.
    """
    guarded = plan.layout.guarded(Member(stage, 0, 0))
    elements = 0
    for p in [stage] if guarded is None else [stage, guarded.p]:
        changing, frozen = state_elements(plan, p)
        elements += 2 * changing + frozen
    return elements


def _exchanged(plan: Plan, held: list[ParameterSet]) -> int:
    """Elements that come at the end of a step. What several stages share comes once from each of them; then a copy of
    each replica's gradients, or with ZeRO-1 the others' parts of the piece that is owned here, of two sets at a time.
    """
    shards, pieces, replicas = plan.layout.shards, plan.layout.pieces, plan.layout.replicas
    trained = [each for each in held if each.trained]
    stages = [(each, len(plan.layout.stages_of(each.chunks))) for each in trained]
    of_stages = sum(_padded([each], pieces) // shards * count for each, count in stages if count > 1)
    copies = replicas - (pieces != shards) if replicas > 1 else 0
    return max(of_stages, copies * sum(sorted(_padded([each], pieces) // pieces for each in trained)[-2:]))


def _task_sizes(plan: Plan, config: RunConfig, chunk: int) -> TaskBytes:
    parts, width = plan.description.parts_of(plan.ranges, chunk), Precision.of(config.train.dtype).compute.itemsize
    b, s = config.parallel.microbatch_size, plan.description.seq_len
    each = width * b
    taken = each * s * plan.description.hidden if chunk else 8 * b * s  # activations, or ids
    saved, stashed = sum(part.saved_elements for part in parts), sum(part.stashed_elements for part in parts)
    # As in a gated feed-forward: the gradients of its product and of both factors.
    backward = 3 * max(part.widest for part in plan.description.blocks)
    if chunk + 1 < len(plan.ranges):
        return TaskBytes(taken, each * saved, each * stashed, 0, each * backward)
    # The loss keeps its log-softmax, in fp32 at least, and makes two gradients of that size.
    logits = s * plan.description.vocab * max(4, width) // width
    return TaskBytes(taken, each * (saved + logits), each * stashed, each * logits, each * max(backward, 2 * logits))


def _padded(sets: list[ParameterSet], pieces: int) -> int:
    """Elements of the flat tensors of these sets."""
    return sum(-(-each.elements // pieces) * pieces for each in sets)


def _buffered(plan: Plan, stage: int, trained: list[ParameterSet]) -> int:
    """Elements of unsharded gradient buffers, which are there from the first step on.

    What is the chunks' own takes turns in as many as are ever needed, each with room for the largest, unless all are
    open at once; what chunks share has its own.
    """
    own, pieces = [each for each in trained if not each.shared], plan.layout.pieces
    elements = _padded(own, pieces)
    if max(plan.program.peak_gradient_buffers) == 1:
        chunks = {chunk for each in own for chunk in each.chunks}
        elements = _most_buffers(plan, stage, chunks) * max((_padded([each], pieces) for each in own), default=0)
    for each in trained:
        if each.shared:
            elements += _most_buffers(plan, stage, {*each.chunks}) * _padded([each], pieces)
    return elements


def _most_buffers(plan: Plan, stage: int, chunks: set[int]) -> int:
    """How many buffers of what these model chunks use exist at a time: one open, and one whose reduce is in flight."""
    owned, most = plan.layout.owned(stage), 0
    opened: set[int] = set()
    in_flight = False
    for op, v, _, _ in plan.program.ranks[stage]:
        if op is Op.W and owned[v] in chunks:
            opened.add(v)
            most = max(most, 1 + in_flight)
        elif op is Op.REDUCE:
            in_flight = plan.layout.shards > 1 and v in opened
            opened.discard(v)
    return most


def _side(plan: Plan, trained: list[ParameterSet]) -> int:
    """Elements of gradients that ``B`` makes: the side buffer, and what a model does by hand with a deferred weight."""
    shapes = {name: torch.Size(shape) for each in trained for name, shape in each.shapes.items()}
    made_by_b = plan.description.by_hand | shapes.keys() - plan.description.deferred
    return sum(shape.numel() for name, shape in shapes.items() if name in made_by_b)
