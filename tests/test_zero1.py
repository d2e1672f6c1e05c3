"""ZeRO-1 over the replicas: the same results, with each replica's own piece of masters and moments."""

from __future__ import annotations

import pytest
import torch

from jobs.report import plan_table, size
from tests import harness
from tests.test_parameter_kinds import assert_right, of
from tests.test_parity import assert_counts, assert_parity, configuration, samples_of
from zeropp_ray.checkpoint.reader import open_checkpoint
from zeropp_ray.config import RunConfig
from zeropp_ray.layout import Layout, Member
from zeropp_ray.metrics import kinds
from zeropp_ray.planner.memory import predict_memory
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.vote import decide


def changed(config: RunConfig, **settings) -> RunConfig:
    """With other ``section_name`` settings."""
    values = config.to_dict()
    for name, value in settings.items():
        section, _, key = name.partition("_")
        values[section][key] = value
    return RunConfig.from_dict(values)


def test_members_own_the_pieces_of_a_layout_with_as_many_shards():
    layout = Layout(stages=1, chunks=1, shards=2, replicas=3, zero1=True)
    assert [layout.piece(me) for me in layout.members()] == list(range(6))
    assert all(layout.answers(me) for me in layout.members())
    plain = Layout(stages=1, chunks=1, shards=2, replicas=3)
    assert [plain.piece(me) for me in plain.members()] == [0, 0, 0, 1, 1, 1]
    assert [me for me in plain.members() if plain.answers(me)] == [Member(0, 0, 0), Member(0, 1, 0)]


@pytest.mark.parametrize("config", [
    pytest.param(configuration(2, 1, 2, 2, N=2, b=1, zero1=True), id="2122"),
    pytest.param(configuration(1, 2, 1, 3, N=4, U=2, b=1, zero1=True), id="1213"),
    pytest.param(configuration(2, 2, 2, 1, N=2, b=1, zero1=True), id="2221-one-replica"),
])  # fmt: skip
def test_layouts(config):
    assert_parity(config)


@pytest.mark.parametrize("kind", ["tied", "adapters_tied", "frozen_beginning"])
def test_kinds_of_parameters(kind):
    assert_right(of(kind, 2, 1, 1, 2, N=2, b=1, zero1=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [(2, 1, 2, 2), (1, 1, 1, 3)])
def test_the_same_bytes_as_without(layout, dtype):
    """Sums over replicas are made in rank order either way. The norm is not, so nothing is clipped here."""
    off = changed(configuration(*layout, N=2, b=1, dtype=dtype, steps=4), train_clip_norm=0.0)
    on = changed(off, parallel_zero1=True)
    samples = samples_of(off)
    ours, theirs = harness.train(on, samples), harness.train(off, samples)
    assert_counts(on, ours)
    assert (ours.losses, ours.validation) == (theirs.losses, theirs.validation)
    for what in ("gradients", "weights"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_replica_holds_its_piece_as_predicted(dtype):
    settings = {"N": 2, "b": 1, "dtype": dtype, "steps": 1}
    off, on = (configuration(2, 1, 1, 2, zero1=zero1, **settings) for zero1 in (False, True))
    held = {}
    for config in (off, on):
        with harness.members(config, samples_of(config)) as run:
            run.call("advance", 1, None)
            held[config] = [bytes[kinds.WEIGHTS] for bytes in run.call("state_bytes")]
        plan = make_plan(config)
        predicted = [predict_memory(plan, config, me.p)[kinds.WEIGHTS] for me in plan.layout.members()]
        assert held[config] == pytest.approx(predicted, rel=1e-3)
    elements = make_plan(on).description.elements
    # Over the whole run: once each, and not R times, master (where it is not a view) and both moments.
    saved = (3 if dtype == "bfloat16" else 2) * 4 * elements
    assert sum(held[off]) - sum(held[on]) == pytest.approx(saved, rel=1e-2)


STEPS = 4


def trained(run: harness.Run, first: int, last: int) -> list[float]:
    decision, losses = None, []
    for step in range(first, last + 1):
        decision = decide(step, run.call("advance", step, decision), 0.0)
        losses.append(decision.loss)
    run.call("flush", decision)
    return losses


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_a_run_goes_on_with_it_and_without_it_and_on_other_replicas(tmp_path, dtype):
    on = configuration(2, 1, 1, 2, N=2, b=1, steps=STEPS, layers=4, dtype=dtype, zero1=True)
    off = changed(on, parallel_zero1=False)
    other = changed(on, parallel_replicas=1, parallel_shards=2)
    with harness.members(on, samples_of(on)) as run:
        trained(run, 1, 2)
        saved = run.save(tmp_path / "on", 2, 2)
        losses = trained(run, 3, 4)
        straight = open_checkpoint(run.save(tmp_path / "on", 4, 4)).digest(state=True)
    for config, folder in ((on, "again"), (off, "off")):
        with harness.members(config, samples_of(config)) as run:
            run.call("load", saved)
            if config is off:
                back = run.save(tmp_path / "back", 2, 2)
                assert open_checkpoint(back).digest(state=True) == open_checkpoint(saved).digest(state=True)
            assert trained(run, 3, 4) == losses
            assert open_checkpoint(run.save(tmp_path / folder, 4, 4)).digest(state=True) == straight
    with harness.members(other, samples_of(other)) as run:
        run.call("load", back)
        assert trained(run, 3, 4) == pytest.approx(losses, rel=1e-5 if dtype == "float32" else 1e-2)


def test_the_table_before_a_run_tells_of_it_and_of_bf16():
    config = configuration(2, 1, 1, 2, N=2, zero1=True, dtype="bfloat16")
    text = " ".join(plan_table(make_plan(config).table(config), config, "a text").split())
    assert "parameters, computed with in bf16" in text
    assert "4 members, the optimizer's state shared by replicas (ZeRO-1)" in text
    config = configuration(2, zero1=True)
    text = plan_table(make_plan(config).table(config), config, "a text")
    assert "bf16" not in text
    assert "ZeRO-1" not in text


def test_the_table_before_a_run_on_gpus_keeps_host_memory_apart():
    config = configuration(2, 1, 1, 2, N=2, zero1=True)
    on_gpus = changed(config, resources_device="cuda")
    table = make_plan(config).table(config)
    here, there = (" ".join(plan_table(table, each, "a text").split()) for each in (config, on_gpus))
    assert "copies of the state" in here
    memory, copies = there.partition(" copies ")[::2]
    assert "copies of the state" not in there
    assert "of host memory beside that: two copies of its state" in copies
    assert size(sum(table["predicted_memory"].values()) - table["predicted_memory"][kinds.COPIES]) in memory
