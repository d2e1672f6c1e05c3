"""The loss of a model on a text: what is read, how it is summed, and what it means per token and per byte.

Sums come first and the division last, so that it does not matter who read which part: one process, or the members of a
pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from zeropp_ray.config import RunConfig
from zeropp_ray.data.sampler import IGNORE
from zeropp_ray.data.store import Tokens
from zeropp_ray.data.text import Text, text_of
from zeropp_ray.errors import ConfigError


@dataclass(frozen=True)
class Loss:
    """A sum over tokens, in nats. Sums of parts add up to that of the whole."""

    total: float
    tokens: int

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.total + other.total, self.tokens + other.tokens)

    @property
    def per_token(self) -> float:
        """Nats; NaN without a token."""
        return self.total / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.per_token, 700.0))

    @property
    def bits_per_token(self) -> float:
        return self.per_token / math.log(2)


@dataclass(frozen=True)
class Request:
    """What to evaluate on: the text at `path` (empty: the run's own), `split` of a store, its first `most` windows."""

    path: str = ""
    split: str = "validation"
    most: int = 0  # 0: all

    def windows(self, config: RunConfig) -> tuple[Windows, Text]:
        """The windows of a model of `config`, and the text that they were cut from."""
        text = text_of(config, self.path, self.split)
        return Windows(text.tokens, config.model.seq_len, self.most), text


class Windows:
    """A text cut in windows of `seq_len` tokens that lie side by side: every token but the first is predicted once,
    from those of its window. The last window is filled up with tokens that do not count."""

    def __init__(self, text: Tokens, seq_len: int, most: int = 0) -> None:
        """`most`: windows that are read, from the start; 0: all. `ConfigError` for a text of one token or none."""
        if len(text) < 2:
            raise ConfigError(f"a text of {len(text)} tokens predicts nothing; give at least 2")
        self._text, self._seq_len = text, seq_len
        whole = -(-(len(text) - 1) // seq_len)
        self.count = min(most or whole, whole)

    def batch(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and labels, int64 `[b, seq_len]`, of windows by number; beyond the last all labels are `IGNORE`."""
        places = numbers[:, None] * self._seq_len + np.arange(self._seq_len + 1)
        inside = (places < len(self._text)) & (numbers[:, None] < self.count)
        tokens = self._text[np.where(inside, places, 0)].astype(np.int64)
        ids = np.where(inside, tokens, 0)[:, :-1]
        labels = np.where(inside, tokens, IGNORE)[:, 1:]
        return torch.from_numpy(ids.copy()), torch.from_numpy(labels.copy())


class MemberWindows:
    """The windows that member `(f, r)` of a pipeline reads, as the rounds of an evaluation; it trains on nothing."""

    def __init__(self, windows: Windows, config: RunConfig, f: int, r: int) -> None:
        self._windows, self._parallel = windows, config.parallel
        self._member = r * config.parallel.shards + f
        self.validation_rounds = -(-windows.count // config.parallel.global_batch)

    def microbatch(self, step: int, m: int) -> tuple[Tensor, Tensor]:
        raise LookupError("an evaluation has no steps")

    def validation_microbatch(self, round: int, m: int) -> tuple[Tensor, Tensor]:
        """Micro-batch `m` of a round, numbered over the members as the samples of a step are."""
        p = self._parallel
        members, size = p.shards * p.replicas, p.microbatch_size
        first = ((round * p.microbatches + m) * members + self._member) * size
        return self._windows.batch(np.arange(first, first + size))


@torch.inference_mode()
def evaluate(model: Any, windows: Windows, batch: int, progress: Callable[[int], None] = lambda windows: None) -> Loss:
    """The loss of a whole layered model in this process, `batch` windows at a time; `progress` hears how many."""
    loss = Loss(0.0, 0)
    for first in range(0, windows.count, batch):
        ids, labels = windows.batch(np.arange(first, min(first + batch, windows.count)))
        h = model.embed(ids)
        for block in model.blocks:
            h = block(h)
        logits, labels = model.head(h).flatten(0, 1), labels.flatten()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        total = functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        loss += Loss(float(total), int((labels != IGNORE).sum()))
        progress(len(ids))
    return loss
