"""Byte-level text: reading it and holding out its end for validation."""

from __future__ import annotations

import math
import pydoc_data.topics
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError


class Corpus(NamedTuple):
    """The two parts of a text as uint8 arrays, and where it came from in words."""

    train: np.ndarray
    validation: np.ndarray
    source: str


def load_corpus(config: RunConfig, vocabulary: int | None = None) -> Corpus:
    """Read ``data.path`` and hold out the last ``data.validation_fraction`` of it.

    Raises ``ConfigError`` for a path that is missing, empty or too short for one step and one held-out sequence, and
    for a model that cannot tell the 256 bytes apart.
    """
    model, data = config.model, config.data
    if not model.factory and model.vocab_size < 256:
        raise ConfigError(f"model.vocab_size = {model.vocab_size}: text is read as bytes; use 256 or more")
    if vocabulary is not None and vocabulary < 256:
        raise ConfigError(
            f"model.factory = {model.factory!r}: its head tells {vocabulary} tokens apart; text is read as "
            "bytes, make it 256 or more"
        )
    text, source = _read(data.path)
    sequences, seq_len, fraction = config.parallel.global_batch, model.seq_len, data.validation_fraction
    # One sequence more than a step takes, because the windows of an epoch are shifted (sampler.SampleOrder).
    need_train = math.ceil((sequences + 1) * seq_len / (1 - fraction)) + 1
    need_validation = math.ceil((seq_len + 1) / fraction) + 1
    if len(text) < max(need_train, need_validation):
        raise ConfigError(
            f"data.path = {data.path!r}: {len(text)} bytes are too short; a step of {sequences} sequences of"
            f" model.seq_len = {seq_len} needs {need_train}, and a held-out sequence in"
            f" data.validation_fraction = {fraction:g} of the text needs {need_validation}"
        )
    cut = len(text) - int(len(text) * fraction)
    return Corpus(text[:cut], text[cut:], source)


def embedded_text() -> bytes:
    """Python's own documentation, which every CPython carries: the topics in sorted order, blank lines between."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _read(path: str) -> tuple[np.ndarray, str]:
    if not path:
        return np.frombuffer(embedded_text(), dtype=np.uint8), "Python's documentation"
    place = Path(path)
    try:
        if place.is_dir():
            files = sorted(f for f in place.rglob("*") if f.is_file() and not _hidden(f.relative_to(place)))
            if not files:
                raise ConfigError(f"data.path = {path!r}: a folder without files; name a text file or a folder of them")
            text = np.frombuffer(b"\n\n".join(f.read_bytes() for f in files), dtype=np.uint8)
        elif place.is_file():
            # Mapped, not read: the members of a node share one copy.
            text = np.memmap(place, dtype=np.uint8, mode="r") if place.stat().st_size else np.zeros(0, dtype=np.uint8)
        else:
            raise ConfigError(f"data.path = {path!r}: no such file or folder; leave it empty for the built-in text")
    except OSError as error:
        raise ConfigError(f"data.path = {path!r}: cannot be read: {error.strerror}") from error
    if not len(text):
        raise ConfigError(f"data.path = {path!r}: empty; name a text file or a folder of them")
    return text, path


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
