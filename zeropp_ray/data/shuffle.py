"""A permutation that needs no memory: where place ``i`` of a shuffled epoch is, for any number of places.

An unbalanced Feistel network over ``a * b >= n`` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): a
place is split in ``left < a`` and ``right < b``, and rounds add to one a keyed hash of the other, which can be undone
and hence is a bijection. A result that is not below ``n`` goes through again, until one is; ``a * b`` is so close to
``n`` that this is rare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

ROUNDS = 8
_MASK = 2**64 - 1


class Shuffle:
    """A pseudo-random bijection of ``range(n)``, drawn from ``seed``."""

    def __init__(self, n: int, seed: Sequence[int]) -> None:
        self._n = n
        self._a = math.isqrt(max(n - 1, 0)) + 1
        self._b = -(-n // self._a)
        self._keys = [int(key) for key in np.random.SeedSequence(list(seed)).generate_state(ROUNDS, np.uint64)]

    def __getitem__(self, place: int) -> int:
        assert 0 <= place < self._n
        while True:
            right, left = divmod(place, self._a)
            for i, key in enumerate(self._keys):
                if i % 2:
                    right = (right + _hash(left, key)) % self._b
                else:
                    left = (left + _hash(right, key)) % self._a
            place = right * self._a + left
            if place < self._n:
                return place


def _hash(value: int, key: int) -> int:
    """64 well-mixed bits; the finalizer of splitmix64."""
    value = (value + key) * 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
