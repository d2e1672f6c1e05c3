"""The planner: sizes as the models are, memory as zeropp.md and a run's own prediction have it, times as the replay has
them and as published runs were, and what a user is told.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from actors.assignment import Node, assign
from jobs.cli import zeropp
from zeropp_ray.config import ModelSection, RunConfig, load_config
from zeropp_ray.errors import ConfigError
from zeropp_ray.layout import Layout
from zeropp_ray.metrics import kinds
from zeropp_ray.models import cut, describe, resolve_factory
from zeropp_ray.planner.cost_model import Choice, Rival, estimate, memory_limit
from zeropp_ray.planner.hardware import cluster
from zeropp_ray.planner.memory import predict_memory
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.planner.rating import rated, task_costs
from zeropp_ray.planner.search import choice_of, other_policies, search
from zeropp_ray.planner.sizes import even_cut, sizes_from, sizes_of
from zeropp_ray.planner.tensor_parallel import estimate_3d, live_microbatches
from zeropp_ray.precision import Precision
from zeropp_ray.schedule import POLICIES

TINY = ModelSection(layers=16, dim=256, heads=4, vocab_size=1000, seq_len=128)


def choice(**changes: object) -> Choice:
    given = Choice(4, 2, 2, 1, False, 16, 1, 8, 0.0, False, "none", "unit")._replace(**changes)
    limit = memory_limit(given.unit, given.stages, given.chunks, given.recompute, 2 * given.stages)
    return given if given.memory_limit else given._replace(memory_limit=limit)


# --- sizes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "model",
    [
        ModelSection(layers=2, dim=64, heads=4, kv_heads=2, head_dim=24, ffn_dim=40, vocab_size=50, seq_len=32),
        ModelSection(family="gpt2", layers=2, dim=64, heads=4, ffn_dim=40, vocab_size=50, seq_len=32),
    ],
    ids=["llama", "gpt2"],
)
def test_sizes_in_closed_form_are_those_of_the_model_that_is_tried(model: ModelSection, dtype: str) -> None:
    precision = Precision.of(dtype)
    tried = sizes_from(
        describe(resolve_factory(model), 32, precision=precision), model.label, precision.compute.itemsize
    )
    closed = sizes_of(model, dtype)
    # The first block that is tried also makes the table of rotary angles, which all of them share.
    assert closed.block.saved == pytest.approx(tried.block.saved, rel=0.03)
    same = {"saved": 0.0}
    assert closed.block._replace(**same) == tried.block._replace(**same)
    assert (closed.embed, closed.head, closed.tied) == (tried.embed, tried.head, tried.tied)
    assert (closed.elements, closed.flops, closed.width) == (tried.elements, tried.flops, tried.width)


@pytest.mark.parametrize("layers", [7, 32, 45])
@pytest.mark.parametrize("head", [0.0, 0.3, 2.4])
def test_blocks_are_cut_as_a_run_cuts_them(layers: int, head: float) -> None:
    for chunks in range(1, layers + 1, 5):
        assert list(even_cut(layers, chunks, head)) == [len(blocks) for blocks in cut([1.0] * layers, 0, head, chunks)]


# --- memory


def test_memory_is_the_formula_by_kind() -> None:
    """ZeroPP in bf16: 12 Ψ/F masters and moments and 2 Ψ/F shards, 2 Ψ/V a resident chunk, 4 Ψ/V a gradient buffer (two
    with a reduce in flight), 4 Ψ/F reduced shards."""
    model = sizes_of(dataclasses.replace(TINY, vocab_size=1), "bfloat16")
    step = estimate(model, cluster("h100-80g", 8), choice())
    stage = model.layers / 4 * model.block.elements
    expected = {
        kinds.WEIGHTS: 14 * stage / 2,
        kinds.GRADIENT_SHARDS: 4 * stage / 2,
        kinds.RESIDENT: 2 * stage / 2,
        kinds.GRADIENT_BUFFERS: 2 * 4 * stage / 2,
        kinds.ACTIVATIONS: (8 + 8) * 2 * (model.layers / 8 * model.block.saved),
    }
    for kind, size in expected.items():
        assert step.memory[kind] == pytest.approx(size, rel=0.02), kind
    assert step.memory_bytes == pytest.approx(sum(step.memory.values()))
    split = estimate(model, cluster("h100-80g", 32), choice(replicas=4, zero1=True))
    assert split.memory[kinds.WEIGHTS] == pytest.approx((2 / 2 + 12 / 8) * stage, rel=1e-3)
    both = estimate(model, cluster("h100-80g", 8), choice(prefetch=True))
    assert both.memory[kinds.RESIDENT] == pytest.approx(2 * expected[kinds.RESIDENT], rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shards", [1, 2])
def test_memory_is_near_what_a_run_predicts(recompute: str, shards: int) -> None:
    """The run replays every instruction; the planner keeps activations whole until their W, so it takes more."""
    settings = {"stages": 2, "chunks": 2, "shards": shards, "microbatches": 8, "microbatch_size": 1}
    overrides = [f"parallel.{name}={value}" for name, value in settings.items()]
    model = [f"model.{name}={getattr(TINY, name)}" for name in ("layers", "dim", "heads", "vocab_size", "seq_len")]
    config = load_config(None, [*model, *overrides, f"parallel.recompute={recompute}", "recovery.copy_every=0"])
    plan = make_plan(config)
    run = max(sum(predict_memory(plan, config, stage).values()) for stage in range(2))
    on = dataclasses.replace(cluster("cpu", 2 * shards, nodes=1))
    on = dataclasses.replace(on, device=dataclasses.replace(on.device, host=False))
    sizes = sizes_of(config.model, "float32")
    paper = estimate(sizes, on, choice_of(config.parallel, sizes, on)).memory_bytes
    assert 0.95 * run < paper < 1.35 * run


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("policy", ["zeropp", "1f1b", "zb-v", "interleaved"])
def test_memory_by_replay_is_what_a_run_predicts(policy: str, recompute: str) -> None:
    """Of the same layout, under any policy; the planner takes messages at their most."""
    chunks = POLICIES[policy].chunks or 2
    parallel = {"stages": 2, "chunks": chunks, "microbatches": 8, "recompute": recompute, "policy": policy}
    model = {name: getattr(TINY, name) for name in ("dim", "heads", "vocab_size", "seq_len")}
    config = RunConfig.from_dict({"parallel": parallel, "model": {**model, "layers": 4, "tie_embeddings": True}})
    plan = make_plan(config)
    run = max(sum(predict_memory(plan, config, stage).values()) for stage in range(2))
    sizes, on = sizes_of(config.model, "float32"), cluster("cpu", 4, nodes=1)
    step = rated(sizes, on, choice_of(config.parallel, sizes, on))
    assert step.memory_bytes == pytest.approx(run, rel=0.03)
    assert step.seconds["tasks"] + step.seconds["stalls"] == pytest.approx(
        plan.program.makespan * task_costs(sizes, on, step.choice)[1], rel=0.01
    )


# --- time


@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ({}, 0.01),
        ({"chunks": 4, "microbatches": 32}, 0.01),
        ({"stages": 8, "chunks": 2, "microbatches": 64, "unit": 32}, 0.01),
        ({"recompute": "full"}, 0.01),
        ({"chunks": 1, "unit": 16}, 0.02),
        ({"unit": 4}, 0.03),
        ({"stages": 16, "unit": 16, "microbatches": 64}, 0.03),
        ({"stages": 8, "chunks": 4, "unit": 8, "microbatches": 64}, 0.06),
        ({"unit": 6, "microbatches": 24}, 0.03),
        ({"recompute": "full", "memory_limit": 0.5}, 0.06),
        ({"recompute": "selective", "memory_limit": 2.0}, 0.06),
    ],
)
def test_the_closed_form_is_near_the_replay(changes: dict[str, object], within: float) -> None:
    model = sizes_of(ModelSection(layers=64, dim=1024, heads=8, vocab_size=1000, seq_len=1024), "bfloat16")
    on = cluster("h100-80g", 64)
    closed = estimate(model, on, choice(**changes))
    assert closed.step_s == pytest.approx(rated(model, on, closed.choice).step_s, rel=within)


def test_a_long_step_goes_on_as_its_third_unit_did(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sizes_of(dataclasses.replace(TINY, layers=15, dim=1024), "bfloat16")
    on = cluster("h100-80g", 8)
    step = estimate(model, on, choice(microbatches=67, unit=6))
    whole = rated(model, on, step.choice)
    monkeypatch.setattr("zeropp_ray.planner.rating._ACTIONS", 0)
    short = rated(model, on, step.choice)
    assert short != whole
    assert short.step_s == pytest.approx(whole.step_s, rel=0.02)


def test_what_a_member_sends() -> None:
    """(2V-2) K + 1 gathers of a chunk, a reduce of every chunk and unit, a message for each F and B, sums over R."""
    model = sizes_of(dataclasses.replace(TINY, vocab_size=1), "bfloat16")
    stage, message = model.layers / 4 * model.block.elements, 2 * model.seq_len * model.hidden
    layout = choice(stages=4, chunks=4, shards=4, replicas=2, microbatches=32, unit=8)
    sent = estimate(model, cluster("h100-80g", 32), layout).traffic
    expected = {
        "gathers, nvlink4": (6 * 4 + 1) * 2 * stage / 4 * 3 / 4,
        "reduces, nvlink4": 4 * 4 * stage * 3 / 4,
        "stages, ib400": 2 * 4 * 32 * message,
        "replicas, ib400": 2 * 4 * stage / 4 * 1 / 2,
    }
    assert sent == pytest.approx(expected, rel=0.01)
    split = estimate(model, cluster("h100-80g", 32), layout._replace(zero1=True)).traffic
    assert split["replicas, ib400"] == pytest.approx(6 * stage / 4 * 1 / 2, rel=0.01)


@pytest.mark.parametrize(("chunks", "microbatches", "slower", "live"), [(2, 32, 1.070, 11.5), (4, 64, 1.018, 9.75)])
def test_interleaved_1f1b_is_that_of_the_schedules(chunks: int, microbatches: int, slower: float, live: float) -> None:
    """PyTorch's Interleaved1F1B on 8 stages, replayed with costs 1, 1, 1: over the least time, and live activations."""
    model = sizes_of(dataclasses.replace(TINY, layers=64, seq_len=1, vocab_size=1), "bfloat16")
    on = cluster("h100-80g", 8)
    on = dataclasses.replace(on, intra=dataclasses.replace(on.intra, bandwidth=1e30, latency=0.0))
    seconds = estimate_3d(model, on, Rival(1, 8, chunks, 1, microbatches, 1, "none")).seconds
    least = seconds["tasks"] * (1 + 7 / (3 * chunks * microbatches))
    assert (seconds["tasks"] + seconds["ramp"]) / least == pytest.approx(slower, abs=0.002)
    assert live_microbatches(8, chunks, 0) == live


PUBLISHED = {
    # Korthikanti et al., arXiv 2205.05198, tables 3 and 5: model FLOP utilisation on A100
    "GPT 175B": ((96, 12288, 96), Rival(8, 8, 3, 1, 64, 1, "none"), 0.514),
    "GPT 530B": ((105, 20480, 128), Rival(8, 35, 3, 1, 280, 1, "none"), 0.560),
    "GPT 530B, 2240": ((105, 20480, 128), Rival(8, 35, 3, 8, 280, 1, "none"), 0.542),
    "GPT 1T": ((128, 25600, 160), Rival(8, 64, 1, 1, 512, 1, "none"), 0.563),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs_come_out_within_a_tenth(name: str) -> None:
    (layers, dim, heads), layout, utilisation = PUBLISHED[name]
    sizes = {"layers": layers, "dim": dim, "heads": heads, "vocab_size": 51200, "seq_len": 2048}
    model = sizes_of(ModelSection(family="gpt2", **sizes), "bfloat16")
    on = cluster("a100-80g", layout.members)
    step = estimate_3d(model, on, layout)
    batch = layout.replicas * layout.microbatches * layout.microbatch_size
    assert batch * model.flops / step.step_s / on.count / on.device.peak == pytest.approx(utilisation, rel=0.1)


@pytest.mark.parametrize(("replicas", "tflops"), [(64, 430), (128, 400)])
def test_llama_405b_on_h100_comes_out_within_a_tenth(replicas: int, tflops: int) -> None:
    """Grattafiori et al., arXiv 2407.21783, table 4: 16 M tokens a step on 8,192 and 16,384 devices."""
    model = sizes_of(ModelSection(preset="llama3.1-405b", seq_len=8192), "bfloat16")
    layout = Rival(8, 16, 4, replicas, 2048 // replicas, 1, "none")
    step = estimate_3d(model, cluster("h100-80g", layout.members), layout)
    assert 2048 * model.flops / step.step_s / layout.members / 1e12 == pytest.approx(tflops, rel=0.1)


# --- search


def test_a_plan_fits_adds_up_and_runs() -> None:
    model = sizes_of(ModelSection(preset="llama3.2-1b", seq_len=2048), "bfloat16")
    on = cluster("a100-40g", 8)
    found = search(model, on, 64, show=3)
    assert 1 <= len(found.best) <= 3
    for step in found.best:
        assert step.replayed
        assert step.choice.members <= 8
        assert step.choice.shards * step.choice.replicas * step.choice.microbatches * step.choice.microbatch_size == 64
        assert step.memory_bytes <= on.device.usable
        assert step.step_s >= found.best[0].step_s
    assert all(step.memory_bytes > on.device.usable for step in found.refused)
    assert found.rival is not None
    assert 0 < found.utilisation(found.best[0]) < on.device.efficiency


def test_what_is_faster_and_does_not_fit_is_named() -> None:
    model = sizes_of(ModelSection(preset="llama3-8b", seq_len=8192), "bfloat16")
    found = search(model, cluster("h100-80g", 8), 32, show=2)
    assert found.refused
    assert all(step.step_s < found.best[0].step_s for step in found.refused)


def test_links_inside_and_between_nodes() -> None:
    on = cluster("h100-80g", 64)
    assert (on.nodes, on.per_node) == (8, 8)
    inside, shared, alone = (on.gather(1e9, 8, 1), on.gather(1e9, 64, 1), on.gather(1e9, 8, 8))
    assert inside == pytest.approx(7 / 8 * 1e9 / 360e9, rel=0.02)
    assert shared == pytest.approx(63 / 64 * 1e9 / (8 * 40e9), rel=0.2)  # eight adapters of each node together
    assert alone == pytest.approx(7 / 8 * 1e9 / 40e9, rel=0.02)
    assert on.gather(1e9, 1, 1) == 0


@pytest.mark.parametrize("zero1", [True, False])
@pytest.mark.parametrize(
    ("P", "F", "R"), [(2, 8, 2), (4, 4, 2), (2, 4, 4), (8, 2, 2), (1, 8, 4), (4, 16, 1), (2, 2, 2), (2, 4, 1)]
)
def test_links_are_those_over_which_a_run_is_placed(P: int, F: int, R: int, zero1: bool) -> None:
    layout = Layout(stages=P, chunks=1, shards=F, replicas=R, zero1=zero1)
    on = cluster("h100-80g", max(8, layout.size))
    placed = assign(layout, [Node(str(n), str(n), on.per_node) for n in range(on.nodes)])
    assert placed is not None
    where = placed[0]

    def crossed(*fixed: str) -> bool:
        groups: dict[tuple[int, ...], set[str]] = {}
        for me, node in where.items():
            groups.setdefault(tuple(getattr(me, name) for name in fixed), set()).add(node)
        return any(len(nodes) > 1 for nodes in groups.values())

    assert on.crosses(F, 1) == crossed("p", "r")
    assert (P > 1 and on.crosses(P, F * R)) == crossed("f", "r")
    assert (R > 1 and on.crosses(R, P * F)) == crossed("p", "f")


# --- what a user is told


def run(*arguments: str) -> str:
    """What it prints, to either stream."""
    return CliRunner().invoke(zeropp, ["plan", *arguments]).output


def test_the_command_shows_plans_and_writes_one_that_can_run(tmp_path: Path) -> None:
    written = tmp_path / "run.toml"
    text = run(
        "--model", "llama3.2-1b", "--gpus", "8", "--seq", "1024", "--global-batch", "32", "--write", str(written)
    )
    for part in ("8 x h100-80g in 1 node", "MFU", "bubble", "3D", "Plan 1", "weights and moments", "GB in all"):
        assert part in text
    config = load_config(written)
    assert (config.model.preset, config.model.seq_len, config.train.dtype) == ("llama3.2-1b", 1024, "bfloat16")
    assert config.parallel.global_batch == 32
    assert config.parallel.members <= 8
    assert config.resources.device == "cuda"
    assert f"zeropp config check {written} --set data.path=YOUR_DATA" in text
    assert "zero1 = false" in run("--model", "gpt2", "--gpus", "512", "--seq", "512", "--global-batch", "512")
    assert "is there already" in run("--model", "llama3.2-1b", "--write", str(written))


def test_what_is_written_is_for_the_device(tmp_path: Path) -> None:
    file, written = tmp_path / "run.toml", tmp_path / "best.toml"
    file.write_text('[resources]\ndevice = "cuda"\ntransport = "nccl"\nnvtx = true\n', encoding="utf-8")
    run("--from", str(file), "--device", "cpu", "--gpus", "2", "--write", str(written))
    assert load_config(written).resources.device == "cpu"


def test_a_configuration_of_a_model_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nfactory = "tests.user_models:own_model"\nseq_len = 16\n', encoding="utf-8")
    text = run("--from", str(file), "--device", "cpu", "--gpus", "4", "--nodes", "1")
    assert "file" in text
    assert "tests.user_models:own_model" in text


def test_the_layout_of_a_file_is_rated_with_its_policy_and_the_unit_that_would_be_tuned(tmp_path: Path) -> None:
    """As ``train`` would take it: U and the memory limit of "auto" from the costs of the chunks on these devices."""
    file, cpu = tmp_path / "run.toml", ("--device", "cpu", "--nodes", "1")
    text = "[parallel]\nstages = 4\nshards = 1\nmicrobatches = 32\n[model]\nlayers = 8\n"
    for settings, shown in (
        ('unit = "auto"', "P4 V2 F1 R1 b2 N32 U"),
        ('policy = "zb-v"', "zb-v P4 V2 F1 R1 b2 N32 U32"),
    ):
        file.write_text(text.replace("[model]", f"{settings}\n[model]"), encoding="utf-8")
        row = next(line for line in run("--from", str(file), *cpu).splitlines() if line.startswith("file"))
        assert shown in row
    config = load_config(file, ["parallel.policy=zeropp", "parallel.unit=auto", "model.vocab_size=4096"])
    sizes, on = sizes_of(config.model, "float32"), cluster("cpu", 4, nodes=1)
    tuned = choice_of(config.parallel, sizes, on)
    assert tuned.unit == make_plan(config).program.spec.unit > 4, "not the P that stands for it until costs are known"


def test_other_policies_are_rated_on_the_same_mesh() -> None:
    sizes, on = sizes_of(dataclasses.replace(TINY, dim=1024, seq_len=1024), "bfloat16"), cluster("h100-80g", 8)
    plan = choice(unit=8, reduce="step")
    others = {step.choice.policy: step for step in other_policies(sizes, on, plan)}
    assert {*others} == {"1f1b", "interleaved", "zb-h1", "interleaved-zb", "zb-v"}
    ours = rated(sizes, on, plan)
    for step in others.values():
        same = ("stages", "shards", "replicas", "microbatches", "microbatch_size")
        assert [getattr(step.choice, name) for name in same] == [getattr(plan, name) for name in same]
        if step.choice.chunks > 1:
            assert step.traffic["gathers, nvlink4"] > ours.traffic["gathers, nvlink4"], step.choice


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "llama9"), "known are gpt2"),
        (("--model", "gpt2", "--device", "z9"), "known are a100-40g, a100-80g, h100-80g, h200, b200, cpu"),
        (("--model", "gpt2", "--intra", "wire"), "known are nvlink"),
        (("--model", "gpt2", "--inter", "wire", "--gpus", "16"), "known are nvlink"),
        (("--model", "gpt2", "--gpus", "9", "--nodes", "2"), "must divide"),
        (("--model", "gpt2", "--gpus", "12"), "use 16"),
        (("--model", "gpt2", "--gpus", "-1"), "must be at least 1"),
        (("--model", "gpt2", "--global-batch", "0"), "must be at least 1"),
        (("--model", "gpt2", "--seq", "0"), "must be at least 1"),
        (("--model", "gpt2", "--costs", "nowhere.json"), "no such file"),
        (("--model", "gpt2", "--seq", "4096"), "model.context"),
        (("--model", "gpt2", "--top", "0"), "--top"),
        (("--model", "gpt2", "--write", "nowhere/run.toml"), "no folder nowhere"),
        ((), "one of the two"),
        (("--model", "gpt2", "--from", "x.toml"), "one of the two"),
    ],
)
def test_bad_input_is_one_line_that_helps(arguments: tuple[str, ...], message: str) -> None:
    text = run(*arguments)
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert message in text


def test_what_cannot_fit_says_by_how_much_and_what_would() -> None:
    model = sizes_of(ModelSection(preset="llama3-8b", seq_len=8192), "bfloat16")
    with pytest.raises(
        ConfigError, match=r"no plan fits its 36.0 GB.* GB too much, most of it .*; .*--device .*would do"
    ):
        search(model, cluster("a100-40g", 2), 4)


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from jobs.cli import zeropp; "
        "r = CliRunner().invoke(zeropp, ['plan', '--model', 'gpt2', '--gpus', '2', '--global-batch', '8']); "
        "assert r.exit_code == 0, r.output; assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("count", [1024, 10_000])
def test_planning_for_many_devices(count: int) -> None:
    model = sizes_of(ModelSection(preset="llama3-70b", seq_len=8192), "bfloat16")
    found = search(model, cluster("h200", count), 2048)
    assert found.best[0].choice.members <= count


PLANS = (Path(__file__).parent.parent / "docs" / "plans.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "size", ["llama3-8b", *(pytest.param(size, marks=pytest.mark.full) for size in ("llama3-70b", "llama3.1-405b"))]
)
def test_the_plans_of_the_docs_are_what_the_commands_print(size: str) -> None:
    (command, shown), *_ = re.findall(
        rf"```sh\nzeropp plan (--model {size} [^\n]*)\n```\n\n```\n(.*?)\n```", PLANS, re.DOTALL
    )
    assert run(*command.split()).rstrip("\n") == shown
    if "h200" in command:
        h100 = command.replace(" --device h200", "").split()
        assert run(*h100).rstrip("\n") in PLANS, "what does not fit on H100"
