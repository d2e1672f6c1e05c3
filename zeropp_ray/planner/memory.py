"""How much tensor memory a member takes, by kind, before it takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zeropp_ray.config import RunConfig

if TYPE_CHECKING:
    from zeropp_ray.planner.plan import Plan


def predict_memory(plan: Plan, config: RunConfig, stage: int) -> dict[str, int]:
    """Bytes of one member of ``stage`` at its fullest, by kind.

    Activations are what autograd saves in a chunk's forward, held from its ``F`` to its ``W``; in truth ``B`` frees
    some of them. A message is one boundary activation or gradient, in flight or received ahead. Frozen parameters have
    neither moments nor gradients; those that several stages share are whole at each, sharded there, and their gradient
    shards come once from each of these stages.
    """
    spec, shards = plan.program.spec, plan.layout.shards
    width = torch.finfo(getattr(torch, config.train.dtype)).bits // 8
    b, units = config.parallel.microbatch_size, len(spec.units)
    owned = plan.layout.owned(stage)
    sets = [(each, [c for c in each.chunks if c in owned], -(-each.elements // shards) * shards) for each in plan.sets]
    sets = [(each, users, padded) for each, users, padded in sets if users]
    trained = [(each, users, padded) for each, users, padded in sets if each.trained]
    weights, moved = (sum(padded for *_, padded in some) // shards for some in (sets, trained))
    largest = max(sum(padded for _, users, padded in sets if chunk in users) for chunk in owned)
    # What is the chunks' own takes turns in two buffers, what chunks share has two of its own.
    buffers = min(2, spec.chunks * units) * max((padded for each, _, padded in trained if not each.shared), default=0)
    buffers += sum(min(2, len(users) * units) * padded for each, users, padded in trained if each.shared)
    side = sum(
        torch.Size(shape).numel()
        for each, *_ in trained
        for name, shape in each.shapes.items()
        if name not in plan.description.deferred
    )
    exchanged = sum(
        len(stages) * padded // shards
        for each, _, padded in trained
        if len(stages := plan.layout.stages_of(each.chunks)) > 1
    )
    saved = [sum(part.saved_elements for part in plan.description.parts_of(plan.ranges, chunk)) for chunk in owned]
    boundary = b * plan.description.seq_len * plan.description.hidden
    edges = {edge: bound for edge, bound in plan.program.in_flight.items() if stage in (edge.source, edge.destination)}
    messages = sum(bound if edge.source == stage else plan.program.receive_window for edge, bound in edges.items())
    live = round(plan.program.peak_activations[stage] * spec.chunks)
    return {
        "weights and moments": width * (weights + 2 * moved),
        "gradient shards": width * (moved + exchanged),
        "resident parameters": width * largest * plan.program.peak_resident[stage],
        "gradient buffers": width * (buffers + side),
        "activations": width * b * live * max(saved),
        "messages": width * boundary * messages,
    }
