"""Which stage holds which model chunk. Model chunks are consecutive; chunk ``v`` of stage ``p``, of ``P``, is

- *looped*: model chunk ``v·P + p``, so that a stage hands on to the next one, and the last one to the first;
- *v*: the same for even ``v``, and ``v·P + (P-1-p)`` for odd ones. The way turns at the ends, where a stage hands over
  to itself, and with two chunks the first stage holds both ends of the model.
"""

from __future__ import annotations

PLACEMENTS = ("looped", "v")


def model_chunk(placement: str, stages: int, stage: int, chunk: int) -> int:
    """The model chunk that is chunk ``v`` of a stage."""
    return chunk * stages + _turned(placement, stages, stage, chunk)


def stage_and_chunk(placement: str, stages: int, model_chunk: int) -> tuple[int, int]:
    """The stage that holds a model chunk, and which of its chunks it is: the inverse of :func:`model_chunk`."""
    chunk, stage = divmod(model_chunk, stages)
    return _turned(placement, stages, stage, chunk), chunk


def _turned(placement: str, stages: int, stage: int, chunk: int) -> int:
    return stages - 1 - stage if placement == "v" and chunk % 2 else stage
