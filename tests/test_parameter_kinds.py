"""Every kind of parameter is right, against the plain loop in fp64, or refused with its reason."""

from __future__ import annotations

import functools

import pytest
import torch

from tests import harness, reference, sabotage
from tests.test_parity import TOLERANCE, assert_counts, assert_equal, configuration, plain, samples_of
from zeropp_ray.checkpoint.reader import open_checkpoint
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError
from zeropp_ray.models import describe, resolve_factory
from zeropp_ray.planner.memory import predict_memory
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.vote import decide

SHARED = [
    "tied", "tied_to_the_head", "tied_by_hand", "tied_in_blocks", "one_block", "two_blocks_in_turn", "pieces_shared",
    "buffer_shared", "padding",
]  # fmt: skip
FROZEN = [
    "frozen_embedding", "frozen_tied", "frozen_beginning", "frozen_end", "frozen_matrices", "frozen_positions",
    "adapters", "adapters_tied",
]  # fmt: skip
OTHER = [
    "overridden", "parametrized", "old_weight_norm", "replaced_forward", "hooked", "masked", "bilinear", "twice",
    "by_hand", "attention", "encoder_layer", "recurrent", "turned", "in_place", "overwritten", "projected", "cast",
    "saved", "no_parameters", "by_frequency", "checkpointed",
]  # fmt: skip
REFUSED = {
    "renormed": "embed changes its parameter embed.weight in the forward",
    "spectral": "blocks.0 changes its buffer blocks.0.up.parametrizations.weight.0._u",
    "lazy": "blocks.0.up.weight is a UninitializedParameter of float32; make it a plain nn.Parameter",
    "two_in_one_memory": "head.weight and embed.weight are two parameters in the same memory",
    "whole_numbers": "table is int8; make it a plain nn.Parameter of floating-point numbers",
    "accumulating": "blocks.0.up.weight has a hook on its accumulated gradient",
    "all_frozen": "nothing to train",
    "reentrant": "blocks.0 uses .* use_reentrant=True, .*; take use_reentrant=False, or .* set parallel.recompute",
    "reentrant_from_the_start": "blocks.0 uses blocks.0.norm.weight where no gradient reaches it, .*use_reentrant=True",
    "carried_over": "head uses what an earlier part made from tokens.weight",
}


def of(kind: str, *layout: int, steps: int = 3, depth: int = 4, **parallel) -> RunConfig:
    config = configuration(*layout, dtype="float64", steps=steps, layers=depth, own="own_model", **parallel).to_dict()
    config["model"]["factory"] = f"tests.parameter_kinds:{kind}"
    return RunConfig.from_dict(config)


def assert_right(config: RunConfig) -> harness.Trained:
    samples = samples_of(config)
    ours = harness.train(config, samples)
    assert_equal(ours, plain(config, samples, whole=bool(ours.plan.description.whole)), TOLERANCE["float64"])
    assert_counts(config, ours)
    return ours


@pytest.mark.parametrize("kind", SHARED + FROZEN + OTHER)
def test_kind(kind):
    assert_right(of(kind, 1, 2, N=2))


@pytest.mark.full
@pytest.mark.parametrize("layout", [(1, 1), (1, 4, 1, 1), (2, 2, 2), (3, 1, 1, 2), (4, 1, 2)])
@pytest.mark.parametrize("kind", SHARED + FROZEN + OTHER)
def test_kind_on_every_layout(kind, layout):
    assert_right(of(kind, *layout, N=5, U=4, depth=5))


@pytest.mark.parametrize(("kind", "layout"), [
    ("tied", (2, 2)), ("tied_in_blocks", (3, 1)), ("one_block", (2, 1, 2)), ("pieces_shared", (2, 1)),
    ("frozen_tied", (2, 1)), ("frozen_beginning", (2, 2)), ("adapters_tied", (2, 1, 2)), ("no_parameters", (2, 2)),
])  # fmt: skip
def test_kind_on_stages(kind, layout):
    assert_right(of(kind, *layout, N=4, U=layout[0]))


def test_prefetch_shares_what_two_chunks_use():
    assert_right(of("one_block", 1, 4, N=4, U=2, prefetch=True))


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_its_reason(kind):
    with pytest.raises(ConfigError, match=f"^model.factory: .*{REFUSED[kind]}") as caught:
        describe(resolve_factory(of(kind).model), 16)
    assert "\n" not in str(caught.value)


def test_copies_of_a_shared_parameter_stay_equal_bit_for_bit():
    config = of("tied_in_blocks", 3, 1, N=3, steps=5)
    config = RunConfig.from_dict({**config.to_dict(), "train": {**config.to_dict()["train"], "dtype": "float32"}})
    samples = samples_of(config)
    with harness.members(config, samples) as run:
        last = None
        for step in range(1, 6):
            last = decide(step, run.call("advance", step, last), 1.0)
        run.call("flush", last)
        copies = {}
        for (me, _), pieces in zip(run.pipes, run.call("shared"), strict=True):
            for name, start, piece in pieces:
                copies.setdefault((name, me.f), []).append((start, piece.numpy().tobytes()))
    assert {len(found) for found in copies.values()} == {3}  # at each of the stages
    assert {name for name, _ in copies} == {f"{what} embed.weight" for what in ("weights", "exp_avg", "exp_avg_sq")}
    assert all(found == found[:1] * 3 for found in copies.values())


def test_a_shared_parameter_counts_once_in_the_norm():
    config = of("one_block", 2, 2, 1, steps=1)
    samples = samples_of(config)
    with harness.members(config, samples) as run:
        norm = decide(1, run.call("advance", 1, None), 1.0).grad_norm
    gradients = plain(config, samples).gradients
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in gradients.values()]).norm()), rel=1e-10)


def test_frozen_parameters_stay_and_have_neither_gradient_nor_moments():
    config = of("frozen_beginning", 2, 1, N=2)
    ours = assert_right(config)
    start = dict(reference.build(resolve_factory(config.model), 0).double().named_parameters())
    frozen = [name for name, parameter in start.items() if not parameter.requires_grad]
    assert len(frozen) == 19
    assert ours.gradients.keys() == start.keys() - set(frozen)
    assert all(torch.equal(ours.weights[name], start[name].flatten()) for name in frozen)
    table, memory = ours.plan.table(config), [predict_memory(ours.plan, config, p) for p in (0, 1)]
    assert (table["frozen"], table["shared"]) == (sum(start[name].numel() for name in frozen), 0)
    assert memory[0]["gradient buffers"] == memory[0]["gradient shards"] == 0
    assert memory[0]["weights and moments"] == 8 * ours.plan.sets[0].elements
    assert ours.reports[0].counters.reduced_bytes == 0


def test_a_checkpoint_holds_shared_and_frozen_parameters_once(tmp_path):
    straight, other = (of("adapters_tied", *layout, N=N, steps=4) for layout, N in (((2, 2), 4), ((1, 1, 2), 2)))
    samples = samples_of(straight)

    def two_steps(run: harness.Run, after: int) -> list[float]:
        last, losses = None, []
        for step in (after + 1, after + 2):
            last = decide(step, run.call("advance", step, last), 1.0)
            losses.append(last.loss)
        run.call("flush", last)
        return losses

    with harness.members(straight, samples) as run:
        two_steps(run, 0)
        saved = run.save(tmp_path, 2, 2)
        losses = two_steps(run, 2)
    trained = {name for each in run.plan.sets if each.trained for name in each.shapes}
    tensors = [name for file in open_checkpoint(saved).manifest.files.values() for name in file.tensors]
    moments = [f"{moment}.{name}" for name in trained for moment in ("exp_avg", "exp_avg_sq")]
    assert sorted(tensors) == sorted([*run.plan.description.shapes, *moments])
    with harness.members(other, samples) as run:
        run.call("load", saved)
        assert two_steps(run, 2) == pytest.approx(losses, rel=1e-10)


def test_shared_parameters_count_once_in_the_description_and_at_each_stage_in_memory():
    apart, tied = (make_plan(of(kind, 2, 1)) for kind in ("by_hand", "tied"))
    table = 32 * 24
    assert apart.description.elements - tied.description.elements == table
    assert tied.table(of("tied", 2, 1))["shared"] == table
    for plan, kind in ((apart, "by_hand"), (tied, "tied")):
        memory = [predict_memory(plan, of(kind, 2, 1), p) for p in (0, 1)]
        held = [sum(each.elements for each in plan.sets if p in each.chunks) for p in (0, 1)]
        assert [m["weights and moments"] for m in memory] == [8 * 3 * n for n in held]
        assert [m["gradient shards"] for m in memory] == [8 * n for n in held]  # what is exchanged comes after the peak
    called, used = (predict_memory(make_plan(of(kind, 1, 1)), of(kind, 1, 1), 0) for kind in ("tied", "tied_by_hand"))
    vectors = 48 - 32  # the norm of the one, the bias of the other
    assert used["gradient buffers"] - called["gradient buffers"] == 8 * (table + vectors + vectors)


def test_a_description_knows_which_gradients_b_makes_and_what_frozen_parts_cost():
    by_hand, adapted, frozen = (
        describe(resolve_factory(of(kind).model), 16) for kind in ("tied_by_hand", "adapters", "frozen_beginning")
    )
    assert by_hand.by_hand == {"embed.weight"} < by_hand.deferred
    linears, thin = 2 * 16 * 2 * 24 * 48, 2 * 16 * 2 * (24 + 48) * 2
    assert adapted.blocks[0].cost == (linears + thin, linears + thin, thin)  # F, B, W: no weight gradient if frozen
    assert [block.cost for block in frozen.blocks] == [(linears, 0, 0)] * 3 + [(linears, linears, linears)]
    assert frozen.blocks[0].saved_elements == 0 < frozen.blocks[3].saved_elements


@pytest.mark.parametrize(("side", "differs"), [(0, "gradient"), (1, "loss")])
def test_negative_control_a_tied_gradient_counted_on_one_side(side, differs):
    config = of("tied", 2, 1, N=2)
    samples = samples_of(config)
    ours = harness.train(config, samples, sabotage=functools.partial(sabotage.tied_on_one_side, side))
    with pytest.raises(AssertionError, match=f"a {differs} differs"):
        assert_equal(ours, plain(config, samples), TOLERANCE["float64"])
