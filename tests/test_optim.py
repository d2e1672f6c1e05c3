"""The learning rate of every step, by each schedule, against the rule in other words; and the update."""

from __future__ import annotations

import math

import pytest
import torch

from tests import harness, reference
from tests.test_parity import configuration, samples_of
from zeropp_ray.comm.gloo import GlooGroup
from zeropp_ray.config import LR_SCHEDULES, TrainSection
from zeropp_ray.layout import Layout, Member
from zeropp_ray.optim import MOMENTS, ShardedAdamW, learning_rate
from zeropp_ray.sharding import FlatParameters, GradientBuffers
from zeropp_ray.vote import decide


def rates(**settings: object) -> list[float]:
    """Of all steps; entry 0 is step 1."""
    train = TrainSection(lr=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(step, train) for step in range(1, train.steps + 1)]


def expected(schedule: str, steps: int, warmup: int, least: float, decay: int = 0) -> list[float]:
    up = [(i + 1) / warmup for i in range(min(warmup, steps))]
    rest = steps - len(up)
    if schedule == "constant":
        return up + [1.0] * rest
    if schedule == "wsd":
        return up + [1.0] * (rest - decay) + [1 - (1 - least) * (i + 1) / decay for i in range(decay)]
    shape = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2}[schedule]
    return up + [least + (1 - least) * shape((i + 1) / rest) for i in range(rest)]


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), [(40, 10), (40, 0), (5, 5), (3, 10), (1, 0), (1, 1)])
def test_every_step(schedule: str, steps: int, warmup: int) -> None:
    decay = min(math.ceil(steps / 10), max(0, steps - warmup))
    found = rates(schedule=schedule, steps=steps, warmup_steps=warmup, min_lr_ratio=0.1)
    if steps < warmup:
        assert found == pytest.approx([(i + 1) / warmup for i in range(steps)])
    else:
        assert found == pytest.approx(expected(schedule, steps, warmup, 0.1, decay))


def test_the_decay_of_wsd_is_as_long_as_asked() -> None:
    found = rates(schedule="wsd", steps=100, warmup_steps=10, decay_steps=30, min_lr_ratio=0.0)
    assert found == pytest.approx(expected("wsd", 100, 10, 0.0, 30))
    assert found[69] == 1.0 > found[70]
    assert found[-1] == 0.0
    longer = rates(schedule="wsd", steps=200, warmup_steps=10, decay_steps=30)
    assert longer[:70] == found[:70], "an extended run is the same up to the first one's decay"


def test_the_reference_has_the_same_cosine() -> None:
    found = rates(steps=50, warmup_steps=7, min_lr_ratio=0.2)
    assert found == pytest.approx([reference.learning_rate(step, 50, 1.0, 7, 0.2) for step in range(1, 51)])


def flat_set(*, decayed: int, other: int, dtype: torch.dtype) -> FlatParameters:
    """A set of a matrix and a vector with so many elements, owned by one member as a whole."""
    random = torch.Generator().manual_seed(decayed)
    parameters = [
        (name, torch.nn.Parameter(torch.randn(shape, generator=random, dtype=dtype)))
        for name, shape in (("matrix", (decayed, 1)), ("vector", (other,)))
    ]
    return FlatParameters(
        parameters,
        [],
        GlooGroup(0, 1, None),
        GradientBuffers(),
        layout=Layout(stages=1, chunks=1, shards=1, replicas=1),
        me=Member(0, 0, 0),
        dtype=dtype,
        stages=[0],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_is_that_of_the_fused_adamw_of_torch(dtype: torch.dtype) -> None:
    settings = {"betas": (0.9, 0.95), "eps": 1e-8}
    sets = [flat_set(decayed=1003, other=17, dtype=dtype), flat_set(decayed=64, other=0, dtype=dtype)]
    ours = ShardedAdamW(sets, **settings, weight_decay=0.1)
    matrices, vectors = (
        [torch.nn.Parameter(flat.master[part].clone()) for flat in sets] for part in (slice(0, -17), slice(-17, None))
    )
    matrices[1] = torch.nn.Parameter(sets[1].master.clone())
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors[:1], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, **settings, fused=True)
    random = torch.Generator().manual_seed(0)
    for step in range(1, 6):
        gradients = [torch.randn(flat.master.shape, generator=random, dtype=dtype) for flat in sets]
        for flat, gradient in zip(sets, gradients, strict=True):
            flat.owned_gradient.copy_(gradient)
        ours.update(1e-2 * step, 0.3)
        for group in theirs.param_groups:
            group["lr"] = 1e-2 * step
        matrices[0].grad, vectors[0].grad = gradients[0][:-17] * 0.3, gradients[0][-17:] * 0.3
        matrices[1].grad = gradients[1] * 0.3
        theirs.step()
        assert torch.equal(sets[0].master, torch.cat([matrices[0], vectors[0]]))
        assert torch.equal(sets[1].master, matrices[1])
    for name in MOMENTS:
        moments = ours.moments(sets[0], sets[0].slots[0])
        assert torch.equal(moments[name], theirs.state[matrices[0]][name])


def test_a_member_does_not_import_the_compiler_of_torch() -> None:
    config = configuration(2, 1, steps=1)
    with harness.members(config, samples_of(config)) as run:
        run.call("flush", decide(1, run.call("advance", 1, None), 1.0))
        assert run.call("imported", "torch._dynamo") == [False, False]
