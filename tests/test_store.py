"""Token stores: what goes in comes out, whatever the format and the number of processes; and what is refused."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from jobs.cli import zeropp
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.data import prepare as preparing
from zeropp_ray.data import sources
from zeropp_ray.data.corpus import Corpus, embedded_text, load_corpus
from zeropp_ray.data.prepare import dtype_for, held_out, prepare
from zeropp_ray.data.sampler import Batches
from zeropp_ray.data.store import Joined, Store, open_store
from zeropp_ray.data.tokenizer import ByteTokenizer, load_tokenizer
from zeropp_ray.errors import ConfigError, ZeroppError

WORDS = ["step", "größe", "日本", "a", "the", "🙂", "gather", "line\n", "end.\n\n"]


def documents(count: int, seed: int = 0) -> list[str]:
    """Different lengths, several alphabets."""
    rng = random.Random(seed)
    return [f"{i} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for i in range(count)]


def tokens_of(store: Store) -> bytes:
    return b"".join(store.split(name)[:].tobytes() for name in ("train", "validation"))


def config(path: Path, *overrides: str) -> RunConfig:
    return load_config(None, [f"data.path={path}", "model.seq_len=8", *overrides])


# --- in and out


def as_lines(folder: Path, docs: Sequence[str]) -> Path:
    path = folder / "docs.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": doc}) + "\n" for i, doc in enumerate(docs)), encoding="utf-8")
    return path


def as_gzip(folder: Path, docs: Sequence[str]) -> Path:
    plain = as_lines(folder, docs)
    path = folder / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


def as_zstd(folder: Path, docs: Sequence[str]) -> Path:
    plain = as_lines(folder, docs).read_bytes()
    path = folder / "docs.json.zst"  # two frames, as pzstd and cat make them
    path.write_bytes(b"".join(pa.compress(part, "zstd", asbytes=True) for part in (plain[:999], plain[999:])))
    return path


def as_parquet(folder: Path, docs: Sequence[str]) -> Path:
    path = folder / "docs.parquet"
    columns = {"id": range(len(docs)), "text": pa.array(docs).dictionary_encode()}
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return path


def as_files(folder: Path, docs: Sequence[str]) -> Path:
    inside = folder / "docs" / "deep"
    inside.mkdir(parents=True)
    for i, doc in enumerate(docs):
        if i % 3:
            (inside / f"{i:04}.txt").write_text(doc, encoding="utf-8")
        else:
            (inside / f"{i:04}.txt.gz").write_bytes(gzip.compress(doc.encode()))
    (folder / "docs" / ".hidden").write_bytes(b"\xff")
    (inside / "empty.txt").touch()
    return folder / "docs"


FORMATS = [as_lines, as_gzip, as_zstd, as_parquet, as_files]


@pytest.mark.parametrize("size", [1000, 1 << 24])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.__name__)
def test_every_format_gives_the_same_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Callable[[Path, Sequence[str]], Path], size: int
) -> None:
    monkeypatch.setattr(preparing, "LEAST_JOB", size)
    docs = documents(300)
    store = prepare([form(tmp_path, docs)], tmp_path / "store", workers=1)
    for split in ("train", "validation"):
        expected = b"".join(doc.encode() + b"\0" for doc in docs if held_out(doc.encode(), 0.05) == split)
        assert store.split(split)[:].tobytes() == expected
    held = store.manifest
    assert (held.documents, held.tokens) == (300, sum(len(doc.encode()) + 1 for doc in docs))
    assert held.text_bytes == held.tokens - 300
    assert held.held_out == "documents"
    assert held.empty_documents == 0
    assert sum(part.documents for part in held.parts) == 300
    assert store.verify() == []
    if form in (as_lines, as_files) and size == 1000:
        assert len(held.parts) > 10


@pytest.mark.parametrize("text", ["ä日🙂" * 5000, "line of text 日本\n" * 3000, "x" * 40_000 + "\n"], ids=len)
def test_a_long_text_is_cut_between_characters_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(preparing, "LEAST_JOB", 1000)
    monkeypatch.setattr(sources, "PIECE", 101)
    monkeypatch.setattr(preparing, "BATCH", 777)
    path = tmp_path / "book.txt"
    path.write_text(text, encoding="utf-8")
    store = prepare([path], tmp_path / "store", workers=1)
    assert tokens_of(store) == text.encode() + b"\0"
    assert store.manifest.documents == 1
    assert len(store.manifest.parts) > 20
    assert len(store.split("validation")) == pytest.approx(0.05 * store.manifest.tokens, abs=1)
    assert store.manifest.held_out == "the end of the text"


def test_what_is_written_does_not_depend_on_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe: Path
) -> None:
    monkeypatch.setattr(preparing, "LEAST_JOB", 5000)
    path, told = as_lines(tmp_path, documents(400)), []
    one = prepare([path], tmp_path / "one", tokenizer=bpe, workers=1)
    two = prepare([path], tmp_path / "two", tokenizer=bpe, workers=2, progress=lambda *counts: told.append(counts))
    assert one.manifest == two.manifest
    assert len(one.manifest.parts) > 4
    assert told[-1] == (path.stat().st_size,) * 2


def test_a_tokenizer_file_is_used_copied_and_known_by_its_contents(tmp_path: Path, bpe: Path) -> None:
    docs = [*documents(50), "", "long " * 100_000]
    path = as_lines(tmp_path, docs)
    store = prepare([path], tmp_path / "store", tokenizer=bpe.parent, workers=1)
    tokenizer = load_tokenizer(bpe)
    assert (store.manifest.vocabulary, store.manifest.dtype, store.manifest.tokenizer) == (
        *(500, "uint16"),
        tokenizer.identity,
    )
    assert store.tokenizer_file is not None
    assert load_tokenizer(store.tokenizer_file).identity == tokenizer.identity
    assert (store.manifest.end, store.manifest.end_token) == (0, "<|endoftext|>")
    assert store.manifest.empty_documents == 1
    tokens = np.concatenate([store.split("train")[:], store.split("validation")[:]])
    assert tokens.max() < 500
    ends = np.flatnonzero(tokens == 0)
    read = [tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]]
    assert sorted(read) == sorted(doc + "<|endoftext|>" for doc in docs if doc)
    other = load_tokenizer(bpe, "<|user|>")
    assert (other.end, other.end_token) == (1, "<|user|>")


def test_bytes_and_back() -> None:
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer.encode(["größe 日"])
    assert tokens.tobytes() == "größe 日".encode()
    assert tokenizer.decode(tokens) == "größe 日"
    assert tokenizer.decode(tokens[:-1]) == "größe \ufffd"


def test_the_least_type_that_holds_the_vocabulary() -> None:
    sizes = [1, 256, 257, 1 << 16, (1 << 16) + 1]
    assert [dtype_for(size).itemsize for size in sizes] == [1, 1, 2, 2, 4]


# --- what is held out


def test_equal_documents_are_on_the_same_side(tmp_path: Path) -> None:
    docs = documents(2000)
    store = prepare([as_lines(tmp_path, docs + docs[::-1])], tmp_path / "store", validation_fraction=0.2, workers=1)
    sides = [set(store.split(name)[:].tobytes().split(b"\0")[:-1]) for name in ("train", "validation")]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 2000
    assert len(sides[1]) == pytest.approx(400, abs=60)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_of_few_documents_the_end_is_held_out(tmp_path: Path, count: int) -> None:
    docs = [doc * 20 for doc in documents(count)]
    store = prepare([as_lines(tmp_path, docs)], tmp_path / "store", validation_fraction=0.25, workers=1)
    share = len(store.split("validation")) / store.manifest.tokens
    assert share == pytest.approx(0.25, abs=0.005 if store.manifest.held_out == "the end of the text" else 0.125)
    assert sorted(tokens_of(store).split(b"\0")) == sorted(doc.encode() for doc in [*docs, ""])


# --- what is refused


def parquet(path: Path, **columns: list) -> None:
    pq.write_table(pa.table(columns), path)


CHOOSE, LINES, PARQUET = "--column: body", "bad.jsonl", "bad.parquet"
BAD: dict[str, tuple[Callable[[Path], object], str, tuple[str, ...]]] = {
    "text": (lambda p: p.write_bytes(b"fine\n" * 3 + b"a\xffb"), "bad.txt", ("invalid UTF-8 at byte 16", "iconv")),
    "cut character": (lambda p: p.write_bytes("ende ä".encode()[:-1]), "bad.txt", ("invalid UTF-8 at byte 5",)),
    "packed text": (lambda p: p.write_bytes(gzip.compress(b"ab\xff")), "bad.txt.gz", ("invalid UTF-8 at byte 2",)),
    "line": (lambda p: p.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n'), LINES, ("invalid UTF-8 at byte 24",)),
    "no JSON": (lambda p: p.write_text('{"text": "a"}\nplain\n'), LINES, ("line at byte 14", "not JSON")),
    "no object": (lambda p: p.write_text('["a"]\n'), LINES, ("line at byte 0", "not a JSON object")),
    "no field": (
        lambda p: p.write_text('{"id": 3, "body": "a"}'),
        LINES,
        ("no 'text'", "id, body", CHOOSE),
    ),
    "number": (
        lambda p: p.write_text('{"text": 3, "body": "a"}'),
        LINES,
        ("holds 3, not text", CHOOSE),
    ),
    "surrogate": (lambda p: p.write_text('{"text": "\\ud800"}'), LINES, ("surrogate",)),
    "no rows": (
        lambda p: parquet(p, text=pa.array([], pa.string())),
        PARQUET,
        ("an empty Parquet file",),
    ),
    "no column": (
        lambda p: parquet(p, id=[1], body=["a"]),
        PARQUET,
        ("no column 'text'", "id, body", CHOOSE),
    ),
    "column": (lambda p: parquet(p, text=[1], body=["a"]), PARQUET, ("holds int64, not text", CHOOSE)),
    "no text": (lambda p: parquet(p, text=[1]), PARQUET, ("holds int64, not text", "holds no text")),
    "Parquet bytes": (
        lambda p: parquet(p, text=pa.array([b"fine", b"a\xff"]).view(pa.string())),
        PARQUET,
        ("invalid UTF-8 in column 'text', in rows 0 to 1",),
    ),
    "no Parquet": (lambda p: p.write_text("PAR1 but not"), PARQUET, ("cannot be read",)),
    "empty": (lambda p: p.touch(), PARQUET, ("cannot be read",)),
    "torn gzip": (
        lambda p: p.write_bytes(gzip.compress(os.urandom(9999))[:-99]),
        "bad.gz",
        ("Truncated",),
    ),
    "no zstd": (lambda p: p.write_text("plain"), "bad.txt.zst", ("cannot be read",)),
    "nothing": (lambda p: p.touch(), "bad.txt", ("no text in it",)),
    "no folder": (lambda p: p.mkdir(), "bad", ("folder without files",)),
    "missing": (lambda p: None, "bad.txt", ("no such file or folder",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    make, name, parts = BAD[case]
    make(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        prepare([tmp_path / name], tmp_path / "store", workers=1)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / name}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert [path.name for path in tmp_path.iterdir()] == ([name] if case != "missing" else [])


def test_an_error_in_a_worker_reaches_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "LEAST_JOB", 1000)
    path = tmp_path / "bad.txt"
    path.write_bytes(b"line\n" * 1000 + b"\xff" + b"line\n" * 1000)
    with pytest.raises(ConfigError, match=r"bad\.txt: invalid UTF-8 at byte 5000"):
        prepare([path], tmp_path / "store", workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]


@pytest.mark.parametrize(
    ("content", "arguments", "problem"),
    [
        (None, {}, "no tokenizer can be read there"),
        ("no JSON", {}, "not a tokenizer file"),
        ("{}", {}, "not a tokenizer file"),
        ("", {"end_token": "</x>"}, "'</x>' is not in its vocabulary"),
    ],
)
def test_bad_tokenizers_are_refused(
    tmp_path: Path, bpe: Path, content: str | None, arguments: dict[str, str], problem: str
) -> None:
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content or bpe.read_text())
    with pytest.raises(ConfigError, match=problem) as caught:
        prepare([as_lines(tmp_path, ["a"])], tmp_path / "store", tokenizer=path, **arguments)
    assert str(caught.value).startswith(f"{path}: ")
    assert "bytes" in str(caught.value) or "such as <|endoftext|> or <|user|>" in str(caught.value)


def test_where_a_store_cannot_be_made(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="is there already; choose another --out"):
        prepare([text], folder)
    with pytest.raises(ConfigError, match="is no token store and will not be replaced"):
        prepare([text], folder, overwrite=True)
    with pytest.raises(ConfigError, match="cannot be made"):
        prepare([text], text / "store")
    read_only = Path("/sys/store") if os.geteuid() == 0 else tmp_path / "locked" / "store"
    if os.geteuid():
        read_only.parent.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"cannot be made: .*choose an --out in a folder that you can write to"):
        prepare([text], read_only)
    assert (folder / "thesis.txt").exists()


def test_a_store_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "a.txt", tmp_path / "store"
    path.write_text("first")
    prepare([path], out)
    path.write_text("second")
    prepare([path], out, overwrite=True)
    assert tokens_of(open_store(out)) == b"second\0"

    def full(self: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(preparing._PartWriter, "_put", full)
    with pytest.raises(ZeroppError, match=r"store: cannot be written: No space left on device") as caught:
        prepare([path], out, overwrite=True)
    assert caught.value.exit_code == 1
    assert tokens_of(open_store(out)) == b"second\0"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.txt", "store"]


# --- damage


@pytest.fixture
def store(tmp_path: Path, bpe: Path) -> Store:
    return prepare([as_lines(tmp_path, documents(500))], tmp_path / "store", tokenizer=bpe, workers=1)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def newer(path: Path) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"version": 2}))


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("train-00000.arrow", truncate, "has .* bytes instead of"),
        ("train-00000.arrow", Path.unlink, "No such file"),
        ("manifest.json", truncate, "cannot be used"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        ("manifest.json", lambda path: path.write_text("{}"), "cannot be used"),
        ("manifest.json", newer, "version 2 is newer than 1.*update"),
    ],
)
def test_a_damaged_store_is_never_read(store: Store, file: str, damage: Callable[[Path], object], problem: str) -> None:
    damage(store.path / file)
    with pytest.raises(ConfigError, match=problem):
        open_store(store.path)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_corpus(config(store.path, "model.vocab_size=500"))
    assert str(caught.value).startswith(f"data.path = '{store.path}': ")
    assert "\n" not in str(caught.value)


def test_altered_bytes_are_found_when_they_are_looked_for(store: Store) -> None:
    for name in ("train-00000.arrow", "tokenizer.json"):
        data = bytearray((store.path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (store.path / name).write_bytes(data)
    assert store.verify() == [
        "train-00000.arrow has been altered: its checksum differs",
        "tokenizer.json has been altered: its checksum differs",
    ]
    result = CliRunner().invoke(zeropp, ["data", "info", str(store.path), "--verify"])
    assert result.exit_code == 2
    assert "train-00000.arrow has been altered" in result.output


# --- in training


def test_a_store_of_bytes_trains_as_its_text(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_bytes(embedded_text()[:20_001])
    prepare([text], tmp_path / "store", workers=1, validation_fraction=0.1)
    raw, stored = (load_corpus(config(path, "data.validation_fraction=0.1")) for path in (text, tmp_path / "store"))
    assert (raw.vocabulary, raw.tokenizer) == (stored.vocabulary, stored.tokenizer)
    assert stored.train[:].tobytes() == raw.train.tobytes()
    for step in (0, 3):
        a, b = (Batches(config(text), corpus, 1, 0).microbatch(step, 2) for corpus in (raw, stored))
        assert (a[0] == b[0]).all()
        assert (a[1] == b[1]).all()


def test_the_model_must_know_the_tokens_of_the_store(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 256: .* holds tokens up to 499; use 500 or more"):
        load_corpus(config(store.path))
    own = config(store.path, "model.factory=a:b")
    with pytest.raises(ConfigError, match=r"its head tells 400 tokens apart; .*make it 500 or more"):
        load_corpus(own, 400)
    assert load_corpus(own, 500).vocabulary == 500
    corpus = load_corpus(config(store.path, "model.vocab_size=512"))
    assert (corpus.unit, corpus.tokenizer) == ("tokens", store.manifest.tokenizer)
    assert corpus.label == f"{store.path}: {len(corpus.train):,} tokens, and {len(corpus.validation):,} held out"


def test_a_store_of_another_tokenizer_is_refused(store: Store, bpe: Path) -> None:
    mine = f"data.tokenizer={store.manifest.tokenizer}"
    load_corpus(config(store.path, "model.vocab_size=500", mine))
    with pytest.raises(ConfigError, match=r"its tokens are of the tokenizer \w{12}…, and the run's are bytes"):
        load_corpus(config(store.path, "model.vocab_size=500", "data.tokenizer=bytes"))
    with pytest.raises(ConfigError, match="its tokens are bytes, and the run's are of the tokenizer"):
        load_corpus(load_config(None, [mine]))


def test_a_store_that_is_too_small_says_how_large_it_must_be(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"too short; a step of 32 sequences of model\.seq_len = 5000 needs 165001"):
        load_corpus(config(store.path, "model.vocab_size=500", "model.seq_len=5000"))


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux does")


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def big(path: Path, size: int) -> Path:
    line = b"A line of text that is neither long nor short, and ends here.\n"
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(line * 10_000)
    return path


@linux
def test_reading_a_store_costs_no_memory(tmp_path: Path) -> None:
    prepare([big(tmp_path / "big.txt", 100 << 20)], tmp_path / "store", workers=1)
    settings = config(tmp_path / "store", "model.seq_len=1000")
    before = anonymous()
    batches = Batches(settings, load_corpus(settings), 0, 0)
    for step in range(2000):
        batches.microbatch(step, 0)
    assert anonymous() - before < 8 << 20


@linux
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    code = (
        "import sys; from zeropp_ray.data.prepare import prepare; from pathlib import Path;"
        "prepare([sys.argv[1]], Path(sys.argv[1] + '.store'), workers=1);"
        "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))"
    )
    peaks = []
    for size in (8, 80):
        path = big(tmp_path / f"{size}.txt", size << 20)
        done = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True)
        peaks.append(1024 * int(done.stdout))
    assert peaks[1] - peaks[0] < 16 << 20


@given(st.data())
def test_joined_arrays_are_one_array(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), max_size=6))
    firsts = data.draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    whole = np.arange(sum(lengths), dtype=np.int32) * 7
    parts = np.split(whole, np.cumsum(lengths)[:-1]) if lengths else []
    arrays = [np.concatenate([np.full(first, -1), part, [-2]]) for first, part in zip(firsts, parts, strict=True)]
    joined = Joined(list(zip(firsts, lengths, strict=True)), arrays.__getitem__, whole.dtype)
    assert len(joined) == len(whole)
    a, b = data.draw(st.integers(-12, 60)), data.draw(st.integers(-12, 60))
    assert joined[a:b].tolist() == whole[a:b].tolist()
    if len(whole):
        places = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=4, max_size=4))).reshape(2, 2)
        assert joined[places].tolist() == whole[places].tolist()


# --- the command


def test_the_command_makes_shows_and_says_how_to_go_on(
    tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mein Ordner ä日"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path = as_lines(folder, documents(300)).rename(folder / "größe 日本.jsonl")
    made = CliRunner().invoke(zeropp, ["data", "prepare", path.name, "--out", "spei cher", "--tokenizer", str(bpe)])
    assert made.exit_code == 0, made.output
    for part in ("300; behind each is <|endoftext|>", "vocabulary 500", "documents", "größe 日本.jsonl"):
        assert part in made.output
    assert made.output.endswith("zeropp train --set data.path='spei cher' --set model.vocab_size=500\n")
    shown = CliRunner().invoke(zeropp, ["data", "info", "spei cher", "--verify"])
    assert shown.exit_code == 0
    assert shown.output.splitlines()[:-1] == made.output.splitlines()[: len(shown.output.splitlines()) - 1]
    corpus = load_corpus(config(Path("spei cher"), "model.vocab_size=500"))
    assert isinstance(corpus, Corpus)


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for arguments, problem in (
        (["--validation-fraction", "1"], "--validation-fraction 1: must be between 0 and 1"),
        (["--workers", "-1"], "--workers -1: must be at least 1"),
        (["--end-token", "x"], "--end-token x: bytes end a document with byte 0"),
        (["--tokenizer", "none.json"], "none.json: no tokenizer can be read there"),
    ):
        command = ["data", "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), *arguments]
        result = CliRunner().invoke(zeropp, command)
        assert (result.exit_code, result.output.count("\n")) == (2, 1)
        assert result.output.startswith(f"error: {problem}")
    result = CliRunner().invoke(zeropp, ["data", "info", str(tmp_path)])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "make one with zeropp data prepare" in result.output


@pytest.mark.full
@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM", "SIGKILL", "worker"])
def test_stopped_or_killed_no_process_is_left_and_no_store(tmp_path: Path, stop: str) -> None:
    big(tmp_path / "big.txt", 400 << 20)
    command = [sys.executable, "-m", "zeropp_ray", "data", "prepare", "big.txt", "--out", "store", "--workers", "2"]
    path = str(Path(__file__).parent.parent)
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not list(tmp_path.glob(".store.partial-*/*.arrow")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in family if "spawn_main" in " ".join(child.cmdline())]
    if stop == "worker":
        workers[0].kill()
    else:
        process.send_signal(getattr(signal, stop))
    output = process.communicate(timeout=30)[0]
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
    assert process.returncode == (-signal.SIGKILL if stop == "SIGKILL" else 1)
    if stop == "worker":
        assert output.startswith("error: a worker process was killed, perhaps for memory")
    left = {entry.name.partition("-")[0] for entry in tmp_path.iterdir()}
    assert left == {"big.txt", *([".store.partial"] if stop == "SIGKILL" else [])}
