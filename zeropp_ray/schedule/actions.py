"""The instructions of a program. A rank's program is a flat list of :class:`Action`, executed in order.

============  ==============================================================================================
``F B W``     forward, backward for the input, backward for the weights: of one chunk and one micro-batch
``RF``        the forward again, of a chunk whose ``F`` kept nothing but the input: it makes the graph for ``B``
``GATHER``    all-gather the chunk's parameters inside the stage; ``RELEASE`` frees them again
``REDUCE``    reduce-scatter the chunk's gradient buffer inside the stage, which frees the buffer
``RECV``      *post* the receive of a chunk's input activation ("F") or of its output's gradient ("B")
``WAIT``      block until that receive is complete
``SEND``      *post* the send of a chunk's output activation ("F") or of its input's gradient ("B")
``DRAIN``     block until that send is complete, which frees what was sent
============  ==============================================================================================

The split of the backward in ``B`` and ``W`` is that of zero-bubble schedules, which ZeroPP builds on (Tang et al.,
ZeroPP, arXiv 2402.03791, "task-interleaved"). Between two chunks of one rank (one stage) nothing is sent: it hands over
locally. ``RF`` is recomputation of activations (Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv
1604.06174) as an instruction of its own: it needs no gradient, so it can fill a gap before the gradient comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Op(str, Enum):
    """What an action does; the value is the word printed and the word of the JSON form."""

    F = "F"
    RF = "RF"
    B = "B"
    W = "W"
    GATHER = "GATHER"
    RELEASE = "RELEASE"
    REDUCE = "REDUCE"
    RECV = "RECV"
    WAIT = "WAIT"
    SEND = "SEND"
    DRAIN = "DRAIN"

    __hash__ = str.__hash__  # that of Enum is Python code, and passes look operations up by the million

    def __str__(self) -> str:
        return self.value


COMPUTE = frozenset({Op.F, Op.RF, Op.B, Op.W})
TRANSFER = frozenset({Op.RECV, Op.WAIT, Op.SEND, Op.DRAIN})


class Action(NamedTuple):
    """One instruction: ``chunk`` is the stage's own index ``v``; ``microbatch`` is -1 where there is none.

    ``kind`` is set for transfers only: "F" for an activation, "B" for a gradient.
    """

    op: Op
    chunk: int
    microbatch: int = -1
    kind: str = ""

    def __str__(self) -> str:
        """``1F3`` is the forward of chunk 1 and micro-batch 3; ``SEND 1F3`` sends what it made; ``GATHER 1``."""
        if self.op in COMPUTE:
            return f"{self.chunk}{self.op}{self.microbatch}"
        if self.op in TRANSFER:
            return f"{self.op} {self.chunk}{self.kind}{self.microbatch}"
        return f"{self.op} {self.chunk}"


Ranks = Sequence[Sequence[Action]]
"""One list of actions per rank (pipeline stage); what the passes take and give."""


def listing(ranks: Ranks) -> str:
    """The result of any pass as text: one line per rank, its actions in order."""
    return "\n".join(f"rank {p}: {' '.join(map(str, actions))}" for p, actions in enumerate(ranks))
