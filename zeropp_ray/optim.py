"""AdamW on a member's flat shards, and the learning rate of a step.

Decoupled weight decay: Loshchilov and Hutter, arXiv 1711.05101. It applies to matrices, not to norms and biases; in the
flat order matrices come first, so each shard is at most two tensors, with decay and without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zeropp_ray.sharding import FlatChunk, Slot

MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch names them: the mean gradient and the mean square


def learning_rate(step: int, *, steps: int, lr: float, warmup_steps: int, min_lr_ratio: float) -> float:
    """Of step ``step`` = 1..steps:

    linear warm-up to ``lr`` at ``warmup_steps``, then a cosine to ``lr * min_lr_ratio`` at ``steps``.
    """
    if step < warmup_steps:
        return lr * step / warmup_steps
    if steps == warmup_steps:
        return lr
    done = (step - warmup_steps) / (steps - warmup_steps)
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


class ShardedAdamW:
    """One fused AdamW over the shards of all chunks of a member."""

    def __init__(
        self, chunks: Sequence[FlatChunk], *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self._pairs: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._ranges: dict[FlatChunk, list[tuple[int, torch.nn.Parameter]]] = {}  # where in the shard each begins
        groups: list[dict[str, object]] = []
        for chunk in chunks:
            cut = chunk.decayed_in_shard
            for piece, decay in ((slice(0, cut), weight_decay), (slice(cut, None), 0.0)):
                if chunk.shard[piece].numel() == 0:
                    continue
                weight = torch.nn.Parameter(chunk.shard[piece])  # shares the shard's memory
                self._pairs.append((weight, chunk.gradient[piece]))
                self._ranges.setdefault(chunk, []).append((piece.start, weight))
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

    def moments(self, chunk: FlatChunk, slot: Slot) -> dict[str, torch.Tensor]:
        """Views of the local piece of a parameter's two moments, by name; zeros before the first update."""
        place = chunk.place(slot)
        for begin, weight in self._ranges.get(chunk, []):
            if begin <= place.start < begin + weight.numel():
                state = self._state(weight)
                return {name: state[name][place.start - begin : place.stop - begin] for name in MOMENTS}
        return dict.fromkeys(MOMENTS, chunk.shard[:0])

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
