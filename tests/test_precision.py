"""bf16 with fp32 masters: equal to a plain loop that does the same, exact to repeat and to go on with."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.driver import Run
from actors.folder import RunFolder
from tests import harness, reference, sabotage
from tests.saved import saved_run
from tests.test_parameter_kinds import of
from tests.test_parity import TOLERANCE, assert_counts, configuration, differences, plain, samples_of
from tests.test_zero1 import STEPS, changed, trained
from zeropp_ray.checkpoint.reader import latest, load_model, open_checkpoint
from zeropp_ray.errors import ConfigError
from zeropp_ray.evaluation import Windows, evaluate
from zeropp_ray.metrics import kinds
from zeropp_ray.models import describe, resolve_factory
from zeropp_ray.models.llama import rotary_table
from zeropp_ray.planner.memory import predict_memory
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.precision import Precision, time_against_fp32

BF16 = Precision.of("bfloat16")
GRADIENT = 3e-3
"""Of the norm of a parameter's gradient, where a step takes 2^n tokens: both loops round the same numbers then, and
only what several tokens or layers add to differs (an embedding, a shared block), which ours adds up in fp32.
"""


def bf16(*layout: int, **settings):
    return configuration(*layout, dtype="bfloat16", **settings)


def assert_close(ours: harness.Trained, theirs: reference.Reference, gradient: float = GRADIENT) -> None:
    found = differences(ours, theirs)
    assert found[1] <= gradient, f"a gradient differs by {found[1]:g}"
    assert found[0] <= TOLERANCE["bfloat16"], f"a loss differs by {found[0]:g}"


@pytest.mark.parametrize(("config", "gradient"), [
    pytest.param(bf16(), GRADIENT, id="1111"),
    pytest.param(bf16(2, 2, 2, N=4, U=2), GRADIENT, id="2221"),
    pytest.param(bf16(2, 2, N=7, U=3, layers=5), 2e-2, id="2211-uneven"),
    pytest.param(bf16(4, 2, N=8, U=4, b=1), GRADIENT, id="4211", marks=pytest.mark.full),
    pytest.param(bf16(2, 1, 2, 2, N=2, b=1), GRADIENT, id="2122"),
])  # fmt: skip
def test_layouts(config, gradient):
    samples = samples_of(config)
    ours = harness.train(config, samples)
    assert_close(ours, plain(config, samples), gradient)
    assert_counts(config, ours)


def kind_in_bf16(kind: str, *layout: int, **settings):
    return changed(of(kind, *layout, **settings), train_dtype="bfloat16")


@pytest.mark.parametrize(("kind", "layout"), [
    ("tied_by_hand", (1, 2)), ("tied_in_blocks", (2, 1)), ("one_block", (1, 2)), ("frozen_beginning", (2, 1)),
    ("adapters_tied", (1, 2, 2)), ("by_hand", (1, 2)), ("bilinear", (1, 2)),
])  # fmt: skip
def test_kinds_of_parameters(kind, layout):
    """What is done by hand with a deferred weight, too, is added up in fp32."""
    config = kind_in_bf16(kind, *layout, N=16, U=8, b=1)
    samples = samples_of(config)
    ours = harness.train(config, samples)
    assert_close(ours, plain(config, samples))
    assert_counts(config, ours)


@pytest.mark.parametrize("by_hand", [False, True])
def test_negative_control_sums_in_bf16(by_hand):
    """Over 16 micro-batches, of norms or of what is done by hand with a deferred weight."""
    settings = {"N": 16, "U": 16, "b": 1, "steps": 1}
    config = kind_in_bf16("by_hand", 1, 1, **settings) if by_hand else bf16(**settings)
    samples = samples_of(config)
    ours = harness.train(config, samples, sabotage=functools.partial(sabotage.sum_in_bf16, by_hand))
    with pytest.raises(AssertionError, match="gradient differs"):
        assert_close(ours, plain(config, samples))


def test_a_run_starts_with_the_masters_of_an_fp32_run():
    starts = []
    for config in (bf16(2, 1, 2), configuration(2, 1, 2)):
        with harness.members(config, samples_of(config)) as run:
            starts.append(run.whole("weights"))
    assert all(torch.equal(starts[0][name], weight) for name, weight in starts[1].items())
    assert {weight.dtype for weight in starts[0].values()} == {torch.float32}


def test_it_repeats_and_goes_on_bit_for_bit_from_a_checkpoint_in_fp32(tmp_path):
    config = bf16(2, 2, 2, N=4, b=1, steps=STEPS)
    with harness.members(config, samples_of(config)) as run:
        losses = trained(run, 1, 2)
        saved = run.save(tmp_path / "first", 2, 2)
        losses += trained(run, 3, 4)
        straight = open_checkpoint(run.save(tmp_path / "first", 4, 4))
    with harness.members(config, samples_of(config)) as run:
        assert trained(run, 1, 4) == losses
        assert open_checkpoint(run.save(tmp_path / "second", 4, 4)).digest(state=True) == straight.digest(state=True)
    with harness.members(config, samples_of(config)) as run:
        run.call("load", saved)
        assert trained(run, 3, 4) == losses[2:]
        assert open_checkpoint(run.save(tmp_path / "third", 4, 4)).digest(state=True) == straight.digest(state=True)
    weights = straight.weights()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert any(not torch.equal(weight, weight.bfloat16()) for weight in weights.values())  # no rounded copies
    as_saved, as_trained = load_model(straight), load_model(straight, BF16)
    assert {p.dtype for p in as_saved.parameters()} == {torch.float32}
    assert {p.dtype for p in as_trained.parameters()} == {torch.bfloat16}
    assert all(torch.equal(p, weights[name].bfloat16()) for name, p in as_trained.named_parameters())


def test_validation_is_that_of_the_rounded_weights():
    config = bf16(2, 2, 2, steps=2)
    samples = samples_of(config)
    ours = harness.train(config, samples)
    model = resolve_factory(config.model)().requires_grad_(False)
    model.load_state_dict({name: weight.view(model.get_parameter(name).shape) for name, weight in ours.weights.items()})
    BF16.apply(model)
    total, tokens = 0.0, 0
    for round in range(2):
        for ids, labels in samples.step(1000 + round, 2):
            logits = model(ids).float().flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"))
            tokens += labels.numel()
    assert ours.validation == pytest.approx(total / tokens, rel=1e-6)


def test_in_one_process_the_loss_is_taken_in_fp32_too():
    model = reference.build(resolve_factory(configuration().model), 0)
    BF16.apply(model)
    windows = Windows(np.arange(129, dtype=np.uint8) % 32, 16)
    ids, labels = windows.batch(np.arange(8))
    logits = model(ids).detach().double().flatten(0, 1)
    exact = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    assert evaluate(model, windows, 8).total == pytest.approx(float(exact), rel=1e-6)


def test_a_buffer_keeps_its_dtype_and_what_it_raises_is_refused():
    factory = resolve_factory(configuration(own="own_model").model)
    with pytest.raises(ConfigError, match=(
        r"^model.factory: embed returns h in float32, and parameters are bfloat16 \(train.dtype\); h must be bfloat16 "
        r"too: cast what raises it, such as a buffer in float32, with .to\(h.dtype\)$"
    )):  # fmt: skip
        describe(factory, 16, precision=BF16)
    model = factory()
    BF16.apply(model)
    assert model.decay.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_rotary_angles_are_rounded_once():
    """At far positions too: their cosines are computed in fp64, not from positions or angles in bf16."""
    table = rotary_table(8192, 64, 10000.0, 1.0, torch.device("cpu"), torch.bfloat16)
    exact = rotary_table(8192, 64, 10000.0, 1.0, torch.device("cpu"), torch.float64)
    assert torch.equal(table, exact.bfloat16())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_norms_and_attention_of_the_families_are_as_exact_as_bf16(family):
    config = changed(configuration(layers=2), model_family=family, model_kv_heads=0)
    model = reference.build(resolve_factory(config.model), 0)
    ids = torch.arange(16)[None]
    exact = model(ids).detach()
    BF16.apply(model)
    found = model(ids).detach()
    assert found.dtype == torch.bfloat16
    assert float((found - exact).norm() / exact.norm()) < 2e-2


def test_the_plan_knows_the_widths():
    narrow, wide = bf16(2, 2, 2, N=4), configuration(2, 2, 2, N=4)
    plans = [make_plan(config) for config in (narrow, wide)]
    half, whole = (predict_memory(plan, config, 1) for plan, config in zip(plans, (narrow, wide), strict=True))
    assert half[kinds.RESIDENT] == whole[kinds.RESIDENT] / 2
    assert half[kinds.GRADIENT_SHARDS] == whole[kinds.GRADIENT_SHARDS]
    assert half[kinds.WEIGHTS] == whole[kinds.WEIGHTS] * 14 / 12
    # Norms compute in fp32 and keep that; all else is half as wide.
    saved = [sum(part.saved_elements for part in plan.description.blocks) for plan in plans]
    assert saved[1] < saved[0] < 2 * saved[1]


def test_the_speed_of_a_dtype_is_measured():
    assert time_against_fp32(torch.float64) > 0
    assert time_against_fp32(torch.float32) == pytest.approx(1, rel=0.9)


@pytest.mark.parametrize(("times", "said"), [((0.5, 0.6), False), ((0.5, 400.0), True)])
def test_a_processor_without_bf16_is_told_before_the_first_step(monkeypatch, times, said):
    run = Run(bf16(2, 1), make_plan(bf16(2, 1)), RunFolder(Path(), Path(), ""), {})
    monkeypatch.setattr(run._members, "call", lambda method, timeout_s: list(times))
    monkeypatch.setattr(run._members, "all", ["stage 0 on here", "stage 1 on there"])
    texts = [event["text"] for event in run._remarks()]
    assert len(texts) == said
    for text in texts:
        assert text.startswith(
            "train.dtype = 'bfloat16': a matrix product takes 400 times as long as in float32 at stage 1"
        )
    fp32 = configuration(2, 1)
    assert not list(Run(fp32, make_plan(fp32), RunFolder(Path(), Path(), ""), {})._remarks())


def test_a_checkpoint_of_a_model_that_is_valid_in_bf16_alone_loads(tmp_path):
    config = kind_in_bf16("in_bf16_alone", 1, 1)
    saved_run(tmp_path, config)
    model = load_model(latest(tmp_path), BF16)
    ids = torch.zeros(1, config.model.seq_len, dtype=torch.int64)
    assert model.embed(ids).dtype == torch.bfloat16
