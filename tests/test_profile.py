"""Measured costs: every chunk is measured as it runs, and a file of another model is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner

from jobs.plan import plan
from jobs.profile import profile
from jobs.report import plan_table
from jobs.schedule import schedule
from jobs.train import completed
from tests.test_parameter_kinds import of as kind_of
from zeropp_ray.checkpoint.resume import resumed
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.errors import ConfigError
from zeropp_ray.planner import profile as measuring
from zeropp_ray.planner.cost_file import costs_of, identity, read_costs, write_costs
from zeropp_ray.planner.measured import measured as parts_of
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.planner.profile import measure
from zeropp_ray.schedule import Costs, Sizes

SMALL = ("model.dim=16", "model.layers=4", "model.seq_len=16", "parallel.microbatches=4", "recovery.enabled=false")


def small(*more: str) -> RunConfig:
    return load_config(None, [*SMALL, *more])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes for the small model."""
    path = tmp_path_factory.mktemp("profile") / "costs.json"
    settings = [part for text in SMALL for part in ("--set", text)]
    shown = CliRunner().invoke(profile, [*settings, "--out", str(path), "--microbatches", "2"], catch_exceptions=False)
    assert len(shown.output.split("\n\n")[0].splitlines()) == 1 + 4 + 1, "a line for each model chunk, and the message"
    again = CliRunner().invoke(profile, [*settings, "--out", str(path)])
    assert "is there already" in str(again.exception)
    return path


def test_a_run_takes_what_was_measured(measured: Path) -> None:
    config = small(f"parallel.costs={measured}")
    _, costs = read_costs(measured)
    assert len(costs.F) == 4
    exchanges = (*costs.gather, *costs.reduce, costs.comm, costs.post)  # of two members: the default
    assert all(0 < value < math.inf for value in (*costs.F, *costs.B, *costs.W, *exchanges, *costs.optimizer))
    assert costs.overlap
    assert costs.sizes is not None
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
        ("parallel.shards=1", "parallel.shards: 2 there, 1 here"),
        ("parallel.chunks=1", "blocks of the chunks: [1, 1, 1, 1] there, [2, 2] here"),
    ],
)
def test_a_file_of_another_model_is_refused(measured: Path, change: str, differs: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_plan(small(f"parallel.costs={measured}", change))
    assert differs in str(refusal.value)
    assert "zeropp profile" in str(refusal.value)


def test_the_planner_takes_it(measured: Path, tmp_path: Path) -> None:
    config = small()
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    given = ["--from", str(file), "--device", "cpu", "--nodes", "1", "--costs"]
    shown = CliRunner().invoke(plan, [*given, str(measured)], catch_exceptions=False).output
    row = next(line.split() for line in shown.splitlines() if line.startswith("file"))
    _, costs = read_costs(measured)
    stages = [sum(sum(task[p::2]) for task in (costs.F, costs.B, costs.W)) for p in range(2)]
    assert float(row[8]) >= 0.9 * 4 * max(stages), "a step takes four micro-batches' measured tasks"
    for problem, more in (
        ("model.dim: 16 there, 32 here", {"dim": 32}),
        ("model.layers: 4 there, 8 here", {"layers": 8}),
    ):
        other = dataclasses.replace(config, model=dataclasses.replace(config.model, **more))
        file.write_text(other.to_toml(), encoding="utf-8")
        refused = str(CliRunner().invoke(plan, [*given, str(measured)]).exception)
        assert problem in refused
        assert refused.startswith("--costs = ")


@pytest.mark.parametrize(
    ("of", "column", "values"),
    [
        ("seconds", "F", [10**400, 1]),
        ("bytes", "saved", [1]),
        ("bytes", "inputs", [1, -1]),
        ("bytes", "stashed", [1, math.nan]),
    ],
)
def test_damaged_columns_are_refused(tmp_path: Path, of: str, column: str, values: list[float]) -> None:
    file = tmp_path / "costs.json"
    two = ((1, 1),) * 5
    write_costs(file, {}, Costs(*two[:3], sizes=Sizes(*two)), {})
    read_costs(file)
    damaged = json.loads(file.read_text(encoding="utf-8"))
    damaged[of][column] = values
    file.write_text(json.dumps(damaged), encoding="utf-8")
    with pytest.raises(ConfigError, match="is damaged"):
        read_costs(file)


def test_what_was_measured_of_one_cut_gives_any_other(tmp_path: Path) -> None:
    """A block between the ends shows what a block takes; the rest of the first and last chunk is embedding and head."""
    config = small("model.layers=9")
    each = {"F": (0.1, 1.0, 0.5), "B": (0.0, 1.25, 0.75), "W": (0.25, 0.75, 0.5)}
    cut = {"parallel.microbatch_size": 2, "blocks of the chunks": [2, 3, 3, 1]}
    seconds = [
        [n * block + (c == 0) * e + (c == 3) * h for c, n in enumerate((2, 3, 3, 1))] for e, block, h in each.values()
    ]
    write_costs(tmp_path / "costs.json", {**identity(config, ()), **cut}, Costs(*map(tuple, seconds)), {})
    found = parts_of(tmp_path / "costs.json", config, "--costs")
    assert found.microbatch_size == 2
    for k, (embed, block, head) in enumerate(each.values()):
        assert (found.embed[k], found.block[k], found.head[k]) == pytest.approx((embed, block, head))
    two = {**identity(config, ()), **cut, "blocks of the chunks": [5, 4]}
    write_costs(tmp_path / "two.json", two, Costs((1, 1), (1, 1), (1, 1)), {})
    with pytest.raises(ConfigError, match="of 2 chunks"):
        parts_of(tmp_path / "two.json", config, "--costs")
    damaged = {**identity(config, ()), **cut, "blocks of the chunks": [2, 3, 4]}
    write_costs(tmp_path / "damaged.json", damaged, Costs(*map(tuple, seconds)), {})
    with pytest.raises(ConfigError, match="is damaged"):
        parts_of(tmp_path / "damaged.json", config, "--costs")


def test_a_file_keeps_all_of_it(tmp_path: Path) -> None:
    sizes = Sizes(*[(1.0 + k, 2.0) for k in range(5)])
    each = {name: (0.5 + k, 1.0) for k, name in enumerate(("F", "B", "W", "RF", "gather", "reduce", "optimizer"))}
    for number, overlap in enumerate((True, False)):
        costs = Costs(**each, comm=0.25, vote=0.125, post=0.0625, overlap=overlap, sizes=sizes if overlap else None)
        file = tmp_path / f"{number}.json"
        write_costs(file, {"model.dim": 16}, costs, {})
        assert read_costs(file) == ({"model.dim": 16}, costs)


def test_what_is_no_such_file_is_refused(measured: Path, tmp_path: Path) -> None:
    good = json.loads(measured.read_text())
    seconds = good["seconds"]
    bad = {
        "not JSON": "F = 1",
        "no file of costs": "[1]",
        "no file of costs; measure": json.dumps({**good, "format": "x"}),
        "is of version 1, and 2 can be read; measure anew": json.dumps({**good, "version": 1}),
        "no seconds or bytes of each": json.dumps({**good, "seconds": {}}),
        "cost.B = -1.0": json.dumps({**good, "seconds": {**seconds, "B": [-1] * 4}}),
    }
    for problem, text in bad.items():
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            read_costs(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="no such file"):
        costs_of(small(f"parallel.costs={tmp_path / 'none'}"), make_plan(small()).ranges)


@pytest.mark.parametrize("kind", ["tied", "frozen_beginning", "in_place"])
def test_every_kind_of_parameter_can_be_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = kind_of(kind, 2, 1)
    measure_chunk, at_work, before = measuring._measure_chunk, [], set(multiprocessing.active_children())

    def watched(*arguments: object) -> object:
        at_work.append(len(set(multiprocessing.active_children()) - before))
        return measure_chunk(*arguments)

    monkeypatch.setattr(measuring, "_measure_chunk", watched)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    costs, link = measure(config, make_plan(config), 1, transfer=0.5)
    assert at_work == [1, 1], "the other member of the run"
    assert set(multiprocessing.active_children()) <= before
    assert link is None
    assert len(costs.F) == len(costs.optimizer) == 2
    assert all(value > 0 for value in (*costs.gather, *costs.optimizer))
    assert not costs.overlap
    assert costs.comm == 0.5


def test_a_resumed_run_keeps_them_while_its_chunks_are_the_same(measured: Path) -> None:
    config = small(f"parallel.costs={measured}").resolved()
    manifest = SimpleNamespace(config=config.to_dict())
    checkpoint = SimpleNamespace(path="there", step=1, config=config, manifest=manifest)
    assert resumed(checkpoint, ["train.steps=999"]).parallel.costs == str(measured)
    assert resumed(checkpoint, ["parallel.shards=1", "parallel.replicas=2"]).parallel.costs == ""  # other exchanges
    assert resumed(checkpoint, ["parallel.chunks=1"]).parallel.costs == ""
    auto = resumed(checkpoint, ["parallel.unit=auto"]).parallel
    assert (auto.unit, auto.memory_limit) == ("auto", 0)
    assert resumed(checkpoint, []) == config


def test_the_other_members_do_not_outlive_who_started_them() -> None:
    code = f"""if True:
        import multiprocessing, os, sys
        from zeropp_ray.config import load_config
        from zeropp_ray.planner.plan import make_plan
        from zeropp_ray.planner.profile import _company
        os.cpu_count = lambda: 2
        config = load_config(None, {SMALL!r})
        with _company(config, make_plan(config)):
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as ours:
        assert ours.stdout is not None
        (other,) = [psutil.Process(int(pid)) for pid in ours.stdout.readline().split()]
        ours.kill()
    _, alive = psutil.wait_procs([other], timeout=20)
    for process in alive:
        process.kill()
    assert not alive
