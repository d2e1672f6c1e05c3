"""Known schedules beside ZeroPP's: their orders, their times, and that they train as any other."""

from __future__ import annotations

import functools
import itertools
import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from jobs.schedule import schedule
from tests import harness
from tests.test_checkpoint import steps
from tests.test_memory import demo, measured
from tests.test_parameter_kinds import assert_right
from tests.test_parameter_kinds import of as kind_of
from tests.test_parity import assert_parity, configuration, samples_of
from zeropp_ray.checkpoint.resume import resumed
from zeropp_ray.errors import ConfigError, ScheduleError
from zeropp_ray.layout import Layout
from zeropp_ray.metrics import kinds
from zeropp_ray.placement import PLACEMENTS, model_chunk, stage_and_chunk
from zeropp_ray.schedule import (
    COMPUTE,
    POLICIES,
    Action,
    Costs,
    Edge,
    Op,
    Program,
    check,
    compile_forward,
    compile_program,
    fixed_order,
    resolve,
)

EQUAL, UNEVEN, LONG = (1, 1, 1, 0), (1, 1.3, 0.7, 0.25), (1, 2, 1, 0.1)
FIXED = [name for name, policy in POLICIES.items() if policy.order]


def compiled(policy: str, P: int, V: int, N: int, cost: tuple[float, ...] = EQUAL, **more) -> Program:
    return compile_program(resolve(P, V, N, costs=Costs.uniform(P * V, *cost), policy=policy, **more))


def takes(policy: str, V: int) -> bool:
    """Whether a policy is made for V chunks."""
    known = POLICIES[policy]
    return known.chunks in (0, V) and known.least_chunks <= V


def tasks(program: Program, rank: int) -> str:
    return " ".join(str(action) for action in program.ranks[rank] if action.op in COMPUTE)


# The table of PyTorch's schedules: makespan / T_lb at three costs, live micro-batches, gathers. Its runtime keeps the
# parameters for W too, so it counts the residencies of W, which ours does without: as many as ours, in the last column.
KNOWN = [
    (8, 2, 32, "interleaved", (1.070, 1.098, 1.088), 11.5, 95, 95),
    (8, 2, 32, "interleaved-zb", (1.000, 1.057, 1.038), 8, 107, 93),
    (8, 2, 32, "zb-v", (1.000, 1.048, 1.039), 8, 81, 79),
    (8, 4, 64, "interleaved", (1.018, 1.036, 1.026), 9.75, 443, 443),
    (8, 4, 64, "interleaved-zb", (1.000, 1.020, 1.011), 8, 581, 441),
]


@pytest.mark.parametrize(("P", "V", "N", "policy", "ratios", "live", "with_w", "gathers"), KNOWN)
def test_known_table(
    P: int, V: int, N: int, policy: str, ratios: tuple[float, ...], live: float, with_w: int, gathers: int
) -> None:
    for (F, B, W, comm), ratio in zip((EQUAL, UNEVEN, LONG), ratios, strict=True):
        # A backward in one piece: its gradient goes out when all of it is done. Ours goes out after B.
        whole = not policy.endswith(("zb", "zb-v"))
        program = compiled(policy, P, V, N, (F, B + W, 0, comm) if whole else (F, B, W, comm))
        assert round(program.makespan / program.lower_bound, 3) == ratio
        assert max(program.peak_activations) == program.spec.memory_limit == live
        assert max(program.gathers) == gathers
        chunks = [[action.chunk for action in actions if action.op in COMPUTE] for actions in program.ranks]
        assert max(len(list(itertools.groupby(each))) for each in chunks) == with_w
        if whole:
            ours = compiled(policy, P, V, N, (F, B, W, comm))
            assert ours.lower_bound <= ours.makespan < program.makespan


def test_the_closed_forms() -> None:
    """At equal costs, P stages and N micro-batches: a bubble of (P-1)·(F+B+W); ZB-H1's is a third."""
    P, N = 6, 15
    for policy in ("gpipe", "1f1b"):
        whole = compiled(policy, P, 1, N, (1, 2, 0, 0))
        assert whole.makespan == 3 * (N + P - 1)
        assert set(whole.gathers) == {1}
    assert compiled("zb-h1", P, 1, N).makespan == 3 * N + P - 1  # (P-1)·(F+B-W)
    assert compiled("interleaved", P, 3, 18, (1, 2, 0, 0)).makespan == 3 * (3 * 18 + P - 1)
    assert compiled("bfs", P, 3, 18, (1, 2, 0, 0)).makespan == 3 * (3 * 18 + P - 1)


def test_live_activations_and_gathers() -> None:
    """Whole-stage micro-batches at the fullest rank, and gathers of each rank."""
    P, N = 4, 12
    expected = {
        "gpipe": (1, N, 1),
        "1f1b": (1, P, 1),
        "zb-h1": (1, P, 1),
        "bfs": (3, N, 2 * 3 - 1),
        "zb-v": (2, P, None),
        "interleaved": (3, ((3 - 1) * P + 2 * (P - 1) + 1) / 3, None),
        "interleaved-zb": (3, ((3 - 1) * P + (P - 1) + 1) / 3, None),
        "zeropp-one-unit": (3, N, 2 * 3 - 1),
        "zeropp-published": (3, None, 2 * 3 * 3),
    }
    for policy, (V, live, gathers) in expected.items():
        program = compiled(policy, P, V, N, unit=P if policy == "zeropp-published" else 0)
        assert live is None or max(program.peak_activations) == pytest.approx(live)
        assert gathers is None or set(program.gathers) == {gathers}
        assert set(program.peak_resident) == {1}


def test_orders_read_by_eye() -> None:
    assert tasks(compiled("gpipe", 2, 1, 3), 1) == "0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2"
    assert tasks(compiled("1f1b", 3, 1, 4), 1) == "0F0 0F1 0B0 0W0 0F2 0B1 0W1 0F3 0B2 0W2 0B3 0W3"
    assert tasks(compiled("zb-h1", 3, 1, 4), 1) == "0F0 0F1 0B0 0F2 0B1 0W0 0F3 0B2 0W1 0B3 0W2 0W3"
    assert tasks(compiled("zb-h1", 3, 1, 4), 2) == "0F0 0B0 0F1 0B1 0F2 0B2 0W0 0F3 0B3 0W1 0W2 0W3"
    assert tasks(compiled("interleaved", 2, 2, 4), 1) == (
        "0F0 0F1 1F0 1B0 1W0 1F1 1B1 1W1 0F2 0B0 0W0 0F3 0B1 0W1 1F2 1B2 1W2 1F3 1B3 1W3 0B2 0W2 0B3 0W3"
    )
    assert (
        tasks(compiled("zb-v", 2, 2, 3), 1) == "0F0 1F0 0F1 1F1 1B0 1W0 0F2 0B0 0W0 1F2 1B1 1W1 0B1 1B2 0B2 0W1 1W2 0W2"
    )
    assert tasks(compiled("gpipe", 1, 1, 1, recompute="full"), 0) == "0F0 0RF0 0B0 0W0"


def test_published_blocks_are_apart() -> None:
    program = compiled("zeropp-published", 1, 2, 4, unit=2, prefetch=True)
    assert str(program) == (
        "rank 0: GATHER 0 0F0 GATHER 1 0F1 RELEASE 0 1F0 1F1 RELEASE 1 GATHER 1 1B0 GATHER 0 1B1 RELEASE 1 0B0 0B1 "
        "RELEASE 0 1W0 GATHER 0 0F2 1W1 REDUCE 1 GATHER 1 0F3 RELEASE 0 0W0 1F2 0W1 REDUCE 0 1F3 RELEASE 1 GATHER 1 "
        "1B2 GATHER 0 1B3 RELEASE 1 0B2 0B3 RELEASE 0 1W2 1W3 REDUCE 1 0W2 0W3 REDUCE 0"
    )
    with pytest.raises(ConfigError, match=r"memory_limit = 3.9: .* the least limit is 4 "):
        resolve(4, 2, 8, 4, 3.9, policy="zeropp-published")
    assert compile_program(resolve(4, 2, 8, 4, 4, policy="zeropp-published")).peak_activations[0] == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_every_spec_compiles(policy: str) -> None:
    """Any numbers, costs per model chunk: the check runs inside. What an automatic value came to can be given, too."""
    for P, V, N in itertools.product((1, 2, 3, 5), (1, 2, 3), (5, 7, 12)):
        if not takes(policy, V):
            continue
        costs = Costs(*(tuple(1 + (i * k) % 3 for i in range(P * V)) for k in (1, 2, 3)), 0.5)
        for recompute, reduce, prefetch in itertools.product(
            ("none", "full", "selective")[: 2 + (V > 1)], ("unit", "step"), (False, True)
        ):
            made = functools.partial(
                resolve, P, V, N, costs=costs, recompute=recompute, reduce=reduce, prefetch=prefetch, policy=policy
            )
            spec = made()
            program = compile_program(spec)
            assert made(spec.unit, spec.memory_limit) == spec
            assert program.makespan >= program.lower_bound
            assert max(program.peak_activations) <= spec.memory_limit + 1e-9
            assert policy not in FIXED or max(program.peak_activations) == pytest.approx(spec.memory_limit)
            assert max(program.peak_inputs) <= spec.input_limit
            assert max(program.peak_gradient_buffers) <= spec.gradient_buffers
        forward = compile_forward(spec, 3)
        assert all(sum(action.op is Op.F for action in actions) == 3 * V for actions in forward.ranks)


def test_tasks_and_units_of_fixed_orders_do_not_depend_on_costs() -> None:
    for policy in FIXED:
        V = POLICIES[policy].chunks or 2
        orders = [fixed_order(compiled(policy, 3, V, 6, cost).spec) for cost in (EQUAL, LONG)]
        assert orders[0] == orders[1]


# What is compared: time, live activations and gathers, of schedules that keep one of several chunks resident.


def numbers(program: Program) -> tuple[float, float, int]:
    return program.makespan, max(program.peak_activations), max(program.gathers)


@pytest.mark.parametrize(("P", "V", "N"), [(4, 2, 16), (8, 2, 32), (4, 4, 16)])
def test_zeropp_and_the_known_schedules(P: int, V: int, N: int) -> None:
    """At equal costs some unit of ours is as good in all three as each of them; at no costs is one so to ours."""
    known = [name for name in FIXED if takes(name, V)]
    for cost in (EQUAL, UNEVEN, LONG):
        ours = [numbers(compiled("zeropp", P, V, N, cost, unit=unit, memory_limit=unit)) for unit in (P, 2 * P, N)]
        theirs = [numbers(compiled(name, P, V, N, cost)) for name in known]
        for own in ours:
            assert not any(all(b <= a for a, b in zip(own, other, strict=True)) and own != other for other in theirs)
        for other in theirs if cost == EQUAL else ():
            assert any(all(a <= b for a, b in zip(own, other, strict=True)) for own in ours)


# --- the V-shaped placement


def test_v_placement() -> None:
    assert [[model_chunk("v", 3, p, v) for v in range(4)] for p in range(3)] == [
        [0, 5, 6, 11],
        [1, 4, 7, 10],
        [2, 3, 8, 9],
    ]
    for placement, P, c in itertools.product(PLACEMENTS, (1, 2, 3, 4), range(12)):
        assert model_chunk(placement, P, *stage_and_chunk(placement, P, c)) == c
    layout = Layout(stages=3, chunks=2, shards=1, replicas=1, placement="v")
    assert layout.owned(0) == [0, 5]  # both ends of the model
    assert layout.stages_of([0, 5]) == [0]
    assert layout.stages_of([2, 4]) == [1, 2]


def test_v_edges() -> None:
    spec = resolve(3, 2, 6, policy="zb-v")
    assert spec.outgoing(0, 0, "F") == (Edge(0, 1, "F"), 0)
    assert spec.outgoing(1, 1, "F") == (Edge(1, 0, "F"), 1)  # on the way up
    assert spec.incoming(1, 1, "F") == (Edge(2, 1, "F"), 1)
    assert spec.outgoing(1, 0, "B") == (Edge(1, 0, "B"), 0)
    assert spec.outgoing(2, 0, "F") is spec.incoming(2, 1, "F") is spec.outgoing(2, 1, "B") is None  # the turn
    assert spec.outgoing(0, 1, "F") is spec.incoming(0, 0, "F") is None  # the ends
    assert [spec.local(p, v, kind) for p in (0, 2) for v in (0, 1) for kind in "FB"] == [False] * 5 + [
        True,
        True,
        False,
    ]
    assert set(compile_program(spec).in_flight) == {
        Edge(p, q, k) for p, q in ((0, 1), (1, 0), (1, 2), (2, 1)) for k in "FB"
    }


def test_a_turn_is_handed_over_in_order() -> None:
    spec = resolve(2, 2, 2, policy="zb-v")
    program = compile_program(spec)
    for op, chunk, other in ((Op.F, 1, 0), (Op.B, 0, 1)):
        ranks = [list(actions) for actions in program.ranks]
        early = Action(op, chunk, 0)
        ranks[1].remove(early)
        first = next(i for i, action in enumerate(ranks[1]) if action[:2] == (op, other))
        ranks[1][first:first] = [Action(Op.RELEASE, other), Action(Op.GATHER, chunk), early]
        with pytest.raises(ScheduleError, match=f"rank 1, .*: {early} runs before {Action(op, other, 0)}, whose"):
            check(ranks, spec, program.in_flight)


def test_a_turn_takes_no_time_on_a_link() -> None:
    costs = Costs.uniform(4, 1, 1, 1, 10)
    program = compile_program(resolve(2, 2, 2, costs=costs, policy="zb-v"))
    # The last micro-batch's way: there, the turn, and back; twice. Then the W that are left.
    assert program.makespan == compile_program(resolve(2, 2, 2, policy="zb-v")).makespan + 4 * 10


# --- what is shown


def shown(*arguments: str) -> str:
    return CliRunner().invoke(schedule, arguments, catch_exceptions=False).output


def test_a_policy_is_shown() -> None:
    assert shown("--policy", "zb-v").startswith("ZB-V  P = 2 stages, V = 2 chunks, N = 8 micro-batches = 1 × 8\n")
    form = json.loads(shown("--policy", "zb-v", "--format", "json"))
    assert (form["policy"], form["placement"], form["reduce"], form["memory_limit"]) == ("zb-v", "v", "step", 2)
    assert {action["model_chunk"] for action in form["ranks"][0]["actions"]} == {0, 3}


def test_compare() -> None:
    arguments = ["--stages=8", "--microbatches=32", "--unit=8", "--memory-limit=8", "--policy=all", "--compare"]
    lines = shown(*arguments).splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(POLICIES) - 1]] == [*POLICIES][:2] + [*POLICIES][3:]
    assert " ".join(lines[1].split()) == "zeropp 2 199 1.000 3.5% 8 0 0.5 0.5 9 4.5 8 4 128"
    # The work of a stage is the same in one chunk: twice as long tasks.
    assert " ".join(lines[4].split()) == "1f1b 1 220 1.106 12.7% 8 0 1 1 1 1 1 1 64"
    assert lines[len(POLICIES)].startswith("zeropp-one-unit: none here. --memory-limit = 8: no schedule exists")
    rows = json.loads(shown(*arguments, "--format", "json"))
    assert [row["policy"] for row in rows] == [*POLICIES]
    assert (rows[0]["makespan"], rows[-1]["gathers"], "problem" in rows[2]) == (199, 79, True)
    with pytest.raises(ConfigError, match="--policy = all: is for --compare"):
        shown("--policy", "all")


# --- bad input

BAD = [
    ({"policy": "1f1"}, r"parallel.policy = '1f1': unknown; known are zeropp, .*, zb-v"),
    ({"policy": "gpipe"}, r"chunks = 2: parallel.policy = 'gpipe' takes 1 a stage; use parallel.chunks = 1"),
    ({"policy": "zb-v", "chunks": 3}, r"chunks = 3: parallel.policy = 'zb-v' takes 2 a stage; use parallel.chunks = 2"),
    ({"policy": "interleaved", "chunks": 1}, r"'interleaved' takes 2 or more a stage; use parallel.chunks = 2"),
    (
        {"policy": "bfs", "unit": 4},
        r"unit = 4: parallel.policy = 'bfs' has one unit of all 8 micro-batches; use .* = 0",
    ),
    ({"policy": "zb-v", "memory_limit": 1.5}, r"memory_limit = 1.5: no schedule exists .*; the least limit is 2 "),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**{"stages": 2, "chunks": 2, "microbatches": 8} | changes)


# --- on the engine

of = functools.partial(configuration, dtype="float64", steps=3)

SHORT = [
    pytest.param(of(2, 1, 2, N=3, b=1, policy="zb-h1"), id="zb-h1"),
    pytest.param(of(2, 2, N=5, layers=5, policy="interleaved"), id="interleaved"),
    pytest.param(of(2, 2, 2, N=4, b=1, policy="zb-v"), id="zb-v"),
    pytest.param(of(1, 2, N=3, policy="zb-v", recompute="full"), id="zb-v-alone"),
    pytest.param(of(2, 2, N=4, U=2, policy="zeropp-published"), id="zeropp-published"),
]


@pytest.mark.parametrize("config", SHORT)
def test_parity(config) -> None:
    assert_parity(config)


@pytest.mark.parametrize("kind", ["tied", pytest.param("adapters_tied", marks=pytest.mark.full)])
def test_both_ends_of_the_model_on_one_stage(kind) -> None:
    """What they share is summed there, and crosses no link."""
    ours = assert_right(kind_of(kind, 2, 2, N=3, policy="zb-v"))
    assert not any(report.counters.shared_exchanges for report in ours.reports)


@pytest.mark.parametrize(
    ("before", "after"),
    [("zeropp", "zb-v"), pytest.param("zb-v", "interleaved", marks=pytest.mark.full)],
)
def test_a_checkpoint_goes_on_under_another_policy(before, after, tmp_path) -> None:
    first, second = (of(2, 2, N=4, b=1, layers=5, steps=2, policy=policy) for policy in (before, after))
    with harness.members(first, samples_of(first)) as run:
        steps(run, 1, 1)
        folder = run.save(tmp_path / "run", 1, 1)
        losses = steps(run, 2, 2)
    with harness.members(second, samples_of(second)) as run:
        run.call("load", folder)
        assert steps(run, 2, 2) == pytest.approx(losses, rel=1e-10)


def test_another_policy_resolves_its_own_numbers() -> None:
    checkpoint = SimpleNamespace(path="there", step=1, config=of(2, 2, N=6, U=2).resolved())
    checkpoint.manifest = SimpleNamespace(config=checkpoint.config.to_dict())
    parallel = resumed(checkpoint, ["parallel.policy=zb-v"]).parallel
    assert (parallel.policy, parallel.unit, parallel.memory_limit) == ("zb-v", 6, 2)
    old = {name: value for name, value in checkpoint.manifest.config["parallel"].items() if name != "policy"}
    checkpoint.manifest.config["parallel"] = old  # from before there were policies
    assert resumed(checkpoint, []).parallel == checkpoint.config.parallel


@pytest.mark.full
@pytest.mark.parametrize(("policy", "V"), [("zb-v", 2), ("interleaved", 2), ("1f1b", 1), ("gpipe", 1)])
def test_the_predicted_memory_is_within_a_tenth(policy: str, V: int) -> None:
    for me, predicted, found in measured(demo(2, V, 2, parallel={"policy": policy})):
        assert sum(predicted.values()) == pytest.approx(sum(found.values()), rel=0.1), me
        assert predicted[kinds.RESIDENT] == pytest.approx(found[kinds.RESIDENT], abs=0.05 * sum(found.values())), me


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("layout", "recompute", "reduce"),
    [((1, 3), "full", "step"), ((2, 3, 2), "none", "step"), ((3, 2), "full", "unit"), ((2, 2, 1, 2), "none", "unit")],
)
def test_parity_of_every_policy(policy: str, layout: tuple[int, ...], recompute: str, reduce: str) -> None:
    P, V, *rest = layout
    V = POLICIES[policy].chunks or V
    assert_parity(of(P, V, *rest, N=2 * P + 1, b=1, policy=policy, recompute=recompute, reduce=reduce))
