"""A token store: text made into tokens once, read by every run without a copy.

::

    DIR/
        manifest.json             what it holds, and sizes and checksums of its parts
        tokenizer.json            a copy of the tokenizer file; absent for bytes
        train-00000.arrow         Arrow IPC files of one column ``tokens``, in record batches of 2^20
        validation-00000.arrow

Documents lie one after another, each with an end token behind it: one long stream of tokens in the order of the
sources, which training cuts into windows. Parts are mapped when they are first read, so a store of any size opens at
once, and what was read is the system's to drop again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from zeropp_ray.data.tokenizer import BYTES
from zeropp_ray.errors import ConfigError
from zeropp_ray.files import check_inside, sha256_of
from zeropp_ray.uri import Place

VERSION = 1
FORMAT = "zeropp token store"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
COLUMN = "tokens"


class Tokens(Protocol):
    """A row of tokens that may be larger than memory: a numpy array, or :class:`Joined`."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: Any) -> np.ndarray:
        """A copy or view of a slice, or of the places in an integer array of any shape."""


@dataclass(frozen=True)
class Part:
    """One file."""

    file: str
    tokens: int
    documents: int  # that end in it
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Span:
    """Tokens of a part, from ``first`` on."""

    file: str
    first: int
    tokens: int


@dataclass(frozen=True)
class Manifest:
    format: str
    version: int
    dtype: str  # uint8, uint16 or uint32: the least that holds the vocabulary
    vocabulary: int
    tokenizer: str  # its identity: bytes, or the SHA-256 of tokenizer.json
    end: int  # the token behind each document
    end_token: str
    documents: int
    empty_documents: int  # left out
    tokens: int
    text_bytes: int  # of UTF-8
    held_out: str  # documents, or the end of the text
    sources: list[str]
    parts: list[Part]
    splits: dict[str, list[Span]]

    @property
    def checksum(self) -> str:
        """Of the tokens and their order: SHA-256 over those of the parts and where the splits lie in them."""
        values = asdict(self)
        content = [values[name] for name in ("dtype", "parts", "splits")]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ValueError, KeyError, TypeError or AttributeError if it is none, or one of a newer version."""
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}, not {FORMAT!r}")
        if values["version"] > VERSION:
            raise ValueError(
                f"version {values['version']} is newer than {VERSION}, which this program reads; update zeropp_ray, or "
                "prepare the data again"
            )
        parts = [Part(**part) for part in values.pop("parts")]
        check_inside(part.file for part in parts)
        splits = {name: [Span(**span) for span in spans] for name, spans in values.pop("splits").items()}
        return cls(parts=parts, splits=splits, **values)


class Joined:
    """Stretches of arrays end to end, as one array. Each array is opened when it is first read."""

    def __init__(self, spans: Sequence[tuple[int, int]], open: Callable[[int], Tokens], dtype: np.dtype) -> None:
        """``spans``: first element and length of the stretch of each array that ``open`` gives by its number."""
        firsts, lengths = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        self.dtype = dtype
        self._ends = np.cumsum(lengths)
        self._shifts = self._ends - lengths - firsts  # place here less place in the array
        self._firsts = firsts
        self._open = lru_cache(maxsize=None)(open)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, where: slice | np.ndarray) -> np.ndarray:
        """As numpy does, as a copy: ``[a:b]``, or ``[places]`` with an integer array of any shape, none negative."""
        if isinstance(where, slice):
            low, high, _ = where.indices(len(self))
            first, last = np.searchsorted(self._ends, [low, high - 1], side="right").tolist()
            found = [self._stretch(i, low, high) for i in range(first, last + 1)] if low < high else []
            return np.concatenate(found) if found else np.empty(0, self.dtype)
        piece_of = np.searchsorted(self._ends, where, side="right")
        out = np.empty(where.shape, self.dtype)
        for i in np.unique(piece_of).tolist():
            inside = piece_of == i
            out[inside] = self._open(i)[where[inside] - self._shifts[i]]
        return out

    def _stretch(self, i: int, low: int, high: int) -> np.ndarray:
        shift = int(self._shifts[i])
        return self._open(i)[max(low - shift, int(self._firsts[i])) : min(high, int(self._ends[i])) - shift]


class Store:
    """An open store. Its parts are there in their sizes; :meth:`verify` reads every byte."""

    def __init__(self, path: Place, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.dtype = np.dtype(manifest.dtype)
        self.tokenizer_file = None if manifest.tokenizer == BYTES else path / TOKENIZER

    def split(self, name: str) -> Joined:
        """The tokens of ``train`` or ``validation``."""
        spans, folder = self.manifest.splits[name], self.path
        assert isinstance(folder, Path), "what is mapped is on a disk, see fetch.py"
        return Joined(
            [(span.first, span.tokens) for span in spans],
            lambda i: _open_part(folder / spans[i].file, self.dtype),
            self.dtype,
        )

    def verify(self) -> list[str]:
        """What is wrong, in words; empty if every part has the bytes that were written."""
        wrong = [
            f"{part.file} has been altered: its checksum differs"
            for part in self.manifest.parts
            if sha256_of(self.path / part.file) != part.sha256
        ]
        if self.tokenizer_file and sha256_of(self.tokenizer_file) != self.manifest.tokenizer:
            wrong.append(f"{TOKENIZER} has been altered: its checksum differs")
        return wrong


def _open_part(path: Path, dtype: np.dtype) -> Tokens:
    """Map a part. Its record batches are views of the file."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [
            reader.get_batch(i).column(0).to_numpy(zero_copy_only=True) for i in range(reader.num_record_batches)
        ]
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; prepare the data again") from None
    if any(batch.dtype != dtype for batch in batches):
        raise ConfigError(f"{path}: holds {batches[0].dtype}, its manifest says {dtype}; prepare the data again")
    return batches[0] if len(batches) == 1 else Joined([(0, len(b)) for b in batches], batches.__getitem__, dtype)


def is_store(path: Place) -> bool:
    """Whether the folder ``path`` is a store or was one: a damaged one must not be taken for text."""
    try:
        with (path / MANIFEST).open("rb") as file:
            if FORMAT.encode() in file.read(200):
                return True
    except (OSError, ValueError):
        pass
    return any(path.glob("*.arrow"))


def open_store(path: Place) -> Store:
    """Open the store in folder ``path``.

    Raises ConfigError if it is none, of a newer version, or damaged as far as names and sizes tell.
    """
    try:
        manifest = Manifest.from_json((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no token store, {MANIFEST} is missing; make one with zeropp data prepare") from None
    except OSError as error:
        raise ConfigError(f"{path}: {MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {MANIFEST} cannot be used: {error}") from None
    for part in manifest.parts:
        try:
            size = (path / part.file).stat().st_size
        except OSError as error:
            raise ConfigError(
                f"{path}: damaged, {part.file}: {error.strerror}; copy the store again, or prepare the data again"
            ) from None
        if size != part.bytes:
            raise ConfigError(
                f"{path}: damaged, {part.file} has {size} bytes instead of {part.bytes}; copy the store again, or "
                "prepare the data again"
            )
    return Store(path, manifest)
