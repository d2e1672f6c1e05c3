"""Making a token store: slices of the sources are read, tokenized and written side by side, each to parts of its own.

Nothing but counts passes between processes, and each holds a few pieces of text and one record batch, so that memory
does not grow with the input. What is written depends on sources, tokenizer and split alone, not on the processes.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from zeropp_ray.data.sources import Piece, Slice, cut, list_files, read
from zeropp_ray.data.store import (
    COLUMN,
    FORMAT,
    MANIFEST,
    TOKENIZER,
    VERSION,
    Manifest,
    Part,
    Span,
    Store,
    is_store,
    open_store,
)
from zeropp_ray.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.files import expanded, sha256_of, sync
from zeropp_ray.uri import Place, UriPath, place

BATCH = 1 << 20
"""Tokens of a record batch."""
ENCODE = 1 << 20  # characters that are tokenized in one call, at least
LEAST_JOB = 1 << 24  # bytes of the sources that make up a part, at least
MOST_JOBS = 1000
POLL_S = 0.2
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Job:
    """What the workers of a store share."""

    folder: Path
    column: str
    tokenizer: str
    end_token: str
    validation_fraction: float


@dataclass(frozen=True)
class Written:
    """The parts that came of one stretch of the sources, and what it held."""

    parts: dict[str, Part]  # by split
    text_bytes: int
    empty_documents: int


def prepare(
    sources: Sequence[str | Path],
    out: Place,
    *,
    column: str = "text",
    tokenizer: str | Path = BYTES,
    end_token: str = "",
    validation_fraction: float = 0.05,
    workers: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Store:
    """Make the token store ``out`` from text files, JSON Lines, Parquet, and folders of them, and open it. One at a URI
    is made in the folder for temporary files, and then copied.

    A document is held out by a hash of its beginning, so that equal ones are on the same side. Where documents are too
    few or too unequal for that, and the held-out part would miss ``validation_fraction`` by more than half of it, the
    end of the text is held out instead.

    Args:
        column: of JSON Lines and Parquet.
        tokenizer: ``bytes``, or a ``tokenizer.json``; ``end_token`` as for FileTokenizer.
        workers: processes; 0: one for each core.
        overwrite: replace the store that is there.
        progress: is told of the bytes read so far and of all, a few times a second.

    Raises:
        ConfigError: naming what cannot be read, or is no text, and where; or that ``out`` cannot be made.
        ZeroppError: the disk is full, or a worker was killed.
    """
    if not 0 < validation_fraction < 1:
        raise ConfigError(f"--validation-fraction {validation_fraction:g}: must be between 0 and 1, such as 0.05")
    if workers < 0:
        raise ConfigError(f"--workers {workers}: must be at least 1, or 0 for one on each core")
    known = load_tokenizer(tokenizer, end_token)
    files = list_files(sources)
    total = sum(file.stat().st_size for file in files)
    size = max(LEAST_JOB, total // MOST_JOBS)
    stretches = _stretches(cut(files, column, size), size)
    out = place(out).absolute()
    _check_unused(out, overwrite)
    partial = _make_partial(out) if isinstance(out, Path) else Path(tempfile.mkdtemp(prefix="zeropp-store-"))
    try:
        job = Job(partial, column, str(tokenizer), end_token, validation_fraction)
        written = _run(job, stretches, workers or _cores(), lambda done: progress(done, total))
        manifest = _manifest(written, known, validation_fraction, [str(source) for source in sources])
        if known.identity != BYTES:
            _copy_tokenizer(expanded(tokenizer), partial / TOKENIZER)
        (partial / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        sync(partial / MANIFEST)
        sync(partial)
        if isinstance(out, Path):
            _publish(partial, out)
        else:
            _upload(partial, out)
    except OSError as error:
        raise ZeroppError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_store(out)


def _stretches(slices: Sequence[Slice], size: int) -> list[list[Slice]]:
    """Neighbouring slices put together, up to about ``size`` bytes."""
    stretches: list[list[Slice]] = []
    filled = size
    for one in slices:
        if filled + one.bytes / 2 > size:
            stretches.append([])
            filled = 0
        stretches[-1].append(one)
        filled += one.bytes
    return stretches


# -- the folder ------------------------------------------------------------------------------------------------------


def _check_unused(out: Place, overwrite: bool) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        if not overwrite:
            raise ConfigError(f"{out}: is there already; choose another --out, or replace it with --overwrite")
        if not is_store(out):
            raise ConfigError(f"{out}: is no token store and will not be replaced; choose another --out")


def _make_partial(out: Path) -> Path:
    """A hidden folder beside ``out``, which gets its name once it is whole."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot be made: {error.strerror}; choose an --out in a folder that you can write to"
        ) from None
    return partial


def _publish(partial: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.old-{os.getpid()}")
    if is_store(out):
        out.rename(old)
    partial.rename(out)
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _upload(made: Path, out: UriPath) -> None:
    """The manifest goes first and comes last: a store that is there is complete."""
    (out / MANIFEST).unlink(missing_ok=True)
    out.remove_tree()
    for path in sorted(made.iterdir(), key=lambda path: (path.name == MANIFEST, path.name)):
        with path.open("rb") as source, (out / path.name).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 24)


def _copy_tokenizer(path: Path, to: Path) -> None:
    shutil.copyfile(path / TOKENIZER if path.is_dir() else path, to)
    sync(to)


# -- processes -------------------------------------------------------------------------------------------------------


def _run(job: Job, stretches: list[list[Slice]], workers: int, progress: Callable[[int], None]) -> list[Written]:
    if min(workers, len(stretches)) <= 1:
        done = 0

        def count(read: int) -> None:
            nonlocal done
            done += read
            progress(done)

        known = load_tokenizer(job.tokenizer, job.end_token)
        return [_write(job, known, i, stretch, count) for i, stretch in enumerate(stretches)]
    processes = multiprocessing.get_context("spawn")  # a fork would inherit locks of whoever calls
    counter, stop = processes.Value("q", 0), processes.Event()
    pool = ProcessPoolExecutor(
        min(workers, len(stretches)), processes, initializer=_start_worker, initargs=(job, counter, stop)
    )
    try:
        futures = [pool.submit(_work, i, stretch) for i, stretch in enumerate(stretches)]
        pending: set[Future[Written]] = set(futures)
        while pending:
            finished, pending = wait(pending, timeout=POLL_S, return_when=FIRST_EXCEPTION)
            failed = [future for future in futures if future in finished and future.exception()]
            if failed:
                failed[0].result()
            progress(counter.value)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise ZeroppError("a worker process was killed, perhaps for memory; try again with fewer --workers") from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Stopped(Exception):
    """Another worker failed, or the command was stopped."""


_worker: tuple[Job, Tokenizer, Callable[[int], None]]


def _start_worker(job: Job, counter: Any, stop: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()

    def count(read: int) -> None:
        with counter.get_lock():
            counter.value += read
        if stop.is_set():
            raise _Stopped

    _worker = job, load_tokenizer(job.tokenizer, job.end_token), count


def _work(index: int, stretch: list[Slice]) -> Written:
    job, known, count = _worker
    return _write(job, known, index, stretch, count)


# -- one stretch -----------------------------------------------------------------------------------------------------


def _write(job: Job, known: Tokenizer, index: int, stretch: list[Slice], count: Callable[[int], None]) -> Written:
    """Tokenize a stretch of the sources into one part of each split that has documents in it."""
    dtype = dtype_for(known.vocabulary)
    writers = {split: _PartWriter(job.folder / f"{split}-{index:05d}.arrow", dtype) for split in SPLITS}
    waiting: list[tuple[str, Piece]] = []
    characters = text_bytes = empty = 0

    def flush() -> None:
        nonlocal characters
        encoded = known.encode([piece.text for _, piece in waiting])
        for (split, piece), tokens in zip(waiting, encoded, strict=True):
            writers[split].add(tokens)
            if piece.last:
                writers[split].end_document(known.end)
        waiting.clear()
        characters = 0

    try:
        for one in stretch:
            told = 0
            for piece in read(one, job.column):
                if piece.head:
                    waiting.append((held_out(piece.head, job.validation_fraction), piece))
                    characters += len(piece.text)
                    text_bytes += piece.bytes
                else:
                    empty += 1
                if characters >= ENCODE or len(waiting) >= ENCODE // 16:
                    flush()
                    count(piece.read - told)
                    told = piece.read
            count(one.bytes - told)
        flush()
        parts = {split: part for split, writer in writers.items() if (part := writer.close())}
    finally:
        for writer in writers.values():
            writer.abandon()
    return Written(parts, text_bytes, empty)


def held_out(head: bytes, fraction: float) -> str:
    """The split of a document that begins with ``head``: by its hash, the same everywhere and always."""
    number = int.from_bytes(hashlib.blake2b(head, digest_size=8).digest(), "big")
    return SPLITS[number < fraction * 2**64]


def dtype_for(vocabulary: int) -> np.dtype:
    """The least unsigned type that holds tokens below ``vocabulary``."""
    return np.dtype(np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32)


class _PartWriter:
    """Tokens into an Arrow file, which is made when there are any; in batches of equal length."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path = path
        self._buffer = np.empty(BATCH, dtype)
        self._filled = self._tokens = self._documents = 0
        self._schema = pa.schema([pa.field(COLUMN, pa.from_numpy_dtype(dtype), nullable=False)])
        self._file: Any = None
        self._writer: Any = None

    def add(self, tokens: np.ndarray) -> None:
        while len(tokens):
            taken = tokens[: BATCH - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            tokens = tokens[len(taken) :]
            if self._filled == BATCH:
                self._put()

    def end_document(self, end: int) -> None:
        self.add(np.array([end]))
        self._documents += 1

    def _put(self) -> None:
        if self._writer is None:
            self._file = pa.OSFile(str(self._path), "wb")
            self._writer = pa.ipc.new_file(self._file, self._schema)
        self._writer.write_batch(pa.record_batch([pa.array(self._buffer[: self._filled])], schema=self._schema))
        self._tokens, self._filled = self._tokens + self._filled, 0

    def close(self) -> Part | None:
        """Have it on disk; None if there was nothing."""
        if self._filled:
            self._put()
        if self._writer is None:
            return None
        self._writer.close()
        self._file.close()
        sync(self._path)
        size = self._path.stat().st_size
        return Part(self._path.name, self._tokens, self._documents, size, sha256_of(self._path))

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()


# -- the whole -------------------------------------------------------------------------------------------------------


def _manifest(written: Sequence[Written], known: Tokenizer, fraction: float, sources: list[str]) -> Manifest:
    parts = {split: [one.parts[split] for one in written if split in one.parts] for split in SPLITS}
    every = [part for split in SPLITS for part in parts[split]]
    tokens = sum(part.tokens for part in every)
    if not tokens:
        raise ConfigError(f"{', '.join(sources)}: no text in it; name files that hold some")
    splits = {split: [Span(part.file, 0, part.tokens) for part in parts[split]] for split in SPLITS}
    held = sum(part.tokens for part in parts["validation"])
    by = "documents"
    if not fraction / 2 <= held / tokens <= fraction * 1.5:
        by = "the end of the text"
        cut_at = tokens - math.ceil(tokens * fraction)
        splits = {"train": _spans(every, 0, cut_at), "validation": _spans(every, cut_at, tokens)}
    return Manifest(
        format=FORMAT,
        version=VERSION,
        dtype=dtype_for(known.vocabulary).name,
        vocabulary=known.vocabulary,
        tokenizer=known.identity,
        end=known.end,
        end_token=known.end_token,
        documents=sum(part.documents for part in every),
        empty_documents=sum(one.empty_documents for one in written),
        tokens=tokens,
        text_bytes=sum(one.text_bytes for one in written),
        held_out=by,
        sources=sources,
        parts=every,
        splits=splits,
    )


def _spans(parts: Sequence[Part], begin: int, end: int) -> list[Span]:
    """What of the parts, one after another, lies from token ``begin`` up to ``end``."""
    spans, first = [], 0
    for part in parts:
        low, high = max(begin, first), min(end, first + part.tokens)
        if low < high:
            spans.append(Span(part.file, low - first, high - low))
        first += part.tokens
    return spans
