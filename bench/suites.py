"""What is compared: the model, the ways to train it, and what ours aims at.

Every step of every variant takes the same 16 sequences, in micro-batches of 2: 8 of them, or 4 at each of two processes
that share the text. Forwards of 2, 4 and 8 sequences take the same time for each, of one 9% more (bf16: of 8 12% less
than of 2). So FSDP2 takes all 8 at once where that saves gathers or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.variant import Variant

MODEL: dict[str, Any] = {"layers": 8, "dim": 256, "heads": 4, "seq_len": 256}  # 6.6M parameters; text as bytes
TINY: dict[str, Any] = {"layers": 8, "dim": 128, "heads": 4, "seq_len": 128}  # 1.7M, for --quick
TRAIN: dict[str, Any] = {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, "steps": 1_000_000, "clip_norm": 1.0}


@dataclass(frozen=True)
class Aim:
    """What ``ours`` is to reach against the best of ``peers``: be ``least`` times as fast (``speed``), take at most
    1 / ``least`` of its peak memory (``memory``), or take less by ``least`` times the unsharded gradients of all chunks
    of a stage but one (``gradients``).
    """

    ours: str
    peers: tuple[str, ...]
    least: float
    what: str = "speed"


@dataclass(frozen=True)
class Suite:
    """Variants that run in the same rounds, and the one that the others are put in relation to."""

    name: str
    title: str
    limit: str
    variants: Sequence[Variant]
    aims: Sequence[Aim]
    tolerance: float = 1e-4  # relative, between losses


def _layout(P: int = 1, V: int = 1, F: int = 1, N: int = 8, b: int = 2, **more: Any) -> dict[str, Any]:
    return {"stages": P, "chunks": V, "shards": F, "microbatches": N, "microbatch_size": b, **more}


def _pipelining(name: str, schedule: str, layout: dict[str, Any], **more: Any) -> Variant:
    return Variant(name, "pipelining", layout, schedule=schedule, **more)


HALF = _layout(F=2, N=4)
WHOLE_HALF = _layout(F=2, N=1, b=8)  # in one forward
PIPE, LOOPED = _layout(P=2), _layout(P=2, V=2)
GRID, LOOPED_GRID = _layout(P=2, F=2, N=4), _layout(P=2, V=2, F=2, N=4)

LEAN = {"unit": 2, "memory_limit": 1.5}  # the least unit of two stages, and the least live activations for it

DDP = Variant("DDP", "ddp", HALF)

SINGLE = Suite(
    "single",
    "One process, and what two cores can do",
    "DDP",
    [
        Variant("plain", "plain", _layout()),
        Variant("two independent", "plain", HALF, checked=False),
        DDP,
        Variant("ours P1", "ours", _layout()),
    ],
    [Aim("ours P1", ("plain",), 0.97)],
)

_PIPELINES = [
    _pipelining("GPipe", "GPipe", PIPE),
    _pipelining("1F1B", "1F1B", PIPE),
    _pipelining("interleaved 1F1B", "Interleaved1F1B", LOOPED),
    _pipelining("interleaved zero bubble", "InterleavedZeroBubble", LOOPED),
    _pipelining("ZB-V", "ZBVZeroBubble", LOOPED),
]


def _names(variants: Sequence[Variant]) -> tuple[str, ...]:
    return tuple(variant.name for variant in variants)


PIPELINE = Suite(
    "pipeline",
    "Pipelines of two stages, two processes",
    "DDP",
    [DDP, *_PIPELINES, Variant("ours P2V2", "ours", LOOPED), Variant("ours P2V2 lean", "ours", {**LOOPED, **LEAN})],
    [
        Aim("ours P2V2", _names(_PIPELINES), 1.05),
        Aim("ours P2V2", ("DDP",), 0.95),
        Aim("ours P2V2 lean", _names(_PIPELINES), 1.05),
        Aim("ours P2V2 lean", ("DDP",), 0.95),
        Aim("ours P2V2 lean", _names(_PIPELINES), 1.0, "memory"),
    ],
)

SHARDED = Suite(
    "sharded",
    "Parameters sharded over two processes",
    "DDP",
    [
        DDP,
        Variant("FSDP2 resharded", "fsdp2", WHOLE_HALF, reshard=True),
        Variant("FSDP2 kept", "fsdp2", HALF),
        Variant("ours V1F2", "ours", _layout(F=2, N=4, reduce="step")),  # all parameters resident in the step
        Variant("ours V2F2", "ours", _layout(V=2, F=2, N=4)),  # half of them
    ],
    [
        Aim("ours V1F2", ("FSDP2 resharded",), 1.25),
        Aim("ours V1F2", ("FSDP2 resharded", "FSDP2 kept"), 1.1),
        Aim("ours V1F2", ("DDP",), 0.93),
        Aim("ours V2F2", ("FSDP2 resharded",), 1.25),
        Aim("ours V2F2", ("FSDP2 resharded", "FSDP2 kept"), 1.1),
        Aim("ours V2F2", ("DDP",), 0.93),
    ],
)

# Zero-bubble schedules run with parameters kept alone: with a split backward, a stage that is resharded trains wrongly.
_KEPT = [
    _pipelining("1F1B + FSDP2 kept", "1F1B", GRID),
    _pipelining("interleaved 1F1B + FSDP2 kept", "Interleaved1F1B", LOOPED_GRID),
    _pipelining("interleaved zero bubble + FSDP2 kept", "InterleavedZeroBubble", LOOPED_GRID),
    _pipelining("ZB-V + FSDP2 kept", "ZBVZeroBubble", LOOPED_GRID),
]
_RESHARDED = [
    _pipelining("1F1B + FSDP2 resharded", "1F1B", GRID, reshard=True),
    _pipelining("interleaved 1F1B + FSDP2 resharded", "Interleaved1F1B", LOOPED_GRID, reshard=True),
]
_ONE_CHUNK = _pipelining("interleaved 1F1B + FSDP2 one chunk", "Interleaved1F1B", LOOPED_GRID, resident=1)

HYBRID = Suite(
    "hybrid",
    "Two stages of two shards, four processes",
    "DDP",
    [
        DDP,
        *_KEPT,
        *_RESHARDED,
        _ONE_CHUNK,
        Variant("ours P2V2F2", "ours", LOOPED_GRID),
        Variant("ours P2V2F2 lean", "ours", {**LOOPED_GRID, **LEAN}),
    ],
    [
        Aim("ours P2V2F2", _names(_KEPT), 1.05),
        Aim("ours P2V2F2", _names(_RESHARDED), 1.3),
        Aim("ours P2V2F2 lean", _names(_KEPT), 1.05),
        Aim("ours P2V2F2 lean", _names(_RESHARDED), 1.3),
        Aim("ours P2V2F2 lean", _names(_KEPT), 1.0, "memory"),
        Aim("ours P2V2F2 lean", _names(_RESHARDED), 1.0, "memory"),
        Aim("ours P2V2F2 lean", ("interleaved 1F1B + FSDP2 kept",), 1.0, "gradients"),
    ],
)

RECOMPUTE = Suite(
    "recompute",
    "Activations made again in the backward, two stages, two processes",
    "DDP",
    [
        DDP,
        _pipelining("1F1B checkpointed", "1F1B", PIPE, recompute="full"),
        _pipelining("interleaved 1F1B checkpointed", "Interleaved1F1B", LOOPED, recompute="full"),
        _pipelining("interleaved 1F1B checkpointed but last", "Interleaved1F1B", LOOPED, recompute="but last"),
        _pipelining("interleaved zero bubble checkpointed", "InterleavedZeroBubble", LOOPED, recompute="full"),
        Variant("ours P2V2 full", "ours", {**LOOPED, "recompute": "full"}),
        Variant("ours P2V2 selective", "ours", {**LOOPED, "recompute": "selective"}),
    ],
    [
        Aim("ours P2V2 full", ("interleaved 1F1B checkpointed",), 1.08),
        Aim("ours P2V2 selective", ("interleaved 1F1B checkpointed",), 1.2),
        Aim("ours P2V2 full", ("interleaved zero bubble checkpointed",), 2.5),
    ],
)

_BF16_PIPELINES = [
    _pipelining("1F1B bf16", "1F1B", PIPE, bfloat16="masters"),
    _pipelining("interleaved 1F1B bf16", "Interleaved1F1B", LOOPED, bfloat16="masters"),
    _pipelining("interleaved zero bubble bf16", "InterleavedZeroBubble", LOOPED, bfloat16="masters"),
    _pipelining("ZB-V bf16", "ZBVZeroBubble", LOOPED, bfloat16="masters"),
    _pipelining("1F1B autocast", "1F1B", PIPE, bfloat16="autocast"),
]
_BF16_SHARDED = [
    Variant("FSDP2 bf16 resharded", "fsdp2", WHOLE_HALF, reshard=True, bfloat16="policy"),
    Variant("FSDP2 bf16 kept", "fsdp2", WHOLE_HALF, bfloat16="policy"),
]

BF16 = Suite(
    "bf16",
    "bf16 compute with fp32 masters, two processes",
    "DDP bf16",
    [
        Variant("plain bf16", "plain", _layout(), bfloat16="masters"),
        Variant("DDP bf16", "ddp", WHOLE_HALF, bfloat16="autocast"),
        *_BF16_PIPELINES,
        *_BF16_SHARDED,
        Variant("ours P2V2 bf16", "ours", LOOPED, {"dtype": "bfloat16"}),
        Variant("ours V2F2 bf16", "ours", _layout(V=2, F=2, N=4), {"dtype": "bfloat16"}),
    ],
    [
        Aim("ours P2V2 bf16", _names(_BF16_PIPELINES), 1.05),
        Aim("ours P2V2 bf16", _names(_BF16_SHARDED), 1.4),
    ],
    tolerance=1e-2,
)

SUITES = {suite.name: suite for suite in (SINGLE, PIPELINE, SHARDED, HYBRID, RECOMPUTE, BF16)}
