"""What may change when a run goes on, and what may not."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zeropp_ray.checkpoint.reader import Checkpoint
from zeropp_ray.config import RunConfig, overridden
from zeropp_ray.data.corpus import Corpus
from zeropp_ray.errors import ConfigError

_SAMPLED = 1 << 20  # elements of the text that are hashed at its start, middle and end


def resumed(checkpoint: Checkpoint, overrides: Sequence[str]) -> RunConfig:
    """The configuration to go on with: the checkpoint's, with ``section.key=value`` overrides.

    Settings of ``parallel`` and the number of steps may change; a step must still take as many sequences.
    Raises ConfigError with a list of what differs otherwise.
    """
    values = {name: dict(section) for name, section in checkpoint.manifest.config.items()}
    changed = {override.partition("=")[0].strip() for override in overrides}
    automatic = set[str]()
    if changed & {"parallel.recompute", "parallel.unit"}:
        automatic.add("parallel.memory_limit")
    if changed & {
        f"parallel.{name}"
        for name in ("stages", "chunks", "microbatches", "microbatch_size", "shards", "replicas", "policy")
    }:
        automatic |= {"parallel.unit", "parallel.memory_limit"}  # were resolved for the old layout
        if values["train"].get("tokens_per_step"):
            automatic.add("parallel.microbatches")  # follow from the budget
    for name in automatic - changed:
        values["parallel"][name.partition(".")[2]] = 0
    if changed & {f"parallel.{name}" for name in ("stages", "chunks", "microbatch_size", "shards", "zero1")}:
        values["parallel"]["costs"] = ""  # were measured for other chunks, or other exchanges
    config = overridden(values, overrides).resolved()
    was = checkpoint.config.resolved()
    differs = _differences("model", was.model, config.model)
    differs += _differences("run", was.run, config.run, "seed", "name", "dir")
    differs += _differences("train", was.train, config.train, "dtype")
    if config.parallel.global_batch != was.parallel.global_batch:
        differs.append(
            f"sequences per step: {was.parallel.global_batch} there, {config.parallel.global_batch} here "
            "(microbatches x microbatch_size x shards x replicas must stay equal)"
        )
    if differs:
        raise ConfigError(f"--resume {checkpoint.path}: cannot go on with another run: {'; '.join(differs)}")
    if config.train.steps <= checkpoint.step:
        raise ConfigError(
            f"--resume {checkpoint.path}: all {config.train.steps} steps are done; "
            f"go on with --set train.steps={checkpoint.step * 2 or 1}"
        )
    return config


def _differences(section: str, was: Any, now: Any, *names: str) -> list[str]:
    chosen = names or tuple(vars(was))
    return [
        f"{section}.{name}: {getattr(was, name)!r} there, {getattr(now, name)!r} here"
        for name in chosen
        if getattr(was, name) != getattr(now, name)
    ]


def check_same_parameters(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], frozen: Collection[str] | None = None
) -> None:
    """ConfigError with a list of what differs unless the model has the checkpoint's parameters, by name and shape.

    ``frozen``: the model's parameters without moments, to be the checkpoint's too; None: weights alone are read.
    """
    saved = checkpoint.manifest.shapes
    differs = [f"{name} is new" for name in shapes if name not in saved]
    differs += [f"{name} is gone" for name in saved if name not in shapes]
    differs += [
        f"{name} was {list(saved[name])} and is {list(shape)}"
        for name, shape in shapes.items()
        if name in saved and saved[name] != tuple(shape)
    ]
    if frozen is not None:
        differs += [
            f"{name} was trained and is frozen" if name in frozen else f"{name} was frozen and is trained"
            for name in shapes
            if name in saved and checkpoint.trained(name) == (name in frozen)
        ]
    if differs:
        more = f" and {len(differs) - 8} more" if len(differs) > 8 else ""
        raise ConfigError(
            f"{checkpoint.path}: the model has changed: {'; '.join(differs[:8])}{more}; bring its code back to what it "
            "was, or train anew"
        )


def identity_of(corpus: Corpus) -> dict[str, Any]:
    """What tells a text from another: lengths, and the checksum of a token store, or one over the start, middle and end
    of raw text.
    """
    digest = hashlib.sha256(corpus.checksum.encode())
    for text in () if corpus.checksum else (corpus.train, corpus.validation):
        for start in (0, max(0, len(text) // 2 - _SAMPLED // 2), max(0, len(text) - _SAMPLED)):
            digest.update(text[start : start + _SAMPLED].tobytes())
    return {
        "train_tokens": len(corpus.train),
        "validation_tokens": len(corpus.validation),
        "sha256": digest.hexdigest(),
    }


def check_same_data(checkpoint: Checkpoint, data: Mapping[str, Any]) -> None:
    """ConfigError if the text is another one: its samples would not continue the run's."""
    if dict(data) != checkpoint.manifest.data:
        raise ConfigError(
            f"{checkpoint.path}: the text has changed since: {checkpoint.manifest.data['train_tokens']} training "
            f"tokens there, {data['train_tokens']} here, or other ones; give the same text with --set data.path=…"
        )
