"""What `zeropp data prepare` reads: files and folders, cut in slices that are read side by side, each in small pieces.

A text file is one document. A line of JSON Lines, or a row of Parquet, is one, in a column that is named. Text files
and JSON Lines may be compressed with gzip or zstd. No more than a piece (or one line) is in memory at a time.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from zeropp_ray.errors import ConfigError
from zeropp_ray.files import expanded, files_in

PIECE = 1 << 18
"""Longest text that is tokenized at once, in bytes or characters. A longer document is cut after a line end; tokens of
merging tokenizers may differ there from those of the whole."""
HEAD = 1 << 16  # bytes at the start of a document by which it is told from others
ROWS = 64  # of Parquet, read at once
_CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")


class Slice(NamedTuple):
    """A part of a file that can be read on its own."""

    path: Path
    kind: str  # text, lines or parquet
    codec: str  # "", gzip or zstd; what is compressed is one slice
    begin: int  # bytes, in Parquet row groups
    end: int
    bytes: int  # of the file, for progress and for dividing the work
    last: bool  # the file ends with it


class Piece(NamedTuple):
    """Some text of a document."""

    text: str
    head: bytes  # the start of the document, by which it is told from others; the same in all its pieces; b"": empty
    last: bool  # the document ends with it
    bytes: int  # of the text in UTF-8
    read: int  # bytes of the slice's file read so far


def list_files(sources: Sequence[str | Path]) -> list[Path]:
    """The files that sources name, those of a folder in the order of their names; hidden ones are left out."""
    found: list[Path] = []
    for source in sources:
        path = expanded(source)
        if path.is_dir():
            files = files_in(path)
            if not files:
                raise ConfigError(f"{path}: a folder without files; name a file, or a folder of them")
            found += files
        elif path.exists():
            found.append(path)
        else:
            raise ConfigError(f"{path}: no such file or folder")
    return found


def cut(files: Sequence[Path], column: str, size: int) -> list[Slice]:
    """Slices of about ``size`` bytes, in order. Raises ConfigError for a Parquet file without text in ``column``."""
    slices: list[Slice] = []
    for path in files:
        try:
            slices += _cut_file(path, column, size)
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(path, error) from None
    return slices


def _cut_file(path: Path, column: str, size: int) -> Iterator[Slice]:
    suffix, codec = path.suffix.lower(), _CODECS.get(path.suffix.lower(), "")
    if codec:
        suffix = path.with_suffix("").suffix.lower()
    length = path.stat().st_size
    if suffix in _PARQUET:
        if codec:
            raise ConfigError(f"{path}: Parquet is compressed inside; unpack it first")
        yield from _cut_parquet(path, column, size)
    elif length:
        kind = "lines" if suffix in _LINES else "text"
        bounds = [0, length] if codec else [0, *_line_starts(path, length, size, kind == "lines"), length]
        for begin, end in itertools.pairwise(bounds):
            yield Slice(path, kind, codec, begin, end, end - begin, end == length)


def _line_starts(path: Path, length: int, size: int, whole_lines: bool) -> Iterator[int]:
    """Where to cut: about every ``size`` bytes, after a line end. Text without one nearby is cut between characters."""
    last = 0
    with path.open("rb") as file:
        for near in range(size, length - size // 2, size):
            file.seek(near)
            line = file.readline(-1 if whole_lines else PIECE)
            if whole_lines or line.endswith(b"\n"):
                place = near + len(line)
            else:
                place = near + next((i for i, byte in enumerate(line[:4]) if byte & 0xC0 != 0x80), 0)
            if last < place < length:
                yield place
                last = place


def _cut_parquet(path: Path, column: str, size: int) -> Iterator[Slice]:
    with pq.ParquetFile(path) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
        texts = [field.name for field in schema if _is_text(field.type)]
        choose = f"choose one with --column: {', '.join(texts)}" if texts else "it holds no text"
        if column not in schema.names:
            raise ConfigError(f"{path}: no column {column!r}; its columns are {', '.join(schema.names)}; {choose}")
        if column not in texts:
            kind = schema.field(column).type
            raise ConfigError(f"{path}: the column {column!r} holds {kind}, not text; {choose}")
        if not rows:
            raise ConfigError(f"{path}: an empty Parquet file, of no rows; leave it out")
        # Row groups are weighed by rows: of the file, so that progress is in the same bytes everywhere.
        counts = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    length, begin, weight = path.stat().st_size, 0, 0
    for i, count in enumerate(counts):
        weight += length * count // rows
        if weight >= size or i == len(counts) - 1:
            yield Slice(path, "parquet", "", begin, i + 1, weight, i == len(counts) - 1)
            begin, weight = i + 1, 0


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def read(part: Slice, column: str) -> Iterator[Piece]:
    """The text of a slice. Raises ConfigError for what is no text, with file and place."""
    reader = {"text": _read_text, "lines": _read_lines, "parquet": _read_parquet}[part.kind]
    try:
        yield from reader(part, column)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(part.path, error) from None


def _read_text(part: Slice, column: str) -> Iterator[Piece]:
    with part.path.open("rb") as raw:
        stream = _unpacked(raw, part.codec)
        head = b"" if part.codec else stream.read(HEAD)
        place, rest = part.begin, b""
        if not part.codec:
            stream.seek(place)
        while block := stream.read(PIECE if part.codec else min(PIECE, part.end - place - len(rest))):
            head = head or block[:HEAD]
            text = rest + block
            stop = text.rfind(b"\n") + 1 or _between_characters(text)
            yield Piece(_decoded(text[:stop], part.path, place), head, False, stop, raw.tell() - part.begin)
            place, rest = place + stop, text[stop:]
        if head:  # else it was empty after all
            yield Piece(_decoded(rest, part.path, place), head, part.last, len(rest), raw.tell() - part.begin)


def _between_characters(text: bytes) -> int:
    """Before the last character, which may be cut."""
    return next((i for i in range(len(text) - 1, max(len(text) - 5, 0), -1) if text[i] & 0xC0 != 0x80), len(text))


def _decoded(text: bytes, path: Path, place: int) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: invalid UTF-8 at byte {place + error.start}; convert it, for example with iconv -f latin1 -t utf8"
        ) from None


def _read_lines(part: Slice, column: str) -> Iterator[Piece]:
    with part.path.open("rb") as raw:
        stream = _unpacked(raw, part.codec)
        place = part.begin
        if not part.codec:
            stream.seek(place)
        for line in stream:
            if line.strip():
                text = _field(line, column, part.path, place)
                yield from _document(text, raw.tell() if part.codec else place + len(line) - part.begin)
            place += len(line)
            if not part.codec and place >= part.end:
                break


def _field(line: bytes, column: str, path: Path, place: int) -> str:
    """The text in a line of JSON; empty for null."""
    text = _decoded(line, path, place)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: the line at byte {place} is not JSON: {error}; expected JSON Lines") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: the line at byte {place} is not a JSON object with a {column!r}")
    if column not in values:
        texts = [name for name, value in values.items() if isinstance(value, str)]
        raise ConfigError(
            f"{path}: the line at byte {place} has no {column!r}; it has {', '.join(values) or 'nothing'}; "
            f"choose one with --column{': ' + ', '.join(texts) if texts else ''}"
        )
    value = values[column]
    if value is not None and not isinstance(value, str):
        texts = [name for name, value in values.items() if isinstance(value, str)]
        raise ConfigError(
            f"{path}: {column!r} of the line at byte {place} holds {json.dumps(value)[:40]}, not text; "
            + (f"choose one with --column: {', '.join(texts)}" if texts else "no other holds text")
        )
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{path}: {column!r} of the line at byte {place} holds half a surrogate pair, at character {error.start}"
        ) from None
    return value or ""


def _read_parquet(part: Slice, column: str) -> Iterator[Piece]:
    with pq.ParquetFile(part.path, memory_map=True) as file:
        groups = range(part.begin, part.end)
        rows = sum(file.metadata.row_group(i).num_rows for i in groups)
        row = sum(file.metadata.row_group(i).num_rows for i in range(part.begin))
        first = row
        for batch in file.iter_batches(batch_size=ROWS, row_groups=list(groups), columns=[column]):
            try:
                texts = batch.column(0).to_pylist()
            except UnicodeDecodeError:
                raise ConfigError(
                    f"{part.path}: invalid UTF-8 in column {column!r}, in rows {row} to {row + len(batch) - 1}"
                ) from None
            row += len(batch)
            for text in texts:
                yield from _document(text or "", part.bytes * (row - first) // rows)


def _document(text: str, read: int) -> Iterator[Piece]:
    head, begin = text[:HEAD].encode()[:HEAD], 0
    while len(text) - begin > PIECE:
        stop = text.rfind("\n", begin, begin + PIECE) + 1 or begin + PIECE
        yield _piece(text[begin:stop], head, False, read)
        begin = stop
    yield _piece(text[begin:], head, True, read)


def _piece(text: str, head: bytes, last: bool, read: int) -> Piece:
    return Piece(text, head, last, len(text) if text.isascii() else len(text.encode()), read)


def _unpacked(raw: BinaryIO, codec: str) -> BinaryIO:
    if not codec:
        return raw
    packed = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)
    return cast(BinaryIO, io.BufferedReader(packed, PIECE))


def _unreadable(path: Path, error: Exception) -> ConfigError:
    text = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    return ConfigError(f"{path}: cannot be read: {text}")
