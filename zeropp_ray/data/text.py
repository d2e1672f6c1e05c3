"""Text outside of training: the tokenizer of a run, and a text to evaluate on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from zeropp_ray.config import ParallelSection, RunConfig
from zeropp_ray.data.corpus import load_corpus, read_raw
from zeropp_ray.data.fetch import here
from zeropp_ray.data.store import TOKENIZER, Tokens, is_store, open_store
from zeropp_ray.data.tokenizer import BYTES, ByteTokenizer, FileTokenizer, Tokenizer
from zeropp_ray.errors import ConfigError
from zeropp_ray.uri import Place, place

_BESIDE = "tokenizer_config.json"  # where Hugging Face folders name the token that ends a text


def tokenizer_of(config: RunConfig, run: Place) -> tuple[Tokenizer, Place | None]:
    """What made the text of the run in folder `run` into tokens, and its `tokenizer.json`: that of the run's store, or
    the run's copy of it; None for bytes.

    `ConfigError` if both are gone, or others than the run's.
    """
    wanted = config.data.tokenizer or BYTES
    if wanted == BYTES:
        return ByteTokenizer(), None
    try:
        store = open_store(place(config.data.path))
        return _checked(store.path / TOKENIZER, store.manifest.end_token, wanted)
    except ConfigError:  # the store is gone, moved, damaged, or another one by now
        return _checked(run / TOKENIZER, _end_token(run / _BESIDE), wanted)


def _checked(file: Place, end_token: str, wanted: str) -> tuple[Tokenizer, Place]:
    found = FileTokenizer(file, end_token)
    if found.identity != wanted:
        raise ConfigError(f"{file}: another tokenizer than the run's, whose SHA-256 is {wanted}")
    return found, file


def keep_tokenizer(config: RunConfig, run: Path) -> None:
    """Copy the tokenizer of the run's store to the run's folder, so that the run can be read without its data."""
    tokenizer, file = tokenizer_of(config, run)
    if file is not None and file.parent != run:
        (run / TOKENIZER).write_bytes(file.read_bytes())
        (run / _BESIDE).write_text(json.dumps({"eos_token": tokenizer.end_token}) + "\n", encoding="utf-8")


def _end_token(path: Place) -> str:
    """What `tokenizer_config.json` says that ends a text; empty if it does not say."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["eos_token"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class Text(NamedTuple):
    """Tokens to evaluate on, and where they came from in words."""

    tokens: Tokens
    source: str
    bytes: bool  # a token is a byte


def text_of(config: RunConfig, path: str = "", split: str = "validation") -> Text:
    """The text at `path` as a run with `config` would read it, else the run's own held-out part.

    Raw text is taken whole; of a token store, `split`. `ConfigError` if it cannot be read, or its tokens are not those
    of the run.
    """
    if not path:
        one = ParallelSection(stages=1, chunks=1, shards=1, microbatches=1, microbatch_size=1)  # no step has to fit
        corpus = load_corpus(replace(config, parallel=one, train=replace(config.train, tokens_per_step=0)))
        tokens = corpus.validation if split == "validation" else corpus.train
        return Text(tokens, f"{split} part of {corpus.source}", corpus.tokenizer == BYTES)
    wanted = config.data.tokenizer or BYTES
    where = place(path)
    if is_store(where):
        store = open_store(here(where, config.data.cache))
        tokens, identity, source = store.split(split), store.manifest.tokenizer, f"{split} part of {path}"
    else:
        tokens, identity, source = read_raw(path), BYTES, path
    if identity != wanted:
        made = "raw text is read as bytes" if identity == BYTES else "it was made into tokens otherwise"
        raise ConfigError(f"{path}: {made}, and the run's tokenizer is another; prepare it with zeropp data prepare")
    return Text(tokens, source, identity == BYTES)
