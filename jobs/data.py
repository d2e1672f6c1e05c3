"""``zeropp data``: make text into a token store, and look at one."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.place import PLACE
from jobs.report import aligned, duration, short, size
from zeropp_ray.errors import ConfigError
from zeropp_ray.uri import Place

if TYPE_CHECKING:
    from zeropp_ray.data.store import Store


@click.group(short_help="Make text into tokens, once, for many runs.")
def data() -> None:
    """Make text into a token store, once, for many runs. Training maps the store: its size costs no memory."""


@data.command(context_settings={"show_default": True}, short_help="Make a token store from text.")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=PLACE, help="Folder of the store, or its URI; it is made.")
@click.option("--column", default="text", help="What holds the text in JSON Lines and Parquet.")
@click.option("--tokenizer", default="bytes", help="A Hugging Face tokenizer.json, or 'bytes'.")
@click.option("--end-token", default="", help="Token behind each document; left out: the usual one of the tokenizer.")
@click.option("--validation-fraction", default=0.05, help="Part that is held out, in whole documents if they are many.")
@click.option("--workers", default=0, help="Processes; 0: one for each core.")
@click.option("--overwrite", is_flag=True, help="Replace the store that is there.")
def prepare(
    sources: tuple[Path, ...],
    out: Place,
    column: str,
    tokenizer: str,
    end_token: str,
    validation_fraction: float,
    workers: int,
    overwrite: bool,
) -> None:
    """Make a token store from SOURCES: text files, JSON Lines, Parquet, and folders of them.

    The kind is told from the name: .jsonl, .ndjson or .json; .parquet; anything else is text, one document a file. .gz
    and .zst are unpacked on the way. Files are read side by side, and little of them is in memory at a time.

    \b
    Examples:
      zeropp data prepare book.txt --out stores/book
      zeropp data prepare texts/ --out stores/texts --tokenizer tokenizer.json
      zeropp data prepare part-*.parquet --column content --out stores/web
      zeropp train --set data.path=stores/book
    """
    from zeropp_ray.data.prepare import prepare as make

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    begin = time.monotonic()
    with _progress() as progress:
        store = make(
            sources,
            out,
            column=column,
            tokenizer=tokenizer,
            end_token=end_token,
            validation_fraction=validation_fraction,
            workers=workers,
            overwrite=overwrite,
            progress=progress,
        )
    seconds = time.monotonic() - begin
    rate = size(store.manifest.text_bytes / max(seconds, 1e-3))
    click.echo(f"{_table(store)}\nmade in    {duration(seconds)}, {rate} of text a second\n\n{_next(store, out)}")


@data.command(short_help="What a token store holds.")
@click.argument("folder", type=PLACE)
@click.option("--verify", is_flag=True, help="Read every byte, and compare checksums.")
def info(folder: Place, verify: bool) -> None:
    """Show what the token store in FOLDER, or at a URI, holds."""
    from zeropp_ray.data.store import open_store

    store = open_store(folder)
    click.echo(_table(store))
    if verify:
        if wrong := store.verify():
            raise ConfigError(f"{folder}: damaged, {'; '.join(wrong)}; copy the store again, or prepare the data again")
        click.echo(f"verified   all {len(store.manifest.parts)} parts have their checksums")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal, if there is one."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with click.progressbar(length=1, label="reading", file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.length = max(total, 1)
            bar.update(min(done, total) - bar.pos)

        yield show


def _table(store: Store) -> str:
    held = store.manifest
    tokens = {name: sum(span.tokens for span in spans) for name, spans in held.splits.items()}
    bits = held.text_bytes / held.tokens
    kind = "bytes" if store.tokenizer_file is None else f"{held.tokenizer[:12]}…, a copy is in the folder"
    empty = f", {held.empty_documents:,} empty ones left out" if held.empty_documents else ""
    return aligned(
        ("tokens", f"{held.tokens:,} ({short(held.tokens)}), {bits:.2f} bytes of text each"),
        ("documents", f"{held.documents:,}{empty}; behind each is {held.end_token}"),
        ("training", f"{tokens['train']:,} tokens"),
        ("held out", f"{tokens['validation']:,} tokens: {held.held_out}"),
        ("tokenizer", f"{kind}; vocabulary {held.vocabulary:,}"),
        ("on disk", f"{size(sum(part.bytes for part in held.parts))} as {held.dtype} in {len(held.parts)} parts"),
        ("from", ", ".join(held.sources)),
    )


def _next(store: Store, out: Place) -> str:
    path = shlex.quote(str(out))
    model = "" if store.manifest.vocabulary == 256 else f" --set model.vocab_size={store.manifest.vocabulary}"
    return f"Train on it with: zeropp train --set data.path={path}{model}"
