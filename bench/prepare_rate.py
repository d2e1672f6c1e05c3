"""How fast text becomes a token store, and in how much memory: ``python -m bench.prepare_rate [--megabytes 1024]``.

A text of that size is made of Python's documentation, no two copies alike, and everything is deleted in the end.

- *alone*: the same files read, checked and tokenized by as many processes, and nothing written;
- *prepare*: the same with the store written, checksummed and on disk;
- *memory*: the most that all processes together had resident at a time, sampled every 50 ms;
- *start*: opening the store for training, up to the first micro-batch.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import psutil

from zeropp_ray.config import load_config
from zeropp_ray.data import prepare as preparing
from zeropp_ray.data.corpus import embedded_text, load_corpus
from zeropp_ray.data.sources import Slice, cut, read
from zeropp_ray.data.tokenizer import BYTES, load_tokenizer


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--megabytes", default=1024, help="Size of the text, in 2^20 bytes.")
@click.option("--tokenizer", default=BYTES, help="bytes; a tokenizer.json; or bpe: 8192 tokens, trained here.")
@click.option("--workers", default=os.cpu_count() or 1, help="Processes.")
def main(megabytes: int, tokenizer: str, workers: int) -> None:
    with tempfile.TemporaryDirectory(prefix="zeropp-bench-") as name:
        folder = Path(name)
        text, store = make_text(folder / "text.txt", megabytes << 20), folder / "store"
        tokenizer = str(make_bpe(folder / "tokenizer.json")) if tokenizer == "bpe" else tokenizer
        for label, work in (
            ("alone", partial(alone, text, tokenizer, workers)),
            ("prepare", partial(preparing.prepare, [text], store, tokenizer=tokenizer, workers=workers)),
        ):
            begin = time.perf_counter()
            with peak_memory() as peak:
                work()
            seconds = time.perf_counter() - begin
            print(
                f"{label:8} {seconds:.1f} s, {megabytes / seconds:.1f} MiB/s; memory {peak() / 2**20:.0f} MiB in "
                f"{workers} processes and their parent"
            )
        from zeropp_ray.data.sampler import Batches  # torch, which the processes above need not import

        begin = time.perf_counter()
        config = load_config(None, [f"data.path={store}", "model.vocab_size=1000000"])
        corpus = load_corpus(config)
        Batches(config, corpus, 0, 0).microbatch(0, 0)
        print(f"start    {time.perf_counter() - begin:.3f} s, {len(corpus.train):,} training tokens")


def make_text(path: Path, size: int) -> Path:
    base = embedded_text().decode()
    with path.open("w", encoding="utf-8") as file:
        copy = 0
        while file.tell() < size:
            file.write(base.replace(" the ", f" the {copy} ").replace("object", f"object{copy}"))
            copy += 1
    os.truncate(path, size)
    return path


def make_bpe(path: Path) -> Path:
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([embedded_text().decode()], trainer)
    tokenizer.save(str(path))
    return path


def alone(text: Path, tokenizer: str, workers: int) -> int:
    slices = cut([text], "text", preparing.LEAST_JOB)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return sum(pool.map(partial(tokenize, tokenizer), slices))


def tokenize(tokenizer: str, part: Slice) -> int:
    known, tokens, waiting, size = load_tokenizer(tokenizer), 0, [], 0
    for piece in read(part, "text"):
        waiting.append(piece.text)
        size += len(piece.text)
        if size >= preparing.ENCODE or piece.last:
            tokens += sum(map(len, known.encode(waiting)))
            waiting, size = [], 0
    return tokens + sum(map(len, known.encode(waiting)))


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Gives a function that tells the most bytes that this process and its children had resident together."""
    me, most, over = psutil.Process(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            most[0] = max(most[0], total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: most[0]
    finally:
        over.set()
        watcher.join()


if __name__ == "__main__":
    main()
