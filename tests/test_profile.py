"""Measured costs: every chunk is measured as it runs, and a file of another model is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from jobs.profile import profile
from jobs.report import plan_table
from jobs.schedule import schedule
from jobs.train import completed
from tests.test_parameter_kinds import of as kind_of
from zeropp_ray.checkpoint.resume import resumed
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.errors import ConfigError
from zeropp_ray.planner.cost_file import costs_of, read_costs
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.planner.profile import measure

SMALL = ("model.dim=16", "model.layers=4", "model.seq_len=16", "parallel.microbatches=4", "recovery.enabled=false")


def small(*more: str) -> RunConfig:
    return load_config(None, [*SMALL, *more])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes for the small model."""
    path = tmp_path_factory.mktemp("profile") / "costs.json"
    settings = [part for text in SMALL for part in ("--set", text)]
    shown = CliRunner().invoke(profile, [*settings, "--out", str(path), "--microbatches", "2"], catch_exceptions=False)
    assert len(shown.output.split("\n\n")[0].splitlines()) == 1 + 4, "a line for each model chunk"
    again = CliRunner().invoke(profile, [*settings, "--out", str(path)])
    assert "is there already" in str(again.exception)
    return path


def test_a_run_takes_what_was_measured(measured: Path) -> None:
    config = small(f"parallel.costs={measured}")
    _, costs = read_costs(measured)
    assert len(costs.F) == 4
    assert all(0 < value < math.inf for value in (*costs.F, *costs.B, *costs.W))
    plan = make_plan(config)
    assert plan.program.spec.costs == costs
    assert plan.table(config)["predicted_step_s"] == plan.program.makespan
    assert "s a step by the measured costs" in plan_table(plan.table(config), config, "a text")
    other_stages = small(f"parallel.costs={measured}", "parallel.stages=4", "parallel.chunks=1")
    assert make_plan(other_stages).program.spec.costs == costs, "the same chunks on other stages"
    kept = completed(small(f"parallel.costs={measured}", "parallel.unit=auto"))
    spec = make_plan(kept).program.spec
    assert (kept.parallel.unit, kept.parallel.memory_limit, spec.costs) == (spec.unit, spec.memory_limit, costs)


def test_the_schedule_takes_it(measured: Path) -> None:
    _, costs = read_costs(measured)
    shown = CliRunner().invoke(schedule, ["--costs", str(measured), "--format", "json"], catch_exceptions=False)
    assert json.loads(shown.output)["makespan"] >= 8 * max(costs.F)
    refused = CliRunner().invoke(schedule, ["--costs", str(measured), "--stages", "3"]).exception
    assert "4 values for 3 × 2 model chunks" in str(refused)
    refused = CliRunner().invoke(schedule, ["--costs", str(measured), "--compare"]).exception
    assert "--compare" in str(refused)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ("model.dim=32", "model.dim: 16 there, 32 here"),
        ("model.seq_len=8", "model.seq_len: 16 there, 8 here"),
        ("train.dtype=bfloat16", "train.dtype: 'float32' there, 'bfloat16' here"),
        ("parallel.microbatch_size=1", "parallel.microbatch_size: 2 there, 1 here"),
        ("parallel.chunks=1", "blocks of the chunks: [1, 1, 1, 1] there, [2, 2] here"),
    ],
)
def test_a_file_of_another_model_is_refused(measured: Path, change: str, differs: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_plan(small(f"parallel.costs={measured}", change))
    assert differs in str(refusal.value)
    assert "zeropp profile" in str(refusal.value)


def test_what_is_no_such_file_is_refused(measured: Path, tmp_path: Path) -> None:
    good = json.loads(measured.read_text())
    seconds = good["seconds"]
    bad = {
        "not JSON": "F = 1",
        "no file of costs": "[1]",
        "no file of costs; measure": json.dumps({**good, "format": "x"}),
        "is of version 2, and 1 can be read": json.dumps({**good, "version": 2}),
        "no seconds of F": json.dumps({**good, "seconds": {}}),
        "cost.B = -1.0": json.dumps({**good, "seconds": {**seconds, "B": [-1] * 4}}),
    }
    for problem, text in bad.items():
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            read_costs(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="no such file"):
        costs_of(small(f"parallel.costs={tmp_path / 'none'}"), make_plan(small()).ranges)


@pytest.mark.parametrize("kind", ["tied", "frozen_beginning", "in_place"])
def test_every_kind_of_parameter_can_be_measured(kind: str) -> None:
    config = kind_of(kind, 2, 1)
    costs = measure(config, make_plan(config), 1, transfer=0.5)
    assert len(costs.F) == 2
    assert costs.comm == 0.5


def test_a_resumed_run_keeps_them_while_its_chunks_are_the_same(measured: Path) -> None:
    config = small(f"parallel.costs={measured}").resolved()
    manifest = SimpleNamespace(config=config.to_dict())
    checkpoint = SimpleNamespace(path="there", step=1, config=config, manifest=manifest)
    assert resumed(checkpoint, ["parallel.shards=1", "parallel.replicas=2"]).parallel.costs == str(measured)
    assert resumed(checkpoint, ["parallel.chunks=1"]).parallel.costs == ""
    auto = resumed(checkpoint, ["parallel.unit=auto"]).parallel
    assert (auto.unit, auto.memory_limit) == ("auto", 0)
    assert resumed(checkpoint, []) == config
