"""The text that a run trains on: raw, read as bytes, or a token store. Its end or part is held out for validation."""

from __future__ import annotations

import math
import pydoc_data.topics
from typing import NamedTuple

import numpy as np

from zeropp_ray.config import RunConfig
from zeropp_ray.data.fetch import here
from zeropp_ray.data.store import Tokens, is_store, open_store
from zeropp_ray.data.tokenizer import BYTES
from zeropp_ray.errors import ConfigError
from zeropp_ray.files import files_in
from zeropp_ray.uri import Place, UriPath, place


class Corpus(NamedTuple):
    """The two parts of a text as rows of tokens, and where it came from in words.

    Parts are numpy arrays or, of a store, read like those: ``len(part)``, ``part[a:b]``, ``part[places]``.
    """

    train: Tokens
    validation: Tokens
    source: str
    vocabulary: int = 256
    """Tokens are below this."""
    tokenizer: str = BYTES
    """Identity of the tokenizer."""
    unit: str = "bytes"
    """What a token is called."""
    checksum: str = ""
    """Of all tokens, where a token store has one; empty: raw text."""

    @property
    def label(self) -> str:
        """Source and sizes, in words."""
        return f"{self.source}: {len(self.train):,} {self.unit}, and {len(self.validation):,} held out"


def load_corpus(config: RunConfig, vocabulary: int | None = None) -> Corpus:
    """Read ``data.path``: the built-in text, a text file, a folder of them, or a token store.

    Of raw text the last ``data.validation_fraction`` is held out; a store brings its own held-out part. ``vocabulary``
    is how many tokens the model's head tells apart, where that is known.

    Raises ``ConfigError`` for a path that is missing, damaged, empty or too short for one step and one held-out
    sequence, for text made into tokens otherwise than the run's, and for a model that cannot tell its tokens apart.
    """
    where = place(config.data.path, f"data.path = {config.data.path!r}")
    corpus = _store(config, where) if config.data.path and is_store(where) else _text(config)
    _check_tokens(config, corpus, vocabulary)
    return corpus


def _check_tokens(config: RunConfig, corpus: Corpus, vocabulary: int | None) -> None:
    model, data, need = config.model, config.data, corpus.vocabulary
    raw = corpus.tokenizer == BYTES
    made = "text is read as bytes" if raw else f"data.path = {data.path!r} holds tokens up to {need - 1}"
    if not model.factory and model.vocab_size < need:
        raise ConfigError(f"model.vocab_size = {model.vocab_size}: {made}; use {need} or more")
    if vocabulary is not None and vocabulary < need:
        raise ConfigError(
            f"model.factory = {model.factory!r}: its head tells {vocabulary} tokens apart; {made}, so "
            f"make it {need} or more"
        )
    if data.tokenizer not in ("", corpus.tokenizer):
        raise ConfigError(
            f"data.path = {data.path!r}: its tokens are {_named(corpus.tokenizer)}, and the run's are "
            f"{_named(data.tokenizer)} (data.tokenizer); prepare the text again with the tokenizer of the run"
        )


def _named(tokenizer: str) -> str:
    return "bytes" if tokenizer == BYTES else f"of the tokenizer {tokenizer[:12]}…"


def _store(config: RunConfig, where: Place) -> Corpus:
    try:
        store = open_store(here(where, config.data.cache))
    except ConfigError as error:
        raise ConfigError(f"data.path = {config.data.path!r}: {error}") from None
    train, validation, manifest = store.split("train"), store.split("validation"), store.manifest
    need_train, need_validation = _needed(config)
    if len(train) < need_train or len(validation) < need_validation:
        raise ConfigError(
            f"data.path = {config.data.path!r}: {len(train)} tokens, and {len(validation)} held out, are too short; a "
            f"step of {config.parallel.global_batch} sequences of model.seq_len = {config.model.seq_len} needs "
            f"{need_train}, and a held-out sequence {need_validation}; prepare more text, or hold out more of it"
        )
    unit = "bytes" if manifest.tokenizer == BYTES else "tokens"
    return Corpus(
        train,
        validation,
        str(where),
        vocabulary=manifest.vocabulary,
        tokenizer=manifest.tokenizer,
        unit=unit,
        checksum=manifest.checksum,
    )


def _text(config: RunConfig) -> Corpus:
    data = config.data
    if data.path:
        text, source = read_raw(data.path, f"data.path = {data.path!r}"), data.path
    else:
        text, source = np.frombuffer(embedded_text(), dtype=np.uint8), "Python's documentation"
    need_train, need_validation = _needed(config)
    # Of the whole text, because both parts are cut from it.
    need = math.ceil(need_train / (1 - data.validation_fraction)), math.ceil(need_validation / data.validation_fraction)
    if len(text) < max(need):
        raise ConfigError(
            f"data.path = {data.path!r}: {len(text)} bytes are too short; a step of {config.parallel.global_batch} "
            f"sequences of model.seq_len = {config.model.seq_len} needs {need[0]}, and a held-out sequence in "
            f"data.validation_fraction = {data.validation_fraction:g} of the text needs {need[1]}"
        )
    cut = len(text) - int(len(text) * data.validation_fraction)
    return Corpus(text[:cut], text[cut:], source)


def _needed(config: RunConfig) -> tuple[int, int]:
    """Least tokens of the two parts. One sequence more than a step takes: the windows of an epoch are shifted."""
    seq_len = config.model.seq_len
    return (config.parallel.global_batch + 1) * seq_len + 1, seq_len + 1


def read_raw(path: str, named: str = "") -> np.ndarray:
    """The bytes of a text file, or of all files of a folder with blank lines between, uint8.

    Raises ConfigError that begins with ``named``, or else the path, if there is nothing to read.
    """
    file, named = place(path, named), named or path
    if isinstance(file, UriPath):
        raise ConfigError(
            f"{named}: no token store is there, and raw text is read from disks; make one with zeropp data prepare"
        )
    try:
        if file.is_dir():
            files = files_in(file)
            if not files:
                raise ConfigError(f"{named}: a folder without files; name a text file or a folder of them")
            text = np.frombuffer(b"\n\n".join(f.read_bytes() for f in files), dtype=np.uint8)
        elif file.is_file():
            # Mapped, not read: the members of a node share one copy.
            text = np.memmap(file, dtype=np.uint8, mode="r") if file.stat().st_size else np.zeros(0, dtype=np.uint8)
        else:
            raise ConfigError(f"{named}: no such file or folder; name one, or leave it empty for the built-in text")
    except OSError as error:
        raise ConfigError(f"{named}: cannot be read: {error.strerror}") from error
    if not len(text):
        raise ConfigError(f"{named}: empty; name a text file or a folder of them")
    return text


def embedded_text() -> bytes:
    """Python's own documentation, which every CPython carries: the topics in sorted order, blank lines between."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
