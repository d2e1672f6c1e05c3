"""AdamW on what a member owns of the flat parameters, and the learning rate of a step.

Decoupled weight decay: Loshchilov and Hutter, arXiv 1711.05101. It applies to matrices, not to norms and biases; in the
flat order matrices come first, so what a member owns of a set is at most two tensors, with decay and without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
    """AdamW on what a member owns of ``sets``, all of which are trained.

    It calls the kernel of ``torch.optim.AdamW(fused=True)``, with the same result. That class itself imports torch's
    compiler: most of a second for every member at its start.
    """

    def __init__(
        self, sets: Sequence[FlatParameters], *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self._betas, self._eps = betas, eps
        device = sets[0].master.device if sets else None
        self._commits = torch.zeros((), device=device)  # updates so far; Adam corrects the bias of the moments by it
        self._moments = {flat: {name: torch.zeros_like(flat.master) for name in MOMENTS} for flat in sets}
        self._groups: list[tuple[float, list[tuple[torch.Tensor, ...]]]] = []  # weight decay; weight, gradient, moments
        for decayed in (True, False):
            parts = []
            for flat in sets:
                part = slice(0, flat.decayed_owned) if decayed else slice(flat.decayed_owned, None)
                tensors = (flat.master, flat.owned_gradient, *self._moments[flat].values())
                if flat.master[part].numel():
                    parts.append(tuple(tensor[part] for tensor in tensors))
            if parts:
                self._groups.append((weight_decay if decayed else 0.0, parts))

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """Apply ``factor`` times the gradients. Changes the gradients in place."""
        self._commits += 1
        for weight_decay, parts in self._groups:
            weights, gradients, means, squares = map(list, zip(*parts, strict=True))
            for gradient in gradients:
                gradient.mul_(factor)  # the kernel could divide by it, but takes half as long again then
            torch._fused_adamw_(
                weights,
                gradients,
                means,
                squares,
                [],
                [self._commits] * len(parts),
                lr=lr,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=weight_decay,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
            )

    def moments(self, flat: FlatParameters, slot: Slot) -> dict[str, torch.Tensor]:
        """Views of the owned part of a parameter's two moments, by name; a frozen one has none."""
        return {name: moment[flat.place(slot)] for name, moment in self._moments.get(flat, {}).items()}

    def held(self) -> Iterator[torch.Tensor]:
        """All tensors of the optimizer's state."""
        yield self._commits
        yield from (moment for moments in self._moments.values() for moment in moments.values())

    def set_commits(self, commits: int) -> None:
        """How many updates the moments have seen."""
        self._commits.fill_(commits)
