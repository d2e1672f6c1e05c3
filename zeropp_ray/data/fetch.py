"""A token store at a URI is read from a copy on this node: fetched once, whole, and mapped by all that read it.

Copies are told apart by their checksums: one that was fetched is never another store than the URI names now. Nothing
removes them: the folder ``data.cache`` may be emptied while no run reads from it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zeropp_ray.data.store import MANIFEST, TOKENIZER, Part, Store, open_store
from zeropp_ray.errors import ConfigError
from zeropp_ray.files import expanded
from zeropp_ray.uri import Place, UriPath

TELL_S = 5.0
_BLOCK = 1 << 22


def here(where: Place, cache: str) -> Path:
    """The folder of a token store on this node: itself, or the copy of the one at a URI."""
    return where if isinstance(where, Path) else fetched(where, cache)


def fetched(uri: UriPath, cache: str) -> Path:
    """The folder on this node, below ``cache``, that holds the token store at ``uri``. Many may ask at once.

    Raises ConfigError if there is none, what comes is not what its manifest says, or the disk has no room for it.
    """
    store = open_store(uri)
    text = (uri / MANIFEST).read_text()
    folder = expanded(cache, f"data.cache = {cache!r}") / f"store-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # who comes later finds it there
            if not folder.is_dir():
                _fetch(store, uri, text, folder)
    except OSError as error:
        raise ConfigError(
            f"data.cache = {cache!r}: no copy of {uri} can be put there: {error.strerror or error}; choose a folder "
            "with room for it"
        ) from None
    return folder


def _fetch(store: Store, uri: UriPath, text: str, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
    partial.mkdir()
    try:
        tell = _teller(uri, sum(part.bytes for part in store.manifest.parts))
        for part in store.manifest.parts:
            _fetch_part(uri, part, partial / part.file, tell)
        if store.tokenizer_file is not None:
            data = (uri / TOKENIZER).read_bytes()
            _check(uri, TOKENIZER, hashlib.sha256(data).hexdigest(), store.manifest.tokenizer)
            (partial / TOKENIZER).write_bytes(data)
        (partial / MANIFEST).write_text(text, encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch_part(uri: UriPath, part: Part, to: Path, tell: Callable[[int], None]) -> None:
    digest = hashlib.sha256()
    with (uri / part.file).open() as source, to.open("wb") as target:
        while block := source.read(_BLOCK):
            digest.update(block)
            target.write(block)
            tell(len(block))
        target.flush()
        os.fsync(target.fileno())
    _check(uri, part.file, digest.hexdigest(), part.sha256)


def _check(uri: UriPath, name: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ConfigError(f"{uri}: damaged, {name} has been altered: its checksum differs; copy the store again")


def _teller(uri: UriPath, total: int) -> Callable[[int], None]:
    """Says now and then how far it is, if it takes long."""
    done, told = 0, time.monotonic()

    def tell(more: int) -> None:
        nonlocal done, told
        done += more
        if time.monotonic() - told >= TELL_S:
            told = time.monotonic()
            print(f"fetching {uri}: {done / 1e9:.1f} of {total / 1e9:.1f} GB", file=sys.stderr)

    return tell
