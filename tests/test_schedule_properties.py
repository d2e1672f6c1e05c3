"""What holds for every P, V, N, U, costs and limit, judged by code that shares nothing with the passes."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp_ray.errors import ScheduleError
from zeropp_ray.schedule import (
    Action,
    Costs,
    Op,
    Program,
    ScheduleSpec,
    check,
    compile_forward,
    compile_program,
    least_limit,
    lower_bound,
    resolve,
    split_units,
    to_grid,
    to_json,
    zeropp_order,
)
from zeropp_ray.schedule.order import RULES, _run

COST = st.sampled_from([0, 0.25, 0.5, 0.7, 1, 1.3, 2, 5])
FORWARD_COST = st.sampled_from([0.25, 0.5, 1, 1.3, 2, 5])


@st.composite
def specs(draw: st.DrawFn) -> ScheduleSpec:
    """Any spec, small; limits from the least possible up, costs equal or per model chunk, any policy."""
    P, V = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    N = draw(st.integers(P, 16))
    unit = draw(st.integers(P, N))
    spread = draw(st.sampled_from([1, P * V]))  # all chunks the same, or each its own

    def column(cost: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(cost, min_size=spread, max_size=spread))) * (P * V // spread)

    costs = Costs(column(FORWARD_COST), column(COST), column(COST), draw(COST))
    recompute = draw(st.sampled_from(["none", "full", "selective"] if V > 1 else ["none", "full"]))
    least = least_limit(split_units(N, unit), V, recompute != "none")
    limit = draw(st.sampled_from([0, least, least + 1 / V, least + P, 2 * N]))
    reduce = draw(st.sampled_from(["unit", "step"]))
    return resolve(P, V, N, unit, limit, draw(st.booleans()), costs, recompute, reduce)


@settings(max_examples=150, deadline=None)
@given(specs())
def test_every_spec_compiles_and_holds(spec: ScheduleSpec) -> None:
    """The check runs inside of compile_program; the judge below reads only the JSON form."""
    program = compile_program(spec)
    judge(to_json(program), spec)
    K, V = len(spec.units), spec.chunks
    sums = K if spec.reduce == "unit" else 1
    assert set(program.gathers) == {(2 * V - 2) * K + 1}
    assert set(program.reduces) == {V * sums}
    assert set(program.peak_gradient_buffers) == {V if sums < K else 1}
    assert max(program.peak_resident) <= 1 + spec.prefetch
    assert max(program.peak_activations) <= spec.memory_limit + 1e-9
    assert max(program.peak_inputs) <= max(spec.units) * sum(spec.recomputed) + spec.stages
    assert program.makespan >= program.lower_bound * (1 - 1e-12)
    assert 0 <= program.bubble < 1
    assert compile_program(spec) == program
    to_grid(program)


@settings(max_examples=60, deadline=None)
@given(specs())
def test_no_order_is_worse_than_the_greedy_one(spec: ScheduleSpec) -> None:
    """And no rule gets stuck; where none is better, the order is the greedy one."""
    ends = [max(rank.free_at for rank in _run(spec, rule, 1 << 200) or ()) for rule in RULES]
    makespan = compile_program(spec).makespan
    greedy, best = (end / spec.costs.ticks().scale for end in (ends[0], min(ends)))
    assert makespan == best or makespan <= 1.001 * lower_bound(spec)
    assert makespan <= greedy
    if makespan == greedy:
        assert zeropp_order(spec) == [rank.order for rank in _run(spec, RULES[0], 1 << 200) or ()]


def judge(shown: dict[str, Any], spec: ScheduleSpec) -> None:
    """Dependencies by time, one task at a time per rank, phases, residency, memory and gradient buffers."""
    P, V, N, cost = shown["stages"], shown["chunks"], shown["microbatches"], spec.costs
    recomputed, whole_step = shown["recomputed"], shown["reduce"] == "step"
    end: dict[tuple[str, int, int], float] = {}
    for rank in shown["ranks"]:
        for action in rank["actions"]:
            if action["op"] in ("F", "RF", "B", "W"):
                key = (action["op"], action["model_chunk"], action["microbatch"])
                assert key not in end, "twice"
                end[key] = action["end"]
                duration = getattr(cost, action["op"][-1])[action["model_chunk"]]
                assert action["end"] - action["start"] == pytest.approx(duration, abs=1e-9)
    assert len(end) == (3 * V + sum(recomputed)) * P * N
    assert {c % (P * V) // P for op, c, _ in end if op == "RF"} == {v for v in range(V) if recomputed[v]}
    last, comm = P * V - 1, cost.comm if P > 1 else 0
    unit_of = [k for k, size in enumerate(shown["units"]) for _ in range(size)]
    for rank in shown["ranks"]:
        now = 0.0
        resident: set[int] = set()
        order: dict[str, list[tuple[int, int]]] = defaultdict(list)
        live = peak = inputs = most_inputs = reduced = 0
        buffer: tuple[int, int] | None = None
        open_buffers: set[int] = set()
        for action in rank["actions"]:
            op, v, c, start = action["op"], action["chunk"], action["model_chunk"], action["start"]
            assert c == v * P + rank["rank"]
            assert start >= now - 1e-9, "two at a time"
            now = action["end"]
            if op == "GATHER":
                assert v not in resident
                resident.add(v)
                assert len(resident) <= 1 + spec.prefetch
            elif op == "RELEASE":
                resident.remove(v)
            elif op == "REDUCE" and whole_step:
                open_buffers.remove(v)
                assert order["W"].count((v, N - 1)) == 1, "not the whole step"
            elif op == "REDUCE":
                assert buffer is not None
                assert (v, len(order["W"])) == (buffer[0], reduced + shown["units"][buffer[1]]), "not one whole unit"
                reduced = len(order["W"])
                buffer = None
            else:
                m = action["microbatch"]
                order[op].append((v, m))
                needs = {
                    "F": [("F", c - 1, m, comm)] if c > 0 else [],
                    "RF": [("F", c, m, 0)],
                    "B": [("RF" if recomputed[v] else "F", c, m, 0), *([("B", c + 1, m, comm)] if c < last else [])],
                    "W": [("B", c, m, 0)],
                }[op]
                for *key, delay in needs:
                    assert start >= end[tuple(key)] + delay - 1e-9, f"{op} {c} {m} before {key}"
                assert op == "W" or v in resident
                live += {"F": not recomputed[v], "RF": 1, "B": 0, "W": -1}[op]
                inputs += {"F": recomputed[v], "RF": -1}.get(op, 0)
                peak, most_inputs = max(peak, live), max(most_inputs, inputs)
                if op == "W" and whole_step:
                    open_buffers.add(v)
                elif op == "W":
                    assert buffer in (None, (v, unit_of[m])), "a second gradient buffer"
                    buffer = (v, unit_of[m])
        assert not resident
        assert buffer is None
        assert not open_buffers
        assert most_inputs == rank["peak_inputs"]
        assert peak / V == rank["peak_activations"] <= shown["memory_limit"] + 1e-9
        assert order["W"] == order["B"], "W run in the order of their B"
        for op, forwards in (
            ("F", 1),
            ("RF", -1),
            ("B", -1),
        ):  # by unit, then by chunk (backwards for B), then by micro-batch
            blocks = [(unit_of[m], forwards * v, m) for v, m in order[op]]
            assert V == 1 or blocks == sorted(blocks)


@settings(max_examples=50, deadline=None)
@given(specs(), st.integers(1, 9))
def test_every_evaluation_compiles_and_holds(spec: ScheduleSpec, microbatches: int) -> None:
    program = compile_forward(spec, microbatches)
    assert all(sum(action.op is Op.F for action in r) == spec.chunks * microbatches for r in program.ranks)
    units = len(program.spec.units)
    assert set(program.gathers) == {spec.chunks * units if spec.chunks > 1 else 1}
    assert max(program.peak_resident) <= 1 + spec.prefetch


@settings(max_examples=40, deadline=None)
@given(specs(), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_members_tied_by_collectives_finish_in_any_order(spec: ScheduleSpec, members: int, seed: int) -> None:
    """What the check argues from one column: members of a stage, at whatever pace, never wait for ever."""
    program = compile_program(spec)
    race(program, members, random.Random(seed))


def race(program: Program, members: int, choose: random.Random) -> None:
    """Run all members' lists in random order; collectives wait for the stage, transfers for their other end."""
    spec, collective = program.spec, (Op.GATHER, Op.REDUCE)
    everyone = [(p, f) for p in range(spec.stages) for f in range(members)]
    position = dict.fromkeys(everyone, 0)
    posted: set[tuple[int, int, Action]] = set()

    def can_run(p: int, f: int) -> bool:
        i = position[p, f]
        action = program.ranks[p][i]
        if action.op in collective:  # runs with the last member to come; those before it then pass
            return all(position[p, other] >= i for other in range(members))
        if action.op in (Op.WAIT, Op.DRAIN):
            find, post = (spec.incoming, Op.SEND) if action.op is Op.WAIT else (spec.outgoing, Op.RECV)
            hop = find(p, action.chunk, action.kind)
            assert hop is not None
            other = hop.edge.source if action.op is Op.WAIT else hop.edge.destination
            return (other, f, Action(post, hop.chunk, action.microbatch, action.kind)) in posted
        return True

    left = set(everyone)
    while left:
        able = [member for member in sorted(left) if can_run(*member)]
        assert able, "deadlock"
        p, f = choose.choice(able)
        for _ in range(choose.randint(1, 20)):
            action = program.ranks[p][position[p, f]]
            if action.op in (Op.SEND, Op.RECV):
                posted.add((p, f, action))
            position[p, f] += 1
            if position[p, f] == len(program.ranks[p]):
                left.discard((p, f))
                break
            if not can_run(p, f):
                break


@settings(max_examples=60, deadline=None)
@given(specs(), st.data())
def test_any_lost_action_is_noticed(spec: ScheduleSpec, data: st.DataObject) -> None:
    """There is nothing in a program that it could do without."""
    program = compile_program(spec)
    ranks = [list(actions) for actions in program.ranks]
    p = data.draw(st.integers(0, spec.stages - 1))
    del ranks[p][data.draw(st.integers(0, len(ranks[p]) - 1))]
    with pytest.raises(ScheduleError, match="rank "):
        check(ranks, spec, program.in_flight)
