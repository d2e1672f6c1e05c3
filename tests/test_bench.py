"""The benchmark itself: rounds, losses, what is counted, and the results that it writes. Nothing here is timed."""

from __future__ import annotations

import json
from statistics import median

import pytest
import torch
from click.testing import CliRunner

from bench import __main__ as command
from bench.clock import Clock
from bench.rounds import Outcome, Row, Setting, run_suite
from bench.suites import SUITES, TRAIN, Aim, Suite
from bench.table import as_dict, markdown
from bench.tensor_bytes import Watched, watched
from bench.variant import Variant

MODEL = {"layers": 4, "dim": 32, "heads": 2, "seq_len": 32}
LAYOUT = {"stages": 2, "chunks": 2, "microbatches": 4, "microbatch_size": 2}


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Ours and a peer in two processes each, a plain loop at another learning rate, and one that cannot run."""
    variants = [
        Variant("1F1B", "pipelining", {**LAYOUT, "chunks": 1}, schedule="1F1B"),
        Variant("FSDP2", "fsdp2", {"shards": 2, "microbatches": 1, "microbatch_size": 4}, reshard=True),
        Variant("ours", "ours", LAYOUT),
        Variant("another", "plain", {"microbatches": 4}, {"lr": 0.5}),
        Variant("impossible", "ours", {**LAYOUT, "stages": 5}),
    ]
    suite = Suite("tiny", "Tiny", "1F1B", variants, [Aim("ours", ("1F1B",), 1e-6)])
    setting = Setting({"model": MODEL, "train": TRAIN}, rounds=2, steps=1)
    return run_suite(suite, setting, lambda line: None, Clock(start=5, run=10))


def test_all_take_the_same_steps_to_the_same_loss(outcome: Outcome) -> None:
    assert outcome.rows["ours"].agrees
    assert outcome.rows["FSDP2"].agrees
    assert not outcome.rows["another"].agrees
    assert not outcome.well
    assert all(len(row.seconds) == 2 for row in outcome.rows.values())
    assert {row.tokens for row in outcome.rows.values()} == {8 * 32}


def test_what_does_not_run_is_named_and_left_out(outcome: Outcome) -> None:
    assert "parallel.stages" in outcome.failed["impossible"]
    assert list(outcome.rows) == ["1F1B", "FSDP2", "ours", "another"]


def test_aims_compare_with_the_best_peer_that_trains_the_same() -> None:
    def row(name: str, *seconds: float, peak: int = 0, agrees: bool = True) -> Row:
        watched = [Watched(peak_tensor_bytes=peak), Watched()]
        return Row(Variant(name, "plain"), 2, 8, 1.0, watched, 50.0, agrees=agrees, seconds=list(seconds))

    peers = ("slow", "fast", "wrong", "absent")
    aims = [Aim("ours", peers, 1.5), Aim("ours", peers, 1.5, "memory"), Aim("ours", peers, 1.5, "gradients")]
    suite = Suite("made", "Made up", "slow", [], [*aims, Aim("ours", ("absent",), 1)])
    rows = [row("ours", 1, 2, 8, peak=100), row("slow", 4, 8, 8, peak=160), row("fast", 2, 4, 8, peak=180)]
    rows += [row("wrong", 1, 1, 1, peak=1, agrees=False)]
    speed, memory, gradients = Outcome(suite, {row.variant.name: row for row in rows}).aims()
    assert (speed.peer, speed.ratio, speed.met) == ("fast", (1.5, 2.0, 2.0), True)
    assert (memory.peer, memory.ratio.middle, memory.met) == ("slow", 1.6, True)
    assert (gradients.peer, gradients.ratio.middle, gradients.met) == ("slow", 60 / 50, False)


def test_gathers_and_memory_are_counted_alike(outcome: Outcome) -> None:
    ours, fsdp, pipe = (outcome.rows[name] for name in ("ours", "FSDP2", "1F1B"))
    parameters = 4 * (4 * 32 * 32 + 3 * 32 * 96 + 2 * 32) + 2 * 256 * 32 + 32
    each = fsdp.watched[0]
    # embedding, blocks and head for the forward; for the backward all again but the head, which is kept
    assert each.gathers == 6 + 5
    once = 4 * parameters / 2  # bytes; half of each parameter comes from the other process
    assert once < each.gathered_bytes < 2 * once
    assert ours.watched[0].gathers > 0
    assert ours.watched[0].gathered_bytes == 0  # nobody to gather from
    for row in (ours, pipe):
        # weights, gradients and two moments of half of the model
        assert row.peak_tensor_bytes > 4 * 4 * parameters / 2


def test_results_have_the_rows(outcome: Outcome) -> None:
    setting = Setting({"model": MODEL, "train": TRAIN}, rounds=2, steps=1)
    results = json.loads(json.dumps(as_dict([outcome], setting)))
    rows = {row["name"]: row for row in results["rows"]}
    row = rows["ours"]
    assert row["suite"] == "tiny"
    assert row["processes"] == 2
    assert len(row["tokens_per_s"]) == 2
    assert row["tokens_per_s_median"] == pytest.approx(median(row["tokens_per_s"]))
    assert rows["1F1B"]["ratio_to_limit"] == 1
    assert row["peak_tensor_bytes"] == max(row["peak_tensor_bytes_by_process"])
    assert row["gathered_bytes"] == 0
    assert results["failed"][0]["name"] == "impossible"
    assert results["aims"][0]["met"] is True
    text = markdown([outcome], setting)
    assert "| ours | 2 |" in text
    assert "another (another loss" in text


def test_peak_counts_what_lives_at_a_time() -> None:
    kept = torch.zeros(1000)
    with watched() as before:
        kept.add(1)  # 4000 bytes that go at once
    with watched() as found:
        a = torch.ones(10_000)
        view = a[::2]
        del a
        b = view + 1
        del view, b
        torch.ones(12_000)
    assert found.peak_tensor_bytes - (before.peak_tensor_bytes - 4000) == 40_000 + 20_000


def test_every_suite_holds_its_limit_and_what_it_aims_at() -> None:
    for suite in SUITES.values():
        names = [variant.name for variant in suite.variants]
        assert len(names) == len(set(names))
        assert suite.limit in names
        for aim in suite.aims:
            assert {aim.ours, *aim.peers} <= set(names)
        batches = {
            v.config({"model": MODEL | {"layers": 8}, "train": TRAIN}).parallel.global_batch for v in suite.variants
        }
        assert batches == {16}


def test_the_command_names_the_suites() -> None:
    shown = CliRunner().invoke(command.main, ["--help"])
    assert shown.exit_code == 0
    assert all(name in shown.output for name in SUITES)
