"""Parity: any layout gives the losses and gradients of a plain single-process loop that knows nothing of ours but the
model.

And the negative controls: each fault, put in on purpose, fails the same comparison.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests import harness, reference, sabotage
from zeropp_ray.config import RunConfig
from zeropp_ray.models import resolve_factory
from zeropp_ray.vote import Decision, Vote, decide

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-10}


def configuration(
    P=1, V=1, F=1, R=1, *, N=4, b=2, U=0, layers=0, dtype="float32", steps=10, own="", **parallel
) -> RunConfig:
    model = (
        {"factory": f"tests.user_models:{own}", "seq_len": 16, "args": {"depth": layers or max(5, P * V)}}
        if own
        else {"layers": layers or max(P * V, 2), "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": 32, "seq_len": 16}
    )
    return RunConfig.from_dict(
        {
            "model": model,
            "parallel": {
                "stages": P, "chunks": V, "shards": F, "replicas": R,
                "microbatches": N, "microbatch_size": b, "unit": U, **parallel,
            },
            "train": {"steps": steps, "lr": 1e-2, "warmup_steps": 3, "dtype": dtype},
        }
    )  # fmt: skip


def samples_of(config: RunConfig, **kinds) -> harness.Samples:
    return harness.Samples(vocab=32, seq_len=config.model.seq_len, per_step=config.parallel.global_batch, **kinds)


def plain(config: RunConfig, samples: harness.Samples, whole: bool = False) -> reference.Reference:
    train = config.train
    size = config.parallel.microbatch_size
    return reference.train(
        resolve_factory(config.model),
        [samples.step(step, size) for step in range(train.steps)],
        seed=config.run.seed,
        whole=whole,
        dtype=getattr(torch, train.dtype),
        lr=train.lr,
        warmup=train.warmup_steps,
        min_ratio=train.min_lr_ratio,
        weight_decay=train.weight_decay,
        clip=train.clip_norm,
    )


def differences(ours: harness.Trained, theirs: reference.Reference) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a parameter's gradient ‖Δg‖/‖g‖."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    assert [math.isnan(loss) for loss in ours.losses] == [math.isnan(loss) for loss in theirs.losses]
    loss = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True) if not math.isnan(b))
    gradient = max(
        float((ours.gradients[name] - g.flatten()).norm() / g.norm()) for name, g in theirs.gradients.items()
    )
    return loss, gradient


def assert_equal(ours: harness.Trained, theirs: reference.Reference, tolerance: float) -> None:
    loss, gradient = differences(ours, theirs)
    assert gradient <= tolerance, f"a gradient differs by {gradient:g}"
    assert loss <= tolerance, f"a loss differs by {loss:g}"


def assert_parity(config: RunConfig, *, whole: bool = False, **kinds) -> None:
    samples = samples_of(config, **kinds)
    ours = harness.train(config, samples)
    assert_equal(ours, plain(config, samples, whole), TOLERANCE[config.train.dtype])
    assert_counts(config, ours)


def assert_counts(config: RunConfig, ours: harness.Trained) -> None:
    """Gathers, reduces, bytes and peaks of a real run are those of the plan."""
    p, steps = config.parallel, config.train.steps
    units = len(ours.plan.program.spec.units)
    sums = units if p.reduce == "unit" else 1  # reduces of a chunk in a step
    width, master = {"bfloat16": (2, 4), "float32": (4, 4), "float64": (8, 8)}[config.train.dtype]
    splits = p.replicas if p.zero1 else 1
    gathered, reduced = width * (p.shards - 1), master * (p.shards - 1)
    for report, me in zip(ours.reports, ours.plan.layout.members(), strict=True):
        traffic, owned = report.counters, ours.plan.layout.owned(me.p)
        program = ours.plan.program.ranks[me.p]
        held = [each for each in ours.plan.sets if {*each.chunks} & {*owned}]
        sets = [(each, -(-each.elements // (p.shards * splits)) * splits) for each in held]
        assert traffic.gathers == steps * ours.plan.program.gathers[me.p]
        assert p.policy != "zeropp" or traffic.gathers == steps * ((2 * p.chunks - 2) * units + 1)
        assert traffic.reduces == steps * p.chunks * sums
        gathers = shared_gathers = reduces = shared_reduces = exchanges = trained = 0  # in elements received or sent
        for each, shard in sets:
            users = [owned.index(chunk) for chunk in each.chunks if chunk in owned]
            n = residencies(program, users)
            gathers += n * shard * (not each.shared)
            shared_gathers += n * shard * each.shared
            reduces += sums * shard * (each.trained and not each.shared)
            shared_reduces += sums * len(users) * shard * (each.trained and each.shared)
            exchanges += (len(ours.plan.layout.stages_of(each.chunks)) - 1) * shard * each.trained
            trained += shard * each.trained
        assert traffic.gathered_bytes == gathered * steps * gathers
        assert traffic.shared_gathered_bytes == gathered * steps * shared_gathers
        assert traffic.reduced_bytes == reduced * steps * reduces
        assert traffic.shared_reduced_bytes == reduced * steps * shared_reduces
        assert traffic.shared_exchanged_bytes == master * steps * exchanges
        piece = trained // splits  # of each other replica all of the shard comes, or with ZeRO-1 what is owned here
        assert traffic.replica_reduced_bytes == master * (p.replicas - 1) * steps * piece
        updated = piece if splits > 1 else 0
        assert traffic.replica_gathered_bytes == width * (p.replicas - 1) * steps * updated
        neighbours = [c for chunk in owned for c in (chunk - 1, chunk + 1) if 0 <= c < len(ours.plan.ranges)]
        edges = sum(c not in owned for c in neighbours)
        assert traffic.sends == traffic.receives == steps * p.microbatches * edges
        assert traffic.sent_bytes == traffic.sends * p.microbatch_size * 16 * ours.plan.description.hidden * width
        assert report.measured.peak_live_chunks == round(ours.plan.program.peak_activations[me.p] * p.chunks)
        assert report.measured.peak_chunk_inputs == ours.plan.program.peak_inputs[me.p]
        resident = sorted(sum(p.shards * shard for each, shard in sets if chunk in each.chunks) for chunk in owned)
        assert report.measured.peak_resident_elements <= sum(resident[-2 if p.prefetch else -1 :])
        own = sum(each.trained and not each.shared for each, _ in sets)
        opened = own if sums < units or p.policy == "zb-v" else min(own, 1)
        assert report.peak_open_gradient_buffers == opened
        assert report.gradient_buffers <= max(2, opened)


def residencies(program, chunks: list[int]) -> int:
    """How often a program makes resident what these chunks of a stage use."""
    there, count = 0, 0
    for action in program:
        if action.chunk in chunks and action.op == "GATHER":
            count += not there
            there += 1
        elif action.chunk in chunks and action.op == "RELEASE":
            there -= 1
    return count


GRID = [
    pytest.param(configuration(), id="1111"),
    pytest.param(configuration(2, 1), id="2111"),
    pytest.param(configuration(2, 2, N=7, U=3, layers=5), id="2211-uneven"),
    pytest.param(configuration(2, 2, 2, N=4, U=2), id="2221"),
    pytest.param(configuration(3, 1, 2, N=5, U=3, b=1), id="3121"),
    pytest.param(configuration(4, 2, N=8, U=4, b=1), id="4211"),
    pytest.param(configuration(2, 1, 2, 2, N=2, b=1), id="2122"),
]


@pytest.mark.parametrize("config", GRID)
def test_layouts(config):
    assert_parity(config)


@pytest.mark.parametrize(
    "config", [configuration(2, 2, 2, dtype="float64"), configuration(1, 3, N=5, U=2, layers=4, dtype="float64")]
)
def test_float64(config):
    assert_parity(config)


@pytest.mark.parametrize("own", ["own_model", "Concrete"])
def test_own_model(own):
    assert_parity(configuration(2, 2, 2, own=own), whole=own == "Concrete")


def test_ignored_labels_count_globally():
    config = configuration(2, 2, N=4)
    assert_parity(config, ignored=True, blank=(2, 3))  # the second micro-batch has no valid label at all


def test_step_without_valid_labels_is_skipped_by_all():
    config = configuration(2, 1, 2, N=2, b=1, steps=3)
    ours = harness.train(config, samples_of(config, blank=tuple(range(4))))
    assert all(math.isnan(loss) for loss in ours.losses)
    assert all(bool(weight.isfinite().all()) for weight in ours.weights.values())


def test_memory_limit_and_prefetch():
    assert_parity(configuration(2, 2, 2, N=6, U=2, memory_limit=1.5, prefetch=True))


def test_validation_loss_is_the_plain_loss():
    config = configuration(2, 2, 2, steps=2)
    samples = samples_of(config, ignored=True)
    ours = harness.train(config, samples)
    trained = plain(config, samples).weights
    model = resolve_factory(config.model)().requires_grad_(False)
    model.load_state_dict(trained)
    total, tokens = 0.0, 0
    for round in range(2):
        for ids, labels in samples.step(1000 + round, 2):
            logits = model.head(_blocks(model, model.embed(ids)))
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            tokens += int((labels != -100).sum())
    assert ours.validation == pytest.approx(total / tokens, rel=1e-5)


def _blocks(model, h):
    for block in model.blocks:
        h = block(h)
    return h


def test_gradient_norm_does_not_depend_on_the_layout():
    norms = []
    for config in (
        configuration(layers=4, steps=1),
        configuration(2, 1, 2, N=2, layers=4, steps=1),
        configuration(2, 2, 1, 2, N=2, layers=4, steps=1),
    ):
        samples = samples_of(config)
        with harness.members(config, samples) as run:
            norms.append(decide(1, run.call("advance", 1, None), 1.0).grad_norm)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("fault", [sabotage.drop_one_w, sabotage.drop_a_norm_gradient, sabotage.reduce_twice])
def test_negative_control(fault):
    config = configuration(2, 2, 2, steps=2)
    samples = samples_of(config)
    ours = harness.train(config, samples, sabotage=fault)
    with pytest.raises(AssertionError, match="gradient differs"):
        assert_equal(ours, plain(config, samples), TOLERANCE["float32"])


def test_negative_control_token_divisor():
    """The number of labels instead of the number of valid ones."""
    config = configuration(2, 2, N=4, steps=2)
    samples = samples_of(config, ignored=True)

    def by_labels(step, votes, clip) -> Decision:
        labels = samples.per_step * samples.seq_len
        last = votes[-1]
        return decide(step, [*votes[:-1], Vote(last.loss_sum, labels, last.squared_norm, 0.0)], clip)

    ours = harness.train(config, samples, decision=by_labels)
    with pytest.raises(AssertionError, match="gradient differs"):
        assert_equal(ours, plain(config, samples), TOLERANCE["float32"])
