"""The learning rate of every step, by each schedule, against the rule in other words."""

from __future__ import annotations

import math

import pytest

from tests import reference
from zeropp_ray.config import LR_SCHEDULES, TrainSection
from zeropp_ray.optim import learning_rate


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
