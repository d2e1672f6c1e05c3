"""A layout rated by a replay of its own program: its order is made from the costs of its own chunks and timed, and its
memory followed from instruction to instruction. A long step is replayed in part, and goes on as that part ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from zeropp_ray.metrics import kinds
from zeropp_ray.planner.cost_model import (
    MASTER,
    MESSAGES,
    Choice,
    Cut,
    Estimate,
    Replayed,
    between_steps,
    cut_of,
    ends_meet,
    estimate,
    hop,
    stage_elements,
)
from zeropp_ray.planner.hardware import Cluster
from zeropp_ray.planner.peak import StageBytes, TaskBytes, peak
from zeropp_ray.planner.sizes import ModelSizes
from zeropp_ray.schedule import (
    POLICIES,
    Action,
    Costs,
    Op,
    add_residency,
    fixed_order,
    replay,
    resolve,
    split_units,
    zeropp_order,
)
from zeropp_ray.schedule.policies import breadth_first

_ACTIONS = 60_000  # of a step that is replayed whole
_IDS = 8  # bytes of a token


def rated(model: ModelSizes, on: Cluster, choice: Choice) -> Estimate[Choice]:
    """A step of ``choice``, under whichever policy, by replay."""
    return estimate(model, on, choice, _found(model, on, choice))


def task_costs(model: ModelSizes, on: Cluster, choice: Choice) -> tuple[Costs, float]:
    """Costs of every model chunk, in units in which the mean forward is 1 as in a run's plan, and that unit in
    seconds."""
    parts, layout = cut_of(model, on, choice), choice.layout
    unit = sum(map(sum, parts.F)) / (choice.stages * choice.chunks)
    stages, chunks = range(choice.stages), range(choice.chunks)
    places = sorted((layout.model_chunk(p, v), p, v) for p in stages for v in chunks)
    F, B, W = ([round(task[p][v] / unit, 4) for _, p, v in places] for task in (parts.F, parts.B, parts.W))
    return Costs(tuple(max(f, 1e-4) for f in F), tuple(B), tuple(W), round(hop(model, on, choice) / unit, 4)), unit


def _found(model: ModelSizes, on: Cluster, choice: Choice) -> Replayed:
    P, V, N = choice.stages, choice.chunks, choice.microbatches
    policy = POLICIES[choice.policy]
    units = len(split_units(N, choice.unit))
    if policy.order is breadth_first or (choice.unit == N and policy.order is None):
        part = None  # what it holds grows to the end
    elif policy.order is None:
        part = (round(2 * N / units), round(3 * N / units))
    else:
        part = (4 * P, 6 * P)
    if part is None or part[1] >= N or 4 * P * V * N <= _ACTIONS:
        return _replay(model, on, choice, N)
    before, at = (_replay(model, on, choice, n) for n in part)
    more = (N - part[1]) / (part[1] - part[0])

    def goes_on(there: float, here: float) -> float:
        return here + more * (here - there)

    return Replayed(
        goes_on(before.makespan_s, at.makespan_s),
        tuple(map(goes_on, before.gathers, at.gathers)),
        tuple(map(goes_on, before.reduces, at.reduces)),
        at.memory,
    )


def _replay(model: ModelSizes, on: Cluster, choice: Choice, microbatches: int) -> Replayed:
    P, V, policy = choice.stages, choice.chunks, POLICIES[choice.policy]
    costs, unit_s = task_costs(model, on, choice)
    spec = resolve(
        P,
        V,
        microbatches,
        microbatches if policy.unit == "N" else min(choice.unit, microbatches),
        choice.memory_limit if policy.order is None else 0.0,
        choice.prefetch,
        costs,
        choice.recompute,
        choice.reduce,
        choice.policy,
    )
    program = add_residency(zeropp_order(spec) if policy.order is None else fixed_order(spec), spec)
    counts = [Counter((action.op, action.chunk) for action in actions) for actions in program]
    gathers, reduces = (
        tuple(float(max(count[op, v] for count in counts)) for v in range(V)) for op in (Op.GATHER, Op.REDUCE)
    )
    members = (_peak(model, on, choice, p, actions) for p, actions in enumerate(program))
    memory = max(members, key=lambda each: sum(each.values()))
    return Replayed(replay(program, spec).makespan * unit_s, gathers, reduces, memory)


def _peak(model: ModelSizes, on: Cluster, choice: Choice, p: int, program: Collection[Action]) -> dict[str, float]:
    """Bytes by kind of a member of stage ``p`` at its fullest; as many messages at any time as there may be."""
    parts, V, F = cut_of(model, on, choice), choice.chunks, choice.shards
    message = model.width * choice.microbatch_size * model.seq_len * model.hidden
    now = between_steps(model, on, choice, parts, p)
    now[kinds.MESSAGES] = MESSAGES * message * (choice.stages > 1)
    held, whole = parts.elements[p], stage_elements(model, choice, parts, p)
    exchanged = 0.0
    if on.device.host:  # gloo: copies of the replicas' gradients, of two chunks at a time
        copies = choice.replicas - choice.zero1 if choice.replicas > 1 else 0
        pieces = choice.layout.pieces
        exchanged = max(copies * sum(sorted(held)[-2:]) / pieces, 2 * model.tied / F * (not ends_meet(choice)))
    # What a reduce brings: from gloo the others' gradients, from NCCL their sum.
    arriving = (F - 1) / F if on.device.host else (F > 1) / F
    return peak(
        program,
        StageBytes(
            between_steps=now,
            tasks=[_task_bytes(model, choice, parts, p, v) for v in range(V)],
            recomputed=[choice.recompute != "none"] * (V - 1) + [choice.recompute == "full"],
            message=0,
            before=[False] * V,
            behind=[False] * V,
            resident=lambda chunks: model.width * min(sum(held[v] for v in chunks), whole),
            incoming=[MASTER * held[v] * arriving for v in range(V)],
            exchanged=MASTER * exchanged,
        ),
    )


def _task_bytes(model: ModelSizes, choice: Choice, parts: Cut, p: int, v: int) -> TaskBytes:
    b, each, chunk = choice.microbatch_size, model.width * choice.microbatch_size, choice.layout.model_chunk(p, v)
    first, last = chunk == 0, chunk == choice.stages * choice.chunks - 1
    of = [model.embed] * first + [model.block] * parts.blocks[p][v] + [model.head] * last
    # The loss keeps its log-softmax, in fp32, and makes two gradients of that size.
    logits = MASTER * b * model.vocab * model.seq_len * last
    return TaskBytes(
        input=_IDS * b * model.seq_len if first else each * model.seq_len * model.hidden,
        saved=each * sum(part.saved for part in of) + logits,
        stashed=each * sum(part.stashed for part in of),
        forward=logits,
        backward=max(3 * each * model.block.widest, 2 * logits),
    )
