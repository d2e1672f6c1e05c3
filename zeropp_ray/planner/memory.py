"""How much tensor memory a member takes, by kind, before it takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zeropp_ray.config import RunConfig

if TYPE_CHECKING:
    from zeropp_ray.models.describe import ParameterSet
    from zeropp_ray.planner.plan import Plan


def predict_memory(plan: Plan, config: RunConfig, stage: int) -> dict[str, int]:
    """Bytes of one member of ``stage`` at its fullest, by kind.

    Activations are what autograd saves in a chunk's forward, held from its ``F`` to its ``W``; in truth ``B`` frees
    some of them. A message is one boundary activation or gradient, in flight or received ahead. Frozen parameters have
    neither moments nor gradients; those that several stages share are whole at each, sharded there, and their gradient
    shards come once from each of these stages.
    """
    spec, shards, owned = plan.program.spec, plan.layout.shards, {*plan.layout.owned(stage)}
    width = torch.finfo(getattr(torch, config.train.dtype)).bits // 8
    b, units = config.parallel.microbatch_size, len(spec.units)

    def padded(*sets: ParameterSet) -> int:
        return sum(-(-each.elements // shards) * shards for each in sets)

    held = [each for each in plan.sets if owned & {*each.chunks}]
    trained = [each for each in held if each.trained]
    largest = max(padded(*(each for each in held if chunk in each.chunks)) for chunk in owned)
    exchanged = sum(padded(each) * n for each in trained if (n := len(plan.layout.stages_of(each.chunks))) > 1)
    # What is the chunks' own takes turns in two buffers; what chunks share has two of its own.
    buffers = min(2, spec.chunks * units) * max((padded(each) for each in trained if not each.shared), default=0)
    buffers += sum(min(2, units * len(owned & {*each.chunks})) * padded(each) for each in trained if each.shared)
    shapes = {name: torch.Size(shape) for each in trained for name, shape in each.shapes.items()}
    made_by_b = plan.description.by_hand | shapes.keys() - plan.description.deferred
    side = sum(shape.numel() for name, shape in shapes.items() if name in made_by_b)
    saved = [sum(part.saved_elements for part in plan.description.parts_of(plan.ranges, chunk)) for chunk in owned]
    boundary = b * plan.description.seq_len * plan.description.hidden
    edges = {edge: bound for edge, bound in plan.program.in_flight.items() if stage in (edge.source, edge.destination)}
    messages = sum(bound if edge.source == stage else plan.program.receive_window for edge, bound in edges.items())
    live = round(plan.program.peak_activations[stage] * spec.chunks)
    return {
        "weights and moments": width * (padded(*held) + 2 * padded(*trained)) // shards,
        "gradient shards": width * (padded(*trained) + exchanged) // shards,
        "resident parameters": width * largest * plan.program.peak_resident[stage],
        "gradient buffers": width * (buffers + side),
        "activations": width * b * live * max(saved),
        "messages": width * boundary * messages,
    }
