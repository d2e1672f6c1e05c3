"""The unit that is chosen by replays: the one that a search through all of them would choose."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from jobs.config import decided
from jobs.schedule import schedule
from zeropp_ray.config import load_config
from zeropp_ray.errors import ConfigError
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.schedule import Costs, Program, ScheduleSpec, compile_program, resolve, tune
from zeropp_ray.schedule.order import zeropp_makespan

COSTS = [(1, 1, 1, 0), (1, 1.3, 0.7, 0.25), (1, 2, 1, 0.1)]


def spec_of(P: int, V: int, N: int, cost: tuple[float, ...], unit: int | str, **more) -> ScheduleSpec:
    return resolve(P, V, N, unit, costs=Costs.uniform(P * V, *cost), **more)


def tuned(P: int, V: int, N: int, cost: tuple[float, ...], **more) -> ScheduleSpec:
    return tune(spec_of(P, V, N, cost, "auto", **more), more.get("memory_limit", 0.0))


def every_unit(P: int, V: int, N: int, cost: tuple[float, ...], **more) -> dict[tuple[int, ...], Program]:
    """All that have a schedule."""
    found = {}
    for U in range(P, N + 1):
        try:
            spec = spec_of(P, V, N, cost, U, **more)
        except ConfigError:
            continue
        found.setdefault(spec.units, compile_program(spec))
    return found


SIZES = [(2, 2, 9), (3, 3, 14), (4, 2, 21), (4, 1, 8), (1, 2, 5)]
MORE: list[dict] = [{}, {"policy": "zeropp-published"}, {"recompute": "selective"}]


# Makespans of 1 to 5 units: 456.76, 374.32, 373.60, 372.08, 393.84. Three are within 0.5% of four, and two are not.
CLOSE = (4, 4, 30, (1, 1.6, 0.4, 0.18), {})


@pytest.mark.parametrize(
    ("P", "V", "N", "cost", "more"),
    # With one chunk, which is the last one, selective recomputes nothing.
    [
        *(
            (*size, cost, more)
            for size in SIZES
            for more in MORE
            for cost in COSTS
            if not ("recompute" in more and size[1] == 1)
        ),
        CLOSE,
    ],
)
def test_it_is_the_choice_of_a_whole_search(P, V, N, cost, more) -> None:
    limit = 2 * P / V if "recompute" in more else 2 * P
    plans = every_unit(P, V, N, cost, memory_limit=limit, **more)
    near = 1.005 * min(plan.makespan for plan in plans.values())
    good = {units: plan for units, plan in plans.items() if plan.makespan <= near}
    units = min(good, key=lambda units: (max(good[units].gathers), len(units)))
    chosen = tuned(P, V, N, cost, **more)
    assert chosen.units == units
    assert chosen.memory_limit <= max(good[units].peak_activations) <= limit
    program = compile_program(chosen)
    assert program.makespan <= good[units].makespan
    # One chunk activation less: there is no schedule, or it takes longer.
    try:
        less = spec_of(P, V, N, cost, chosen.unit, memory_limit=(chosen.live_chunks - 1) / V or -1.0, **more)
    except ConfigError:
        return
    assert compile_program(less).makespan > program.makespan


@pytest.mark.parametrize(
    ("P", "V", "N", "cost", "ratio"),
    [
        (4, 2, 28, (1, 1, 1, 0), 1.0),
        (8, 2, 32, (1, 1.3, 0.7, 0.25), 1.002),
        (8, 4, 64, (1, 1.3, 0.7, 0.25), 1.001),
        (16, 2, 124, (1, 2, 1, 0.1), 1.0071),
    ],
)
def test_it_reaches_the_table(P, V, N, cost, ratio) -> None:
    program = compile_program(tuned(P, V, N, cost))
    assert program.makespan <= ratio * program.lower_bound
    assert max(program.peak_activations) <= 2 * P


def test_a_given_limit_holds() -> None:
    wide, narrow = (tuned(8, 4, 64, COSTS[1], memory_limit=limit) for limit in (0.0, 10.0))
    assert narrow.memory_limit <= 10 < wide.memory_limit
    assert max(compile_program(narrow).peak_activations) <= 10
    with pytest.raises(ConfigError, match="least limit is 3 "):
        tuned(4, 2, 21, COSTS[0], memory_limit=2)


@pytest.mark.parametrize("policy", ["gpipe", "zb-v", "interleaved", "zeropp-one-unit"])
def test_a_policy_without_a_choice_keeps_its_own(policy: str) -> None:
    V = 1 if policy == "gpipe" else 2
    assert tuned(2, V, 8, COSTS[1], policy=policy) == spec_of(2, V, 8, COSTS[1], 0, policy=policy)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_replay_ends_early_only_beyond_the_bound(cost, recompute: str) -> None:
    spec = spec_of(3, 2, 11, cost, 4, recompute=recompute)
    whole = compile_program(spec).makespan
    assert zeropp_makespan(spec) == whole == zeropp_makespan(spec, whole)
    assert zeropp_makespan(spec, whole * 0.999) == float("inf")


def test_the_choice_is_written_out_and_stays() -> None:
    small = ["model.dim=16", "parallel.stages=2", "parallel.microbatches=12", "parallel.unit=auto"]
    config = load_config(None, small)
    kept = decided(config.resolved())
    spec = make_plan(config).program.spec
    assert (kept.parallel.unit, kept.parallel.memory_limit) == (spec.unit, spec.memory_limit)
    assert isinstance(spec.unit, int)
    assert 0 < spec.memory_limit <= 4
    assert decided(kept.resolved()) == kept
    assert make_plan(kept).program == make_plan(config).program


def test_the_command() -> None:
    run = ["--stages", "4", "--microbatches", "28", "--cost", "1,1.3,0.7,0.25", "--unit", "auto", "--format", "json"]
    shown = json.loads(CliRunner().invoke(schedule, run, catch_exceptions=False).output)
    spec = tuned(4, 2, 28, COSTS[1])
    assert (shown["units"], shown["memory_limit"]) == (list(spec.units), spec.memory_limit)
    rows = json.loads(CliRunner().invoke(schedule, [*run, "--compare"], catch_exceptions=False).output)
    assert rows[0]["makespan"] == shown["makespan"]
    refused = CliRunner().invoke(schedule, ["--unit", "best"]).exception
    assert str(refused) == "--unit = 'best': expected a whole number, or 'auto'"
