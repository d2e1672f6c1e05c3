"""What a replay counts of a step besides tasks: gathers, reduces, hops, optimizer and vote, and memory over time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
from click.testing import CliRunner

from jobs.schedule import schedule
from zeropp_ray.errors import ConfigError
from zeropp_ray.metrics import kinds
from zeropp_ray.schedule import (
    COMPUTE,
    POLICIES,
    Action,
    Costs,
    Link,
    Op,
    Program,
    ScheduleSpec,
    Sizes,
    add_residency,
    compile_forward,
    compile_program,
    hops,
    lower_bound,
    replay,
    resolve,
    tune,
    zeropp_order,
)
from zeropp_ray.schedule.held import KINDS, fullest
from zeropp_ray.schedule.tune import _makespan as step_makespan

TASKS = (1, 1.3, 0.7, 0.25)


def made(P: int, V: int, N: int, costs: Costs, **more: Any) -> tuple[ScheduleSpec, list[list[Action]]]:
    spec = resolve(P, V, N, costs=costs, **more)
    return spec, add_residency(zeropp_order(spec), spec)


def times(P: int, V: int, N: int, costs: Costs, **more: Any) -> list[dict[str, tuple[float, float]]]:
    """When each action of each rank runs; of those that come again, the last."""
    spec, ranks = made(P, V, N, costs, **more)
    found = replay(ranks, spec)
    return [
        dict(zip(map(str, actions), zip(found.starts[p], found.ends[p], strict=True), strict=True))
        for p, actions in enumerate(ranks)
    ]


def test_a_step_by_hand() -> None:
    """One stage of two chunks: every gather is waited for, a reduce is not, but the last one."""
    costs = Costs.uniform(2, 10, 10, 10, gather=4, reduce=7, optimizer=3, vote=2)
    spec, ranks = made(1, 2, 1, costs)
    assert " ".join(map(str, ranks[0])) == (
        "GATHER 0 0F0 RELEASE 0 GATHER 1 1F0 1B0 RELEASE 1 GATHER 0 0B0 RELEASE 0 1W0 REDUCE 1 0W0 REDUCE 0"
    )
    found = replay(ranks, spec)
    ends = dict(zip(map(str, ranks[0]), found.ends[0], strict=True))
    assert found.starts[0][0] == 2 * 3  # the update of both chunks comes first
    assert (ends["0F0"], ends["1F0"], ends["1B0"], ends["0B0"]) == (20, 34, 44, 58)
    assert (ends["1W0"], ends["REDUCE 1"], ends["0W0"], ends["REDUCE 0"]) == (68, 75, 78, 85)
    assert found.makespan == 85 + 2
    assert found.exposed == (3 * 4 + 7,)
    assert found.bubble == pytest.approx(1 - (6 + 60) / 87)
    assert found.lower_bound == 6 + 4 + 60 + 2
    alone = replay(ranks, dataclasses.replace(spec, costs=dataclasses.replace(costs, overlap=False)))
    assert alone.makespan == 6 + 60 + 3 * 4 + 2 * 7 + 2
    assert alone.exposed == (26,)


def test_a_reduce_waits_for_the_one_before_it() -> None:
    spec, ranks = made(1, 1, 3, Costs.uniform(1, 1, 1, 1, gather=2, reduce=30), unit=1)
    when = times(1, 1, 3, spec.costs, unit=1)[0]
    assert when["0F1"] == (5, 6)  # while the first unit is reduced
    assert when["0F2"] == (35, 36)  # the reduce of the second one has waited for the first
    assert when["REDUCE 0"] == (65, 95)
    assert replay(ranks, spec).exposed == (2 + 27 + 27 + 30,)


def test_prefetch_hides_a_gather_behind_the_last_task_of_the_residency_before() -> None:
    costs = Costs.uniform(4, *TASKS, gather=0.9)
    (_, exposed), (_, hidden) = (
        (spec, replay(ranks, spec))
        for spec, ranks in (made(2, 2, 8, costs, prefetch=prefetch) for prefetch in (False, True))
    )
    assert hidden.makespan < exposed.makespan
    assert hidden.exposed[0] == pytest.approx(0.9)  # the very first one; all others are shorter than a task
    assert exposed.exposed[0] > 0.9


def test_nothing_changes_where_only_tasks_and_messages_take_time() -> None:
    spec, ranks = made(4, 2, 16, Costs.uniform(8, *TASKS))
    found = replay(ranks, spec)
    assert found.exposed == (0,) * 4
    assert found.held == ()
    assert all(
        start == end
        for actions, starts, ends in zip(ranks, found.starts, found.ends, strict=True)
        for action, start, end in zip(actions, starts, ends, strict=True)
        if action.op not in COMPUTE
    )
    given = Costs.uniform(8, *TASKS)
    assert dataclasses.replace(given, RF=given.F, hops=(0.25,) * 7) == given


def test_both_ends_are_busy_with_a_message() -> None:
    plain = Costs.uniform(4, 1, 1, 1, 0.5)
    (first, middle, _), (busy, _, last) = (
        [spans[name] for spans, name in zip(times(3, 1, 3, costs), ("0F0", "0F0", "0F0"), strict=True)]
        for costs in (dataclasses.replace(Costs.uniform(3, 1, 1, 1, 0.5), post=post) for post in (0, 0.25))
    )
    assert (first, middle) == ((0, 1), (1.5, 2.5))
    assert busy == (0, 1.25)
    assert last == (1.25 + 0.5 + 1.5 + 0.5, 1.25 + 0.5 + 1.5 + 0.5 + 1.25)  # the middle one has two messages
    one = dataclasses.replace(plain, post=9)
    assert times(1, 4, 4, one) == times(1, 4, 4, plain)  # inside a rank there are none


def test_a_forward_again_may_take_longer_than_the_first() -> None:
    costs = dataclasses.replace(Costs.uniform(2, 1, 1, 1), RF=(1.5, 1.5))
    spec, ranks = made(2, 1, 4, costs, recompute="full")
    found = replay(ranks, spec)
    spans = {
        end - start for a, start, end in zip(ranks[0], found.starts[0], found.ends[0], strict=True) if a.op is Op.RF
    }
    assert spans == {1.5}
    assert found.makespan >= lower_bound(spec) == 4 * 4.5 + 1


def test_links_inside_and_between_nodes() -> None:
    inside, between = Link(1e-5, 100e9).time(1e6), Link(5e-6, 25e9).time(1e6)
    assert (inside, between) == (pytest.approx(2e-5), pytest.approx(4.5e-5))
    looped = hops([c % 4 for c in range(8)], 4, 2, 1, 9)
    assert looped == (1, 9, 1, 9, 1, 9, 1)  # 0-1, 1-2, 2-3, and round to the first stage
    assert hops([0, 1, 2, 2, 1, 0], 3, 3, 1, 9) == (9, 9, 1, 9, 9)
    costs = Costs.uniform(8, 1, 1, 1)
    slow = dataclasses.replace(costs, hops=looped)
    when = times(4, 2, 4, slow, memory_limit=4)
    assert when[1]["0F0"][0] == 2
    assert when[2]["0F0"][0] == 2 + 1 + 9
    assert when[0]["0B3"][0] >= when[1]["0B3"][1] + 1


def test_an_evaluation_has_neither_update_nor_vote() -> None:
    costs = Costs.uniform(4, 1, 1, 1, gather=0.5, optimizer=10, vote=10)
    program = compile_forward(resolve(2, 2, 4, costs=costs))
    assert program.makespan == 1.5 + 4 + 0.5 + 4  # rank 1 waits for its first input, and has gathered by then


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_program_keeps_to_the_lane(policy: str, overlap: bool) -> None:
    """For every policy: tasks of a rank do not overlap, exchanges of it neither, tasks come after their gather."""
    V = POLICIES[policy].chunks or 2
    base = Costs.uniform(4 * V, *TASKS, gather=0.8, reduce=1.1, optimizer=0.3, vote=0.2)
    costs = dataclasses.replace(base, overlap=overlap)
    program: Program = compile_program(resolve(4, V, 12, costs=costs, policy=policy))
    ranks = program.without_transfers()
    found = replay(ranks, program.spec)
    assert found.makespan == program.makespan >= program.lower_bound
    for actions, starts, ends in zip(ranks, found.starts, found.ends, strict=True):
        spans = list(zip(actions, starts, ends, strict=True))
        busy = (*COMPUTE, Op.GATHER, Op.REDUCE) if not overlap else COMPUTE
        for some in (busy, (Op.GATHER, Op.REDUCE)):
            chosen = [(start, end) for action, start, end in spans if action.op in some]
            assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(chosen))
        there: dict[int, float] = {}
        for action, start, end in spans:
            if action.op is Op.GATHER:
                there[action.chunk] = end
            elif action.op in (Op.F, Op.RF, Op.B):
                assert start >= there[action.chunk] - 1e-9
        assert max(ends) <= found.makespan - 0.2 + 1e-9
    whole = replay(program.ranks, program.spec)  # with the transfers: the same times
    assert whole.makespan == found.makespan


def test_units_are_compared_by_the_whole_step() -> None:
    """Dear gathers count when a unit is chosen, not tasks alone."""
    costs = Costs.uniform(8, *TASKS, gather=6, reduce=2, vote=1)
    every = [resolve(4, 2, 24, unit, 16, costs=costs) for unit in (4, 6, 8, 12)]
    assert [step_makespan(spec, math.inf) for spec in every] == [compile_program(spec).makespan for spec in every]
    chosen = compile_program(tune(resolve(4, 2, 24, "auto", 16, costs=costs), 16))
    assert all(chosen.makespan <= 1.005 * compile_program(spec).makespan for spec in every)


# --- memory over time


def sizes(chunks: int) -> Sizes:
    each = [(100 + c, 200 + c, 40 + c, 16 + c, 3 + c) for c in range(chunks)]
    return Sizes(*zip(*each, strict=True))


@pytest.mark.parametrize("more", [{}, {"recompute": "selective"}, {"reduce": "step", "prefetch": True}])
def test_memory_over_time_is_what_was_made_and_not_freed(more: dict[str, Any]) -> None:
    base = Costs.uniform(6, *TASKS, gather=0.3, reduce=0.4)
    given = sizes(6)
    spec, ranks = made(3, 2, 9, dataclasses.replace(base, sizes=given), **more)
    found = replay(ranks, spec)
    for p, curves in enumerate(found.held):
        assert tuple(curves) == KINDS
        for kind, each in curves.items():
            assert each[0][1] == 0 or each[0][0] == 0
            assert each[-1][1] == pytest.approx(0), kind
        spans = list(zip(ranks[p], found.starts[p], found.ends[p], strict=True))
        moment = sorted(found.ends[p])[len(spans) // 2] + 1e-3
        task = {(a.op, a.chunk, a.microbatch): (start, end) for a, start, end in spans if a.op in COMPUTE}
        saved = stashed = 0.0
        for (op, v, m), (start, end) in task.items():
            c = spec.model_chunk(p, v)
            maker = Op.RF if spec.recomputed[v] else Op.F
            if op is maker and start <= moment < task[Op.B, v, m][1]:
                saved += given.saved[c]
            if op is Op.B and end <= moment < task[Op.W, v, m][1]:
                stashed += given.stashed[c]

        def at(kind: str, curves: Any = curves, moment: float = moment) -> float:
            return [value for time, value in curves[kind] if time <= moment][-1]

        assert at(kinds.ACTIVATIONS) == pytest.approx(saved)
        assert at(kinds.WEIGHT_INPUTS) == pytest.approx(stashed)
        assert max(value for _, value in curves[kinds.RESIDENT]) <= (1 + spec.prefetch) * max(given.parameters)
        buffers = max(value for _, value in curves[kinds.GRADIENT_BUFFERS])
        assert buffers >= max(given.gradients[spec.model_chunk(p, v)] for v in range(2))
        assert (max(value for _, value in curves[kinds.CHUNK_INPUTS]) > 0) == any(spec.recomputed)
        most = fullest(curves)
        assert 0 < sum(most.values()) <= sum(max(value for _, value in each) for each in curves.values())


# --- what cannot be


def test_costs_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"cost.gather: 1 values for 2 model chunks; give 2"):
        Costs((1, 1), (1, 1), (1, 1), gather=(1,))
    with pytest.raises(ConfigError, match=r"cost.hops: 2 values for 2 model chunks; give 1"):
        Costs((1, 1), (1, 1), (1, 1), hops=(1, 1))
    with pytest.raises(ConfigError, match=r"cost.vote = -1: not a duration"):
        Costs.uniform(2, vote=-1)


# --- the command


def shown(*arguments: str) -> Any:
    return json.loads(CliRunner().invoke(schedule, [*arguments, "--format", "json"], catch_exceptions=False).output)


def test_the_command_takes_what_is_besides_tasks() -> None:
    plain, whole = shown("--stages", "4"), shown("--stages", "4", "--besides", "2,3,1,1")
    assert whole.keys() - plain.keys() == {"besides", "exposed"}
    assert whole["makespan"] > plain["makespan"]
    assert whole["besides"]["gather"] == [2] * 8
    assert all(waits > 0 for waits in whole["exposed"])
    text = CliRunner().invoke(schedule, ["--besides", "2,3,1,1"], catch_exceptions=False).output
    assert "waits for gathers and reduces" in text


def test_a_link_between_nodes_is_slow_where_it_is() -> None:
    inside, between, both = (
        shown("--stages", "4", "--cost", "1,1,1,0.1", *more)["makespan"]
        for more in ((), ("--nodes", "4", "--between", "2"), ("--nodes", "2", "--between", "2"))
    )
    assert inside < both < between
    assert between == shown("--stages", "4", "--cost", "1,1,1,2")["makespan"]


def test_dear_gathers_tell_the_policies_apart() -> None:
    rows = {
        row["policy"]: row for row in shown("--stages", "4", "--besides", "1,1,0,0", "--policy", "all", "--compare")
    }
    free = {row["policy"]: row for row in shown("--stages", "4", "--policy", "all", "--compare")}
    assert rows["zeropp"]["makespan"] - free["zeropp"]["makespan"] < 5
    assert rows["interleaved"]["makespan"] - free["interleaved"]["makespan"] > 10
    nodes = ("--nodes", "2", "--between", "1", "--policy", "zb-v", "--compare")
    assert shown("--stages", "4", *nodes)[0]["makespan"] > free["zb-v"]["makespan"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--besides 1,2", "--besides = 1,2: not four numbers; give those of gather, reduce, update and vote"),
        ("--besides 1,2,-3,4", "cost.optimizer = -3: not a duration"),
        ("--nodes 3", "--nodes = 3: stages lie on 1 to 2 nodes"),
        ("--between 1", "--between = 1: there is one node; give --nodes too"),
        ("--nodes 2", "--nodes = 2: what does a transfer between them take? give --between too"),
        ("--besides 1,1,1,1 --costs there.json", "--besides = 1,1,1,1: is in there.json too"),
    ],
)
def test_what_the_command_refuses(arguments: str, problem: str) -> None:
    assert str(CliRunner().invoke(schedule, arguments.split()).exception).startswith(problem)
