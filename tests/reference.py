"""The reference: a plain single-process PyTorch training loop. It imports nothing of ours; the model is handed in.

What the engine must equal, whatever the layout. It restates the rules in its own words, so that a fault in ours shows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # a label that does not count

Batch = Sequence[tuple[Tensor, Tensor]]  # the micro-batches (ids, labels) of one step, [b, s] int64 each


@dataclass(frozen=True)
class Reference:
    losses: list[float]  # mean over the valid tokens of each step; NaN: there was none, and the step was skipped
    gradients: dict[str, Tensor]  # of the first step's mean loss, before clipping
    weights: dict[str, Tensor]  # at the end


def build(factory: Callable[[], Any], seed: int, *, whole: bool = False) -> Any:
    """The model with its starting weights: each module under a seed from its name, or `whole` under the run's seed.

    Where modules share a parameter, the first of them has the last word.
    """
    if whole:
        torch.manual_seed(seed)
        return factory()
    model = factory()
    for name, module in reversed(list(model.named_modules())):
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
            model.init_module(module) if hasattr(model, "init_module") else module.reset_parameters()
    return model


def learning_rate(step: int, steps: int, lr: float, warmup: int, min_ratio: float) -> float:
    """Of step 1..steps: linear from 0 over `warmup` steps, then half a cosine down to `min_ratio * lr` at the last."""
    if step < warmup:
        return lr * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return lr * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * done)) / 2)


def train(
    factory: Callable[[], Any],
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    lr: float = 3e-3,
    warmup: int = 3,
    min_ratio: float = 0.1,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    clip: float = 1.0,
) -> Reference:
    """Train on `batches[step]`, one micro-batch at a time. `clip = 0` does not clip.

    With `dtype` bf16 the parameters are rounded copies of fp32 masters, which are what is trained; gradients are added
    up in fp32, and buffers stay fp32.
    """
    narrow = dtype == torch.bfloat16
    model = build(factory, seed, whole=whole).to(torch.float32 if narrow else dtype)
    parameters = dict(model.named_parameters())
    masters = parameters
    if narrow:
        masters = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in parameters.items()}
        for p in parameters.values():
            p.data = p.data.bfloat16()
    trained = [p for p in masters.values() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}

    for step, batch in enumerate(batches, 1):
        tokens = sum(int((labels != IGNORED).sum()) for _, labels in batch)
        if not tokens:
            losses.append(math.nan)
            continue
        optimizer.zero_grad()
        total = 0.0
        for ids, labels in batch:
            h = model.embed(ids)
            for block in model.blocks:
                h = block(h)
            logits = model.head(h).flatten(0, 1)
            logits = logits.float() if narrow else logits
            loss = functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
            (loss / tokens).backward()
            total += loss.item()
            for name, p in parameters.items() if narrow else ():
                if p.grad is not None:
                    so_far = masters[name].grad
                    masters[name].grad = p.grad.float() if so_far is None else so_far + p.grad.float()
                    p.grad = None
        losses.append(total / tokens)
        gradients = gradients or {name: p.grad.clone() for name, p in masters.items() if p.requires_grad}
        if clip:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), lr, warmup, min_ratio)
        optimizer.step()
        for name, p in parameters.items() if narrow else ():
            p.data.copy_(masters[name].data)
    return Reference(losses, gradients, {name: p.detach().clone() for name, p in masters.items()})
