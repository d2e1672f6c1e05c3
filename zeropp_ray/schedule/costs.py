"""What tasks cost, per model chunk, in any one unit of time. Decimals are taken as exact, so that ties are ties."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from zeropp_ray.errors import ConfigError

_WIDEST = 1e9  # ratio of costs; more than any hardware has, and far from the limits of the replay


@dataclass(frozen=True)
class Ticks:
    """Costs as whole numbers of ``1/scale`` of the unit of time: replays add and compare exactly, and fast."""

    F: tuple[int, ...]
    B: tuple[int, ...]
    W: tuple[int, ...]
    comm: int
    scale: int


@dataclass(frozen=True)
class Costs:
    """Durations per model chunk (``F``, ``B``, ``W``: ``P·V`` values each) and of a transfer between stages (``comm``).

    Raises :class:`ConfigError` for tuples of unequal length and for values that are negative or not finite, and for a
    forward of no duration.
    """

    F: tuple[float, ...]
    B: tuple[float, ...]
    W: tuple[float, ...]
    comm: float = 0

    def __post_init__(self) -> None:
        if not len(self.F) == len(self.B) == len(self.W):
            raise ConfigError(
                f"cost: {len(self.F)} forward, {len(self.B)} input-backward and {len(self.W)} weight-backward costs; "
                "give one of each per model chunk"
            )
        for name, values in (("F", self.F), ("B", self.B), ("W", self.W), ("comm", (self.comm,))):
            for value in values:
                if not math.isfinite(value) or value < 0 or (name == "F" and value == 0):
                    least = "above 0" if name == "F" else "at least 0"
                    raise ConfigError(f"cost.{name} = {value}: not a duration; give a finite number {least}")
        costs = [value for value in (*self.F, *self.B, *self.W, self.comm) if value]
        if max(costs, default=1) / min(costs, default=1) > _WIDEST:
            raise ConfigError(
                f"cost: {min(costs)} beside {max(costs)}; none may be more than {_WIDEST:g} times another, "
                "except that B, W and comm may be 0"
            )

    @classmethod
    def uniform(cls, model_chunks: int, F: float = 1, B: float = 1, W: float = 1, comm: float = 0) -> Costs:
        """The same cost for each of ``model_chunks`` chunks."""
        return cls((F,) * model_chunks, (B,) * model_chunks, (W,) * model_chunks, comm)

    @property
    def is_uniform(self) -> bool:
        """Whether all chunks cost the same."""
        return all(len(set(values)) <= 1 for values in (self.F, self.B, self.W))

    def ticks(self) -> Ticks:
        """The same costs as integers. 1.3 means thirteen tenths, not the binary fraction next to it."""
        columns = [_exact(values) for values in (self.F, self.B, self.W, (self.comm,))]
        scale = math.lcm(*(x.denominator for column in columns for x in column))
        f, b, w, comm = (tuple(int(x * scale) for x in column) for column in columns)
        return Ticks(f, b, w, comm[0], scale)


def _exact(values: Iterable[float]) -> list[Fraction]:
    return [Fraction(str(value)) for value in values]
