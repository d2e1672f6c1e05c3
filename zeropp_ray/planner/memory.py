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
    some of them. A message is one boundary activation or gradient, in flight or received ahead.
    """
    spec, shards = plan.program.spec, plan.layout.shards
    width = torch.finfo(getattr(torch, config.train.dtype)).bits // 8
    b = config.parallel.microbatch_size
    elements, saved = [], []
    for chunk in plan.layout.owned(stage):
        parts = plan.description.parts_of(plan.ranges, chunk)
        elements.append(-(-sum(part.elements for part in parts) // shards) * shards)
        saved.append(sum(part.saved_elements for part in parts))
    owned, largest = sum(elements) // shards, max(elements)
    boundary = b * plan.description.seq_len * plan.description.hidden
    edges = {edge: bound for edge, bound in plan.program.in_flight.items() if stage in (edge.source, edge.destination)}
    messages = sum(bound if edge.source == stage else plan.program.receive_window for edge, bound in edges.items())
    live = round(plan.program.peak_activations[stage] * spec.chunks)
    return {
        "weights and moments": 3 * width * owned,
        "gradient shards": width * owned,
        "resident parameters": width * largest * plan.program.peak_resident[stage],
        "gradient buffers": width * largest * min(2, spec.chunks * len(spec.units)),
        "activations": width * b * live * max(saved),
        "messages": width * boundary * messages,
    }
