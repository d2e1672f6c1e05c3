"""Text in, samples out: what is refused, that no token is skipped or seen twice, and that no layout changes a step."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest

from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.data.corpus import Corpus, load_corpus
from zeropp_ray.data.sampler import IGNORE, Batches, SampleOrder
from zeropp_ray.data.shuffle import Shuffle
from zeropp_ray.errors import ConfigError


def config(*overrides: str) -> RunConfig:
    return load_config(None, ["model.seq_len=8", *overrides])


def counting(length: int) -> Corpus:
    """A text whose tokens are their own positions, so that a test can see which were read."""
    text = np.arange(length)
    return Corpus(text, text, "positions")


# --- the text


def test_the_embedded_text_is_split_at_its_end() -> None:
    corpus = load_corpus(config())
    length = len(corpus.train) + len(corpus.validation)
    assert length > 300_000
    assert len(corpus.validation) == int(length * 0.05)
    assert corpus.train.dtype == np.uint8
    assert corpus.train.tobytes().startswith(b'The "assert" statement')


def test_a_file_and_a_folder_are_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"b" * 500)
    (tmp_path / "a.txt").write_bytes(b"a" * 500)
    (tmp_path / "sub" / "c.txt").write_bytes(b"c" * 500)
    (tmp_path / ".hidden").write_bytes(b"x" * 500)
    corpus = load_corpus(config(f"data.path={tmp_path}", "data.validation_fraction=0.4"))
    text = corpus.train.tobytes() + corpus.validation.tobytes()
    assert text == b"a" * 500 + b"\n\n" + b"b" * 500 + b"\n\n" + b"c" * 500
    single = load_corpus(config(f"data.path={tmp_path / 'a.txt'}", "data.validation_fraction=0.2"))
    assert (len(single.train), len(single.validation)) == (400, 100)


@pytest.mark.parametrize(
    ("name", "problem"), [("missing", "no such file"), ("empty.txt", "empty"), ("folder", "without files")]
)
def test_a_corpus_that_cannot_be_used_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=problem) as caught:
        load_corpus(config(f"data.path={tmp_path / name}"))
    assert str(caught.value).startswith(f"data.path = '{tmp_path / name}': ")


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5, 0.9])
def test_a_text_that_is_too_short_says_how_long_it_must_be(tmp_path: Path, fraction: float) -> None:
    file = tmp_path / "text.txt"
    settings = config(f"data.path={file}", f"data.validation_fraction={fraction}")
    file.write_bytes(b"x" * 20)
    with pytest.raises(ConfigError, match="20 bytes are too short") as caught:
        load_corpus(settings)
    need = max(int(word.strip(",")) for word in str(caught.value).split() if word.strip(",").isdigit())
    file.write_bytes(b"x" * need)
    corpus = load_corpus(settings)
    assert SampleOrder(len(corpus.train), 8, 0).per_epoch >= settings.parallel.global_batch
    assert len(corpus.validation) > 8


def test_a_vocabulary_smaller_than_a_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 255"):
        load_corpus(config("model.vocab_size=255"))


# --- the order


@pytest.mark.parametrize("length", [16, 17, 100, 103, 1024])
def test_an_epoch_reads_every_token_once(length: int) -> None:
    order = SampleOrder(length, 8, seed=3)
    firsts = set()
    for epoch in range(20):
        starts = np.sort(order.starts(np.arange(order.per_epoch) + epoch * order.per_epoch))
        assert (np.diff(starts) == 8).all()
        assert starts[0] >= 0
        assert starts[-1] + 8 < length  # the label of the last token is inside
        assert length - order.per_epoch * 8 <= 15  # what an epoch leaves out at the ends
        firsts.add(int(starts[0]))
    assert len(firsts) > 4, "epochs must cut the text differently"


def test_every_token_is_read_in_some_epoch() -> None:
    order = SampleOrder(43, 8, seed=0)
    starts = order.starts(np.arange(200 * order.per_epoch))
    assert set((starts[:, None] + np.arange(8)).ravel()) == set(range(42))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    numbers = np.arange(90, 200)  # several epochs of 49
    a = SampleOrder(400, 8, seed=1).starts(numbers)
    fresh = SampleOrder(400, 8, seed=1)
    assert (np.array([fresh.starts(np.array([n]))[0] for n in numbers[::-1]])[::-1] == a).all()
    assert (SampleOrder(400, 8, seed=2).starts(numbers) != a).any()
    first, second = (np.diff(SampleOrder(400, 8, seed=1).starts(np.arange(e * 49, e * 49 + 49))) for e in (0, 1))
    assert (first != second).any()


@pytest.mark.parametrize("n", [1, 2, 3, 10, 97, 1000, 10_007])
def test_a_shuffle_is_a_bijection(n: int) -> None:
    shuffle = Shuffle(n, [3, 1])
    assert sorted(shuffle[i] for i in range(n)) == list(range(n))


def test_a_shuffle_is_drawn_from_its_seed() -> None:
    orders = {tuple(Shuffle(50, [seed, epoch])[i] for i in range(50)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert orders == {tuple(Shuffle(50, [seed, e])[i] for i in range(50)) for seed in range(4) for e in range(4)}


@pytest.mark.parametrize("n", [4000, 2**40 + 15])
def test_a_shuffle_mixes_well(n: int) -> None:
    """Of 4000 neighbouring places: where they go, and from each to the next, is spread evenly."""
    count, cells = 4000, 20
    shuffle = Shuffle(n, [0, 0])
    cell = np.array([shuffle[i] * cells // n for i in range(count)])
    for pairs in ((cell[:-1], cell[1:]), (np.arange(count) * cells // count, cell)):
        table = np.zeros((cells, cells))
        np.add.at(table, (pairs[0], pairs[1]), 1)
        chi_square = ((table - table.mean()) ** 2 / table.mean()).sum()
        assert chi_square == pytest.approx(cells**2, abs=5 * math.sqrt(2) * cells)


class Enormous:
    """A text of 10^13 tokens, each its position modulo 251."""

    def __len__(self) -> int:
        return 10**13

    def __getitem__(self, where: np.ndarray) -> np.ndarray:
        assert where.dtype == np.int64
        assert ((where >= 0) & (where < len(self))).all()
        return (where % 251).astype(np.uint8)


def test_a_text_of_any_length_starts_at_once() -> None:
    settings = config("model.seq_len=2048")
    begin = time.process_time()
    batches = Batches(settings, Corpus(Enormous(), np.arange(5000), "positions"), 0, 0)
    ids, labels = batches.microbatch(10**6, 0)
    assert time.process_time() - begin < 0.1
    assert (labels == (ids + 1) % 251).all()
    order = SampleOrder(10**13, 2048, seed=0)
    starts = order.starts(np.arange(order.per_epoch - 500, order.per_epoch + 500))
    assert starts.max() > 2**42
    assert len(set(starts[:500].tolist())) == 500


# --- what a member reads


def sequences_of_step(settings: RunConfig, step: int) -> dict[int, tuple[int, ...]]:
    """Number in the step -> sequence, by the formula of the design, over all members."""
    p = settings.parallel
    found: dict[int, tuple[int, ...]] = {}
    for f in range(p.shards):
        for r in range(p.replicas):
            batches = Batches(settings, counting(1000), f, r)
            for m in range(p.microbatches):
                ids, labels = batches.microbatch(step, m)
                assert ids.shape == labels.shape == (p.microbatch_size, 8)
                assert (labels == ids + 1).all()
                for i, sequence in enumerate(ids.tolist()):
                    found[((m * p.replicas + r) * p.shards + f) * p.microbatch_size + i] = tuple(sequence)
    return found


@pytest.mark.parametrize(
    "layout", [(1, 1, 24, 1), (2, 1, 6, 2), (1, 3, 4, 2), (3, 2, 2, 2), (2, 2, 6, 1), (4, 3, 2, 1)]
)
def test_a_layout_never_changes_what_a_step_sees(layout: tuple[int, int, int, int]) -> None:
    names = ("shards", "replicas", "microbatches", "microbatch_size")
    settings = config(*(f"parallel.{name}={value}" for name, value in zip(names, layout, strict=True)))
    plain = config("parallel.shards=1", "parallel.microbatches=24", "parallel.microbatch_size=1")
    for step in (0, 1, 7):
        assert sequences_of_step(settings, step) == sequences_of_step(plain, step)


def test_steps_follow_one_another_without_a_gap() -> None:
    settings = config("parallel.microbatches=2", "parallel.microbatch_size=3")
    order = SampleOrder(1000, 8, seed=0)
    read = [
        start for step in range(30) for start in (s[0] for _, s in sorted(sequences_of_step(settings, step).items()))
    ]
    assert read == order.starts(np.arange(30 * 12)).tolist()


@pytest.mark.parametrize(("length", "most", "expected"), [(1000, 10, 10), (101, 256, 12), (81, 256, 10), (80, 256, 9)])
def test_validation_reads_the_held_out_text_in_order_once(length: int, most: int, expected: int) -> None:
    settings = config("parallel.replicas=2", "parallel.microbatches=3", f"train.eval_sequences={most}")
    p = settings.parallel
    read: dict[int, list[int]] = {}
    rounds = set()
    for f in range(2):
        for r in range(2):
            batches = Batches(settings, counting(length), f, r)
            rounds.add(batches.validation_rounds)
            for turn in range(batches.validation_rounds):
                for m in range(3):
                    ids, labels = batches.validation_microbatch(turn, m)
                    assert ids.shape == labels.shape == (2, 8)
                    for i in range(2):
                        number = turn * p.global_batch + ((m * 2 + r) * 2 + f) * 2 + i
                        if (labels[i] == IGNORE).all():
                            assert (ids[i] == 0).all()
                        else:
                            assert (labels[i] == ids[i] + 1).all()
                            read[number] = ids[i].tolist()
    assert rounds == {1}
    assert read == {n: list(range(8 * n, 8 * n + 8)) for n in range(expected)}


def test_a_long_validation_takes_more_rounds() -> None:
    settings = config("parallel.microbatches=2", "train.eval_sequences=20")  # 8 sequences a round
    assert Batches(settings, counting(1000), 0, 0).validation_rounds == 3
