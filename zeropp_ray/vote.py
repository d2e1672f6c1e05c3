"""The end of a step: every member votes, one place decides, all commit or none.

Two phases, so that stages cannot drift apart by a step: the decision on step ``t - 1`` travels with the call that
starts step ``t``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Vote:
    """One member's part of a step.

    ``loss_sum`` (nats, fp64) and ``tokens`` (valid labels) come from the last stage and are zero elsewhere.
    ``squared_norm`` is that of the gradient shards this member answers for: replicas that hold the same leave it to the
    first.
    """

    loss_sum: float
    tokens: int
    squared_norm: float
    seconds: float  # wall time of the member's step
    held: int = -1  # the newest step whose copies are whole at this member: its own, and that which it guards
    times: Mapping[str, float] = field(default_factory=dict)  # seconds in each of F, RF, B and W of the step, if asked


@dataclass(frozen=True)
class Decision:
    """What all members do with a step: multiply gradients of the loss *sum* by ``factor`` and update, or skip."""

    step: int
    commit: bool
    factor: float
    loss: float  # nats per valid token; NaN if there was none
    tokens: int
    grad_norm: float  # of the mean loss, before clipping
    reason: str = ""  # why it is skipped


def decide(step: int, votes: Sequence[Vote], clip_norm: float) -> Decision:
    """Sum the votes, given in (p, f, r) order, and decide. ``clip_norm`` 0 clips nothing.

    The factor is ``min(1, clip / (norm + 1e-6)) / tokens``: the clip of ``torch.nn.utils.clip_grad_norm_`` on the
    gradient of the mean over the step's valid tokens. No valid token, or a loss or norm that is not finite: skip.
    """
    loss_sum = sum(vote.loss_sum for vote in votes)
    tokens = sum(vote.tokens for vote in votes)
    if tokens == 0:
        return Decision(step, False, 0.0, math.nan, 0, math.nan, "no valid token in the step")
    loss = loss_sum / tokens
    norm = math.sqrt(sum(vote.squared_norm for vote in votes)) / tokens
    if not (math.isfinite(loss) and math.isfinite(norm)):
        what = "loss" if not math.isfinite(loss) else "gradient norm"
        return Decision(step, False, 0.0, loss, tokens, norm, f"{what} is {loss if what == 'loss' else norm}")
    clip = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0
    return Decision(step, True, clip / tokens, loss, tokens, norm)
