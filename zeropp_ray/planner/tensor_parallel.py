"""The rival: 3D parallelism (Narayanan et al., arXiv 2104.04473) under the same cost model.

Tensor parallelism ``T`` inside a node, interleaved 1F1B over ``P`` stages of ``V`` chunks, data parallelism ``D`` with
the optimizer's state split over it. With sequence parallelism (Korthikanti et al., arXiv 2205.05198), so that all
activations are split over ``T``. What favours it here: no loss from matrices that are ``T`` times narrower, the head
split over ``T``, transfers between stages hidden but for the ramp. What does not: nothing overlaps with the exchanges
of tensor parallelism, which some libraries do in part; sums over ``D`` are waited for, as ours are.
"""

from __future__ import annotations

from zeropp_ray.metrics import kinds
from zeropp_ray.planner.cost_model import MASTER, Cut, Estimate, Rival, cut
from zeropp_ray.planner.hardware import Cluster
from zeropp_ray.planner.sizes import ModelSizes

_LAYER_EXCHANGES = 4  # all-gathers and reduce-scatters of a layer's forward, of b·s·h elements each; as many backward


def estimate_3d(model: ModelSizes, cluster: Cluster, choice: Rival) -> Estimate[Rival]:
    """A step of ``choice``. Full recomputation keeps the inputs of layers."""
    T, P, V, D, N, b, recompute = choice
    parts, again = cut(model, cluster, P, V, b), recompute == "full"
    activation = model.width * b * model.seq_len * model.hidden
    exchange = _LAYER_EXCHANGES * cluster.gather(activation, T, 1)
    hop = cluster.send(activation / T, P, T * D) if P > 1 else 0.0

    compute = [work / T for work in parts.work[recompute]]
    exchanges = [sum(parts.blocks[p]) * (2 + again) * exchange for p in range(P)]
    slowest = max(range(P), key=lambda p: compute[p] + exchanges[p])
    seconds = {"tasks": N * compute[slowest], "tensor parallelism": N * exchanges[slowest]}
    seconds["ramp"] = (P - 1) * ((compute[slowest] + exchanges[slowest]) / V + 2 * hop)
    busy = N * sum(c + e for c, e in zip(compute, exchanges, strict=True)) / P
    bubble = 1 - busy / sum(seconds.values())
    held = [sum(elements) / T for elements in parts.elements]
    seconds["replicas"] = sum(cluster.gather(size * max(held), D, T) for size in (MASTER, model.width))
    seconds["optimizer"] = (7 * MASTER + model.width) * max(held) / D / cluster.device.memory_bandwidth

    exchanged = sum(parts.blocks[slowest]) * (2 + again) * _LAYER_EXCHANGES * activation
    traffic = {
        f"tensor, {cluster.over(T, 1)}": N * exchanged * (T - 1) / T,
        f"stages, {cluster.over(P, T * D)}": 2.0 * V * N * activation / T * (P > 1),
        f"replicas, {cluster.over(D, T)}": (MASTER + model.width) * max(held) * (D - 1) / D,
    }
    memory = max((_memory(model, choice, parts, p, held[p]) for p in {0, P - 1}), key=lambda each: sum(each.values()))
    return Estimate(choice, seconds, memory, traffic, bubble)


def live_microbatches(stages: int, chunks: int, stage: int) -> float:
    """Whole-stage micro-batches whose activations 1F1B, interleaved with more than one chunk, keeps at a stage."""
    if chunks == 1:
        return stages - stage
    return ((chunks - 1) * stages + 2 * (stages - stage - 1) + 1) / chunks


def _memory(model: ModelSizes, choice: Rival, parts: Cut, p: int, held: float) -> dict[str, float]:
    """Bytes of a device of stage ``p`` at its fullest, by kind."""
    T, P, V, D, N, b, recompute = choice
    each, blocks = model.width * b / T, sum(parts.blocks[p])
    live = min(N, live_microbatches(P, V, p))
    logits = MASTER * b * model.head.widest / T * (p == P - 1)
    now = dict.fromkeys(kinds.KINDS, 0.0)
    now[kinds.WEIGHTS] = (model.width + 3 * MASTER / D) * held
    now[kinds.GRADIENT_BUFFERS] = MASTER * held
    if recompute == "full":
        now[kinds.CHUNK_INPUTS] = live * blocks * each * model.seq_len * model.hidden
        now[kinds.ACTIVATIONS] = model.block.saved * each + logits
    else:
        now[kinds.ACTIVATIONS] = live * blocks * model.block.saved * each + logits
    now[kinds.REST] = max(3 * each * model.block.widest, 2 * logits)
    return now
