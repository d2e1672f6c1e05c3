"""Which sample a member reads when: one global order over the whole run, whatever the layout.

A sample is a window of ``seq_len`` tokens and the token after each. Samples are numbered over the run; a step takes the
next ``N * b * F * R`` of them. Sample ``i`` of micro-batch ``m`` of member ``(f, r)`` is number
``((m*R + r)*F + f)*b + i`` of the step: a layout decides who reads a sample, never which samples a step sees.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from zeropp_ray.config import RunConfig
from zeropp_ray.data.corpus import Corpus
from zeropp_ray.data.shuffle import Shuffle
from zeropp_ray.data.store import Tokens

IGNORE = -100
"""Label of a token that does not count in the loss."""


class SampleOrder:
    """Sample number -> start of its window in a text of ``length`` tokens.

    An epoch is a random permutation of windows that lie side by side, so no token between its first and last window is
    skipped or seen twice. The row of windows starts at a random offset, so that epochs cut the text differently and
    what is left over at its ends changes. Both are drawn from (seed, epoch) alone, and neither takes memory or time
    that grows with the text.
    """

    def __init__(self, length: int, seq_len: int, seed: int) -> None:
        self.seq_len, self.seed = seq_len, seed
        self.per_epoch = length // seq_len - 1
        """Samples of an epoch: one window less than fit, which leaves room for the offset."""
        if self.per_epoch < 1:
            raise ValueError(f"{length} tokens are too few for windows of {seq_len}; use {2 * seq_len} or more")
        self._offsets = length - self.per_epoch * seq_len  # the last token is only ever a label
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Window starts of global sample numbers; int64 [n] -> int64 [n]."""
        return np.array([self._start(number) for number in numbers.tolist()], dtype=np.int64)

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.per_epoch)
        offset, shuffle = self._epoch(epoch)
        return offset + self.seq_len * shuffle[place]

    def _draw(self, epoch: int) -> tuple[int, Shuffle]:
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, epoch])))
        return int(random.integers(self._offsets)), Shuffle(self.per_epoch, [self.seed, epoch])


class Batches:
    """The micro-batches of member ``(f, r)``; every stage of the pipeline reads the same ones.

    Both kinds come as ``(ids, labels)``, int64 tensors [b, s]; a label is the next token, or ``IGNORE``.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, f: int, r: int) -> None:
        parallel, self._seq_len = config.parallel, config.model.seq_len
        self._size, self._microbatches = parallel.microbatch_size, parallel.microbatches
        self._member, self._members = r * parallel.shards + f, parallel.shards * parallel.replicas
        self._corpus = corpus
        self._order = SampleOrder(len(corpus.train), self._seq_len, config.run.seed)
        self._validation = min(config.train.eval_sequences, (len(corpus.validation) - 1) // self._seq_len)
        self.validation_rounds = -(-self._validation // parallel.global_batch)
        """How often the N micro-batches of the forward program are run for one evaluation."""

    def microbatch(self, step: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch ``m`` of ``step``, which counts from 0 over the whole run."""
        return self._windows(self._corpus.train, self._order.starts(self._numbers(step, m)))

    def validation_microbatch(self, round: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch ``m`` of a round of the evaluation: the held-out text in order, its windows side by side.

        Past its end sequences are 0 and all their labels ``IGNORE``, so that every member runs equally many.
        """
        numbers = self._numbers(round, m)
        inside = numbers < self._validation
        ids, labels = self._windows(self._corpus.validation, np.where(inside, numbers, 0) * self._seq_len)
        padding = torch.from_numpy(~inside)
        ids[padding] = 0
        labels[padding] = IGNORE
        return ids, labels

    def _numbers(self, step: int, m: int) -> np.ndarray:
        first = ((step * self._microbatches + m) * self._members + self._member) * self._size
        return np.arange(first, first + self._size)

    def _windows(self, text: Tokens, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = text[starts[:, None] + np.arange(self._seq_len + 1)].astype(np.int64)
        return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())
