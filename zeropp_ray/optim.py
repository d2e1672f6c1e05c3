"""AdamW on a member's flat shards, and the learning rate of a step.

Decoupled weight decay: Loshchilov and Hutter, arXiv 1711.05101. It applies to matrices, not to norms and biases; in the
flat order matrices come first, so each shard is at most two tensors, with decay and without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zeropp_ray.config import TrainSection
from zeropp_ray.sharding import FlatParameters, Slot

MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch names them: the mean gradient and the mean square


def learning_rate(step: int, train: TrainSection) -> float:
    """Of step ``step`` = 1..``train.steps``: linear warm-up to ``lr`` at ``warmup_steps``, then by ``schedule``.

    ``constant`` stays there; ``cosine`` and ``linear`` go down to ``lr * min_lr_ratio`` at the last step; ``wsd``
    (warm-up, stable, decay: Hu et al., arXiv 2404.06395, section 4) stays and goes down linearly over the last
    ``decay_steps``, so that a run can be extended from before its decay.
    """
    if step < train.warmup_steps:
        return train.lr * step / train.warmup_steps
    begin = train.steps - train.decay if train.schedule == "wsd" else train.warmup_steps
    if train.schedule == "constant" or step <= begin:
        return train.lr
    done = (step - begin) / (train.steps - begin)
    left = 0.5 * (1 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1 - done
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)


class ShardedAdamW:
    """One fused AdamW over the shards of all trained parameters of a member."""

    def __init__(
        self, sets: Sequence[FlatParameters], *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self._pairs: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._ranges: dict[FlatParameters, list[tuple[int, torch.nn.Parameter]]] = {}  # where in the shard each begins
        groups: list[dict[str, object]] = []
        for flat in sets:
            cut = flat.decayed_in_shard
            for piece, decay in ((slice(0, cut), weight_decay), (slice(cut, None), 0.0)):
                if flat.shard[piece].numel() == 0:
                    continue
                weight = torch.nn.Parameter(flat.shard[piece])  # shares the shard's memory
                self._pairs.append((weight, flat.gradient[piece]))
                self._ranges.setdefault(flat, []).append((piece.start, weight))
                groups.append({"params": [weight], "weight_decay": decay})
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True) if groups else None

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """Apply ``factor`` times the gradients. Changes the gradients in place."""
        if self._adam is None:
            return
        for weight, gradient in self._pairs:
            weight.grad = gradient.mul_(factor)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()

    def moments(self, flat: FlatParameters, slot: Slot) -> dict[str, torch.Tensor]:
        """Views of the local piece of a parameter's two moments, by name; zeros before the first update.

        A frozen one has none.
        """
        if not flat.trained:
            return {}
        place = flat.place(slot)
        for begin, weight in self._ranges.get(flat, []):
            if begin <= place.start < begin + weight.numel():
                state = self._state(weight)
                return {name: state[name][place.start - begin : place.stop - begin] for name in MOMENTS}
        return dict.fromkeys(MOMENTS, flat.shard[:0])

    def set_commits(self, commits: int) -> None:
        """How many updates the moments have seen; Adam corrects their bias by it."""
        for weight, _ in self._pairs:
            self._state(weight)["step"].fill_(commits)

    def _state(self, weight: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The optimizer's state of a piece, made as torch's AdamW makes it at the first update."""
        assert self._adam is not None
        state = self._adam.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in MOMENTS:
                state[name] = torch.zeros_like(weight, requires_grad=False)
        return state
