"""Recomputation and the reduce policy change what a step keeps and moves, and nothing of its result."""

from __future__ import annotations

import functools

import pytest
import torch

from tests import harness, sabotage
from tests.test_parameter_kinds import FROZEN, OTHER, SHARED, assert_right
from tests.test_parameter_kinds import of as kind_of
from tests.test_parity import TOLERANCE, assert_equal, assert_parity, configuration, plain, samples_of
from zeropp_ray.config import RunConfig
from zeropp_ray.metrics import kinds
from zeropp_ray.planner.memory import predict_memory

of = functools.partial(configuration, dtype="float64", steps=3)

SHORT = [
    pytest.param(of(2, 2, N=5, U=2, layers=5, recompute="full"), id="2211-full"),
    pytest.param(of(2, 2, 2, N=4, U=2, recompute="selective", reduce="step"), id="2221-selective-step"),
    pytest.param(of(3, 1, N=6, U=3, b=1, recompute="full", memory_limit=1, reduce="step"), id="3111-full-step"),
    pytest.param(of(2, 3, N=4, U=2, layers=6, recompute="selective", memory_limit=1 / 3), id="2311-selective"),
    pytest.param(of(2, 2, 2, N=6, U=2, reduce="step", prefetch=True), id="2221-step"),
    pytest.param(of(2, 1, 1, 2, N=4, U=2, b=1, recompute="full", reduce="step"), id="2112-full-step"),
]


@pytest.mark.parametrize("config", SHORT)
def test_parity(config):
    assert_parity(config)


@pytest.mark.parametrize("reduce", ["unit", "step"])
@pytest.mark.parametrize(("V", "recompute"), [(1, "full"), (3, "full"), (3, "selective"), (3, "none")])
def test_one_stage_hands_over_to_itself(V, recompute, reduce):
    assert_parity(of(1, V, N=5, U=2, layers=4, recompute=recompute, reduce=reduce))


@pytest.mark.full
@pytest.mark.parametrize("reduce", ["unit", "step"])
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (layout, recompute)
        for layout in [(2, 3, 2), (3, 1, 2), (4, 2), (2, 2, 1, 2)]
        for recompute in ["none", "full", "selective"]
        if (layout[1], recompute) != (1, "selective")  # which is refused: there is nothing to keep
    ],
)
def test_every_policy_on_every_layout(layout, recompute, reduce):
    P = layout[0]
    for N, U in ((2 * P + 1, P), (4 * P, 2 * P)):
        assert_parity(of(*layout, N=N, U=U, b=1, recompute=recompute, reduce=reduce))


def test_ignored_labels_and_a_micro_batch_without_any():
    assert_parity(of(1, 2, N=4, U=2, recompute="full", reduce="step"), ignored=True, blank=(2, 3))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(configuration, dtype="float32"),
        functools.partial(configuration, dtype="bfloat16"),
        functools.partial(kind_of, "encoder_layer_in_eval_mode"),
    ],
    ids=["float32", "bfloat16", "eval mode"],
)
def test_recomputed_gradients_are_the_same_bytes(make):
    """Where another order of sums would show; and so are losses, and weights after the last step."""
    runs = {}
    for recompute in ("none", "full", "selective"):
        config = make(1, 3, N=4, U=2, steps=3, recompute=recompute)
        runs[recompute] = harness.train(config, samples_of(config))
    kept = runs.pop("none")
    for ours in runs.values():
        assert (ours.losses, ours.validation) == (kept.losses, kept.validation)
        for name, gradient in kept.gradients.items():
            assert torch.equal(ours.gradients[name], gradient), name
            assert torch.equal(ours.weights[name], kept.weights[name]), name


# Parameters of every kind, and blocks that do with their input what they like.


def of_kind(kind: str, *layout: int, **parallel) -> RunConfig:
    return kind_of(kind, *layout, **{"N": 5, "U": 2, "depth": 5, "recompute": "full", **parallel})


@pytest.mark.parametrize("kind", SHARED + FROZEN + OTHER)
def test_kind(kind):
    assert_right(of_kind(kind, 1, 2, reduce="step"))


@pytest.mark.parametrize(("kind", "layout"), [("tied", (2, 2)), ("in_place", (2, 1))])
def test_kind_on_stages(kind, layout):
    assert_right(of_kind(kind, *layout, N=4, reduce="step"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "recompute", "reduce"),
    [((1, 4), "selective", "step"), ((2, 2, 2), "selective", "unit"), ((3, 1), "full", "step")],
)
@pytest.mark.parametrize("kind", SHARED + FROZEN + OTHER)
def test_kind_on_every_layout(kind, layout, recompute, reduce):
    assert_right(of_kind(kind, *layout, U=4, recompute=recompute, reduce=reduce))


@pytest.mark.parametrize(("recompute", "times"), [("none", [1, 1, 1]), ("full", [2, 2, 2]), ("selective", [2, 2, 1])])
def test_a_forward_runs_twice_where_it_is_recomputed_and_once_where_it_is_kept(recompute, times):
    config = of(1, 3, N=5, U=2, recompute=recompute)
    with harness.members(config, samples_of(config)) as run:
        run.call("count_forwards")
        run.call("advance", 1, None)
        assert run.call("forwards") == [{chunk: 5 * n for chunk, n in enumerate(times)}]
        run.call("evaluate")  # two rounds of five, without a second forward
        assert run.call("forwards") == [{chunk: 5 * n + 10 for chunk, n in enumerate(times)}]


def test_what_has_no_graph_is_not_run_again():
    """Frozen chunks at the beginning: nothing in them is trained, and nothing before."""
    config = of_kind("frozen_beginning", 1, 5)
    with harness.members(config, samples_of(config)) as run:
        run.call("count_forwards")
        run.call("advance", 1, None)
        (counts,) = run.call("forwards")
    assert [counts[chunk] for chunk in range(5)] == [5, 5, 5, 5, 10]


@pytest.mark.parametrize(("recompute", "reduce"), [("none", "step"), ("full", "unit"), ("selective", "step")])
def test_peaks_are_those_of_the_plan(recompute, reduce):
    config = of(1, 3, N=6, U=2, layers=4, recompute=recompute, reduce=reduce)
    with harness.members(config, samples_of(config), apart=True) as run:  # from what other tests left in memory
        run.call("advance", 1, None)
        run.call("advance_measured", 2, None)
        (report,), program = run.call("report"), run.plan.program
    assert report.measured.peak_live_chunks == round(3 * program.peak_activations[0])
    assert report.measured.peak_chunk_inputs == program.peak_inputs[0]
    assert report.peak_open_gradient_buffers == program.peak_gradient_buffers[0] == (1 if reduce == "unit" else 3)
    predicted = predict_memory(run.plan, config, 0)
    assert report.memory.highest[kinds.GRADIENT_BUFFERS] == predicted[kinds.GRADIENT_BUFFERS]
    assert report.memory.peak_bytes == pytest.approx(sum(predicted.values()), rel=0.03)
    if recompute == "none":
        assert report.memory.highest[kinds.CHUNK_INPUTS] == 0
    else:  # h [2, 16, 32] of fp64, but for the ids of chunk 0 that are there at the same time
        assert 0 < report.memory.highest[kinds.CHUNK_INPUTS] <= program.peak_inputs[0] * 2 * 16 * 32 * 8


# Faults that the comparison must find.


@pytest.mark.parametrize(
    "fault",
    [sabotage.recompute_from_another_input, sabotage.count_the_loss_again, sabotage.step_without_its_first_unit],
)
def test_negative_control(fault):
    config = of(1, 2, N=4, U=2, recompute="full", reduce="step", steps=1)
    samples = samples_of(config)
    ours = harness.train(config, samples, sabotage=fault)
    with pytest.raises(AssertionError, match=r"a (gradient|loss) differs"):
        assert_equal(ours, plain(config, samples), TOLERANCE["float64"])
