"""What tasks, exchanges and the end of a step cost, in any one unit of time. Decimals are exact, so ties are ties."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from zeropp_ray.errors import ConfigError

_WIDEST = 1e9  # ratio of costs; more than any hardware has, and far from the limits of the replay
_PER_CHUNK = ("F", "B", "W", "RF", "gather", "reduce", "optimizer")


@dataclass(frozen=True)
class Ticks:
    """Costs as whole numbers of ``1/scale`` of the unit of time: replays add and compare exactly, and fast."""

    F: tuple[int, ...]
    B: tuple[int, ...]
    W: tuple[int, ...]
    RF: tuple[int, ...]
    gather: tuple[int, ...]
    reduce: tuple[int, ...]
    optimizer: tuple[int, ...]
    hops: tuple[int, ...]
    vote: int
    post: int
    scale: int


@dataclass(frozen=True)
class Sizes:
    """What each of the ``P·V`` model chunks holds, in any one unit of memory.

    ``parameters`` while it is resident, ``gradients`` while its buffer is open or being reduced; of a micro-batch
    ``saved`` from ``F`` (``RF``) to ``B``, ``stashed``, the part that ``W`` still needs, from ``B`` to ``W``, and
    ``inputs``, of a recomputed chunk, from ``F`` to ``RF``.
    """

    parameters: tuple[float, ...]
    gradients: tuple[float, ...]
    saved: tuple[float, ...]
    stashed: tuple[float, ...]
    inputs: tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Durations per model chunk (``P·V`` values each), and of what happens once.

    ``F``, ``B``, ``W``, ``RF`` are of a task, ``gather`` and ``reduce`` of a chunk's exchanges inside its stage, and
    ``optimizer`` of the update of what a member owns of it. ``hops`` are of a message over the boundary behind each
    model chunk but the last, ``comm`` each where none are given. ``vote`` is of the round that decides on a step,
    and ``post`` what a rank itself is busy with for each message that it sends or receives, beside the task.

    ``RF`` is as ``F`` if it is left empty, the others are 0. ``overlap``: whether gathers and reduces are under way
    while tasks run; not where a stage has one member, which copies by itself. ``sizes``: the memory of the chunks.

    Raises :class:`ConfigError` for tuples of unequal length and for values that are negative or not finite, and for a
    forward of no duration.
    """

    F: tuple[float, ...]
    B: tuple[float, ...]
    W: tuple[float, ...]
    comm: float = 0
    RF: tuple[float, ...] = ()
    gather: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    optimizer: tuple[float, ...] = ()
    hops: tuple[float, ...] = ()
    vote: float = 0
    overlap: bool = True
    sizes: Sizes | None = None
    post: float = 0

    def __post_init__(self) -> None:
        if not len(self.F) == len(self.B) == len(self.W):
            raise ConfigError(
                f"cost: {len(self.F)} forward, {len(self.B)} input-backward and {len(self.W)} weight-backward costs; "
                "give one of each per model chunk"
            )
        chunks = len(self.F)
        defaults = {"RF": self.F, "hops": (self.comm,) * (chunks - 1)}
        for name in ("RF", "gather", "reduce", "optimizer", "hops"):
            values = getattr(self, name) or defaults.get(name, (0,) * chunks)
            object.__setattr__(self, name, values)
            if len(values) != chunks - (name == "hops"):
                raise ConfigError(
                    f"cost.{name}: {len(values)} values for {chunks} model chunks; give {chunks - (name == 'hops')}"
                )
        named = {"comm": [self.comm], "vote": [self.vote], "post": [self.post]}
        named |= {name: getattr(self, name) for name in (*_PER_CHUNK, "hops")}
        for name, values in named.items():
            for value in values:
                if not math.isfinite(value) or value < 0 or (name == "F" and value == 0):
                    least = "above 0" if name == "F" else "at least 0"
                    raise ConfigError(f"cost.{name} = {value}: not a duration; give a finite number {least}")
        costs = [value for values in named.values() for value in values if value]
        if max(costs, default=1) / min(costs, default=1) > _WIDEST:
            raise ConfigError(
                f"cost: {min(costs)} beside {max(costs)}; none may be more than {_WIDEST:g} times another, "
                "except that all but F may be 0"
            )

    @classmethod
    def uniform(
        cls,
        model_chunks: int,
        F: float = 1,
        B: float = 1,
        W: float = 1,
        comm: float = 0,
        gather: float = 0,
        reduce: float = 0,
        optimizer: float = 0,
        vote: float = 0,
    ) -> Costs:
        """The same cost for each of ``model_chunks`` chunks."""
        f, b, w, gathers, reduces, updates = ((value,) * model_chunks for value in (F, B, W, gather, reduce, optimizer))
        return cls(f, b, w, comm, gather=gathers, reduce=reduces, optimizer=updates, vote=vote)

    @property
    def is_uniform(self) -> bool:
        """Whether all chunks cost the same."""
        return all(len(set(getattr(self, name))) <= 1 for name in _PER_CHUNK)

    @property
    def tasks_alone(self) -> bool:
        """Whether nothing but tasks, and the way of messages, takes time."""
        return not any((*self.gather, *self.reduce, *self.optimizer, self.vote, self.post))

    def ticks(self) -> Ticks:
        """The same costs as integers. 1.3 means thirteen tenths, not the binary fraction next to it."""
        columns = [_exact(getattr(self, name)) for name in (*_PER_CHUNK, "hops")] + [_exact((self.vote, self.post))]
        scale = math.lcm(*(x.denominator for column in columns for x in column))
        *chunks, hops, (vote, post) = (tuple(int(x * scale) for x in column) for column in columns)
        return Ticks(**dict(zip(_PER_CHUNK, chunks, strict=True)), hops=hops, vote=vote, post=post, scale=scale)


@dataclass(frozen=True)
class Link:
    """A way between two members: seconds until the first byte comes, and bytes a second from then on."""

    latency: float
    bandwidth: float

    def time(self, message: float) -> float:
        """Seconds that a message of so many bytes takes."""
        return self.latency + message / self.bandwidth


def hops(owners: Sequence[int], stages: int, nodes: int, inside: float, between: float) -> tuple[float, ...]:
    """What a message over each boundary takes: ``inside`` a node, or ``between`` nodes.

    Args:
        owners: the stage of each model chunk.
        stages, nodes: stages lie on nodes in runs of equal length, as far as it comes out even.
    """
    node = [p * nodes // stages for p in range(stages)]
    return tuple(inside if node[p] == node[q] else between for p, q in pairwise(owners))


def _exact(values: Iterable[float]) -> list[Fraction]:
    return [Fraction(str(value)) for value in values]
