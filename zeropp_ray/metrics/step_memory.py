"""The tensor memory of one member over one step, by kind: what the plan predicted, measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from zeropp_ray.metrics import kinds
from zeropp_ray.metrics.tensor_memory import Held, TensorMemory
from zeropp_ray.schedule import Action, Op

if TYPE_CHECKING:
    from zeropp_ray.copies import Copies
    from zeropp_ray.engine import Engine
    from zeropp_ray.optim import ShardedAdamW

# What an instruction makes counts as this while it runs, and what it drops again always does ...
_MADE = {Op.RECV: kinds.MESSAGES, Op.REDUCE: kinds.GRADIENT_BUFFERS}
# ... and as this, if it is there at the end and only autograd can have it.
_KEPT = dict.fromkeys((Op.F, Op.RF, Op.RECV), kinds.ACTIVATIONS)


@dataclass(frozen=True)
class StepMemory:
    """Bytes by kind: at the moment when their sum was largest, and each kind at its own largest."""

    at_peak: dict[str, int]
    highest: dict[str, int]
    where: str  # the instruction that ran at the peak, or "update" before the first, or "end" after the last
    allocator: dict[str, int] = field(default_factory=dict)  # on a GPU, the most that torch had "allocated", "reserved"

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())


class StepMeter(TensorMemory):
    """Tells the kinds apart. Enter it around a step, and call :meth:`before` ahead of every instruction of ``program``.

    When an instruction is over, it asks the member what it holds and of which kind that is. What nobody claims,
    autograd keeps. So the split at a peak is known when the instruction that ran is over.
    """

    def __init__(self, engine: Engine, optimizer: ShardedAdamW, copies: Copies, program: Sequence[Action]) -> None:
        super().__init__()
        self._engine, self._optimizer, self._copies, self._program = engine, optimizer, copies, program
        self._now = kinds.REST, -1  # ahead of the first instruction
        self._top = 0  # the most bytes while an instruction runs, and what there was then
        self._at_top: list[Held] = []
        self._result = StepMemory(dict.fromkeys(kinds.KINDS, 0), dict.fromkeys(kinds.KINDS, 0), "")

    def __enter__(self) -> StepMeter:
        super().__enter__()
        self._settle()
        return self

    def before(self, position: int) -> None:
        """Instruction ``position`` comes next; ``len(program)``: what follows the last one."""
        self._settle()
        op = self._op(position)
        self._now = kinds.GRADIENT_SHARDS if op is None else _MADE.get(op, kinds.REST), position

    def result(self) -> StepMemory:
        """Of what was measured up to now; not while an instruction runs."""
        self._settle()
        return self._result

    def _op(self, position: int) -> Op | None:
        return self._program[position].op if 0 <= position < len(self._program) else None

    def _grow(self, more: int) -> None:
        super()._grow(more)
        if self.bytes > self._top:
            self._top, self._at_top = self.bytes, list(self._live.values())

    def _settle(self) -> None:
        """The running instruction is over: say of every storage what it is, and of the peak how it was split."""
        claims = held(self._engine, self._optimizer, self._copies)
        claimed = {id(tensor.untyped_storage()): kind for kind, tensor in claims}
        live = self._live.copy()
        made = {key: storage for key, storage in live.items() if storage.maker == self._now[1]}
        self._name(made, claimed)
        if self._at_top:  # else nothing was made, and the peak is the end of the instruction before
            self._note(self._at_top)  # what was there before counts as what it was then
        self._name(live, claimed)
        self._note(live.values())
        self._top, self._at_top = self.bytes, []

    def _name(self, storages: dict[int, Held], claimed: dict[int, str]) -> None:
        for key, storage in storages.items():
            op = self._op(storage.maker)
            storage.kind = claimed.get(key) or (_KEPT.get(op, storage.kind) if op else storage.kind)

    def _note(self, storages: Iterable[Held]) -> None:
        split = dict.fromkeys(kinds.KINDS, 0)
        for storage in storages:
            split[storage.kind] += storage.bytes
        result, running = self._result, self._now[1]
        highest = {kind: max(split[kind], result.highest[kind]) for kind in kinds.KINDS}
        if sum(split.values()) > result.peak_bytes:
            where = str(self._program[running]) if self._op(running) else "update" if running < 0 else "end"
            result = StepMemory(split, highest, where)
        self._result = StepMemory(result.at_peak, highest, result.where)


def allocator_peaks(device: torch.device) -> dict[str, int]:
    """What torch's allocator says beside it: with what kernels take for themselves, rounded, and kept for later."""
    if device.type == "cpu":
        return {}
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


def held(engine: Engine, optimizer: ShardedAdamW, copies: Copies) -> Iterator[tuple[str, torch.Tensor]]:
    """What a member holds between two instructions, with its kind of memory; all but what autograd keeps."""
    for flat in engine.sets:
        yield from flat.held()
    yield from ((kinds.WEIGHTS, tensor) for tensor in optimizer.held())
    yield from ((kinds.COPIES, tensor) for tensor in copies.held())
    yield from ((kinds.WEIGHT_INPUTS, tensor) for tensor in engine.weights.held())
    yield from ((kinds.MESSAGES, tensor) for tensor in engine.step.messages())
    yield from ((kinds.CHUNK_INPUTS, tensor) for tensor in engine.step.chunk_inputs.values())
