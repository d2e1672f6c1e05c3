"""What one does with a trained model: sample from it, evaluate it, export it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from jobs.cli import zeropp
from tests import user_models
from tests.saved import saved_run
from zeropp_ray.checkpoint.reader import find, load_model
from zeropp_ray.config import RunConfig
from zeropp_ray.data.prepare import prepare
from zeropp_ray.data.text import keep_tokenizer, text_of, tokenizer_of
from zeropp_ray.data.tokenizer import FileTokenizer
from zeropp_ray.errors import ConfigError
from zeropp_ray.evaluation import IGNORE, Loss, MemberWindows, Request, Windows, evaluate
from zeropp_ray.generate import generate

SMALL = {"layers": 4, "dim": 32, "heads": 2, "seq_len": 32}
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. é🙂\n" * 40


def run(*arguments: str) -> Result:
    return CliRunner().invoke(zeropp, arguments)


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    return result.stderr.splitlines()[-1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.fixture
def first(here: Path) -> Any:
    """The run runs/first, on bytes; its model."""
    return saved_run(
        here / "runs" / "first", RunConfig.from_dict({"model": SMALL, "data": {"path": str(here / "text.txt")}})
    )


@pytest.fixture
def tokenized(here: Path) -> Path:
    """The run runs/second on a token store with a tokenizer of its own; the store."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|stop|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(here / "tokenizer.json"))
    prepare([here / "text.txt"], here / "store", tokenizer=here / "tokenizer.json", end_token="<|stop|>", workers=1)
    identity = FileTokenizer(here / "tokenizer.json", "<|stop|>").identity
    values = {"model": SMALL | {"vocab_size": 320}, "data": {"path": str(here / "store"), "tokenizer": identity}}
    saved_run(here / "runs" / "second", RunConfig.from_dict(values))
    return here / "store"


# --- sample


def test_sample_goes_on_with_the_prompt(first: Any) -> None:
    arguments = ("sample", "first", "--prompt", "The é", "--tokens", "80", "--seed", "4", "--top-k", "20")
    result = run(*arguments, "--temperature", "0.7")
    assert result.exit_code == 0, result.output
    tokens = generate(first, list("The é".encode()), tokens=80, window=32, temperature=0.7, top_k=20, seed=4, end=0)
    assert result.stdout == bytes([*"The é".encode(), *tokens]).decode(errors="replace") + "\n"
    assert "step-00000010, seed 4" in result.stderr
    assert "tok/s" in result.stderr
    assert run(*arguments, "--temperature", "0.7").stdout == result.stdout
    assert run(*arguments, "--temperature", "1.7").stdout != result.stdout


def test_sample_without_a_seed_says_which_it_took(first: Any) -> None:
    one, other = run("sample", "first"), run("sample", "runs/first")
    seed = one.stderr.split("seed ")[1].split()[0]
    assert one.stdout != other.stdout
    assert run("sample", "first", "--seed", seed).stdout == one.stdout


def test_sample_speaks_the_run_s_tokens_also_when_its_store_is_gone(tokenized: Path, here: Path) -> None:
    arguments = ("sample", "second", "--prompt", "quick é", "--tokens", "60", "--seed", "1")
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("quick é")
    folder = here / "runs" / "second"
    keep_tokenizer(find(folder).config, folder)
    for part in tokenized.rglob("*.arrow"):
        part.unlink()
    assert run(*arguments).stdout == first.stdout
    shutil.rmtree(tokenized)
    assert run(*arguments).stdout == first.stdout
    (folder / "tokenizer_config.json").unlink()
    assert "none of <|endoftext|>" in refused(run(*arguments))
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer can be read" in refused(run(*arguments))


def test_sample_keeps_the_space_between_the_prompt_and_what_follows(here: Path) -> None:
    import tokenizers

    words = ["</s>", *(f"▁{word}" for word in TEXT.split()[:9])]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer, tokenizer.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    folder = here / "runs" / "third"
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    identity = FileTokenizer(folder / "tokenizer.json").identity
    saved_run(folder, RunConfig.from_dict({"model": SMALL | {"vocab_size": 16}, "data": {"tokenizer": identity}}))
    result = run("sample", "third", "--prompt", "The quick", "--tokens", "5", "--seed", "1")
    assert result.exit_code == 0, result.output
    shown = result.stdout.split()
    assert shown[:2] == ["The", "quick"]
    assert len(shown) == 7


def test_a_checkpoint_that_was_copied_out_of_its_run_is_enough(first: Any, tokenized: Path, here: Path) -> None:
    """With the run's tokenizer beside it, when the run and its store are gone."""
    second, sample = here / "runs" / "second", ("--prompt", "quick", "--tokens", "20", "--seed", "1")
    keep_tokenizer(find(second).config, second)
    before = run("sample", "second", *sample).stdout
    for name in ("first", "second"):
        shutil.copytree(here / "runs" / name / "checkpoints" / "step-00000010", here / "alone" / name)
    for file in second.glob("tokenizer*.json"):
        shutil.copy(file, here / "alone" / "second")
    for folder in (here / "runs", tokenized):
        shutil.rmtree(folder)
    again = run("sample", "alone/second", *sample)
    assert (again.stdout, again.stderr.count("warning")) == (before, 0)
    assert run("export", "alone/second", "exported").exit_code == 0
    assert run("eval", "alone/first", "--data", "text.txt", "--one-process").exit_code == 0
    assert run("checkpoint", "verify", "alone/first").output == "alone/first: good\n"


def test_sample_from_a_model_of_ones_own_says_that_it_is_slow(here: Path) -> None:
    model = {"factory": "tests.user_models:own_model", "seq_len": 16, "args": {"vocab": 256}}
    saved_run(here / "runs" / "own", RunConfig.from_dict({"model": model}))
    result = run("sample", "own", "--tokens", "20", "--seed", "1")
    assert result.exit_code == 0, result.output
    assert "the model has no cache and reads all of the text for each token" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere: neither the folder of a run or checkpoint nor the name of a run"),
        (("first", "--prompt", ""), "--prompt: holds no text"),
        (("first", "--temperature", "-1"), "Invalid value for '--temperature'"),
        (("first", "--tokens", "0"), "Invalid value for '--tokens'"),
    ],
)
def test_what_sample_cannot_do_is_exit_2(first: Any, arguments: tuple[str, ...], message: str) -> None:
    result = run("sample", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_terminal_sees_no_control_characters() -> None:
    from jobs.sample import _CONTROLS

    assert "a\x1b[2J\x00\t\n\x7f\x9bé".translate(_CONTROLS) == "a␛[2J␀\t\n␡\ufffdé"


def test_a_loaded_model_has_the_buffers_of_its_run(here: Path) -> None:
    config = RunConfig.from_dict({"model": {"factory": "tests.user_models:RandomBuffer", "seq_len": 16}})
    of_the_run = saved_run(here / "runs" / "own", config)
    loaded, ids = load_model(find("runs/own")), torch.arange(16)[None]
    assert torch.equal(loaded.features.table, of_the_run.features.table)  # type: ignore[union-attr]
    assert torch.equal(loaded.embed(ids), of_the_run.embed(ids))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("was", "now", "differs"),
    [
        ({}, {"width": 48}, "tokens.weight was [256, 24] and is [256, 48]"),
        ({}, {"depth": 6}, "blocks.5.norm.weight is new"),
        ({"length": 1}, {"length": 16}, "positions was [1, 24] and is [16, 24]"),  # copying would repeat it
    ],
)
@pytest.mark.parametrize("command", [("sample",), ("eval", "--one-process"), ("eval",)], ids=" ".join)
def test_a_model_of_ones_own_that_has_changed_since_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], was: Any, now: Any, differs: str
) -> None:
    model = {"factory": "tests.user_models:own_model", "seq_len": 16, "args": {"vocab": 256} | was}
    saved_run(here / "runs" / "own", RunConfig.from_dict({"model": model, "parallel": {"chunks": 1}}))
    monkeypatch.setattr(user_models, "own_model", lambda **args: user_models.Own(**args | now))
    message = refused(run(command[0], "own", *command[1:]))
    assert "step-00000010: the model has changed: " in message
    assert differs in message
    assert message.endswith("; bring its code back to what it was, or train anew")


# --- evaluate


@pytest.mark.parametrize(("length", "most"), [(33, 0), (34, 0), (2, 0), (200, 0), (200, 4), (200, 99)])
def test_windows_predict_every_token_but_the_first_once(length: int, most: int) -> None:
    windows = Windows(np.arange(length), 32, most)
    ids, labels = windows.batch(np.arange(windows.count + 3))
    counted = labels != IGNORE
    assert labels[counted].tolist() == list(range(1, length if not 0 < most < 7 else 32 * most + 1))
    assert (labels[counted] == ids[counted] + 1).all()


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (2, 1), (3, 2)])
def test_members_read_every_window_once(shards: int, replicas: int) -> None:
    config = RunConfig.from_dict({"parallel": {"shards": shards, "replicas": replicas, "microbatches": 2}})
    windows, read = Windows(np.arange(1000), 8), []
    for f in range(shards):
        for r in range(replicas):
            member = MemberWindows(windows, config, f, r)
            for round in range(member.validation_rounds):
                for m in range(2):
                    _, labels = member.validation_microbatch(round, m)
                    read += labels[labels != IGNORE].tolist()
    assert sorted(read) == list(range(1, 1000))


def test_eval_is_the_plain_loss_of_the_whole_text(first: Any, here: Path) -> None:
    text = (here / "text.txt").read_bytes()[:1001]
    (here / "other.txt").write_bytes(text)
    total = 0.0
    for begin in range(0, 1000, 32):
        tokens = torch.tensor(list(text[begin : begin + 33]))
        logits = first(tokens[None, :-1])[0].detach()
        total += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
    result = run("eval", "first", "--data", "other.txt", "--one-process", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["tokens"], found["sequences"], found["step"]) == (1000, 32, 10)
    assert found["loss"] == pytest.approx(total / 1000, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(total / 1000), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(total / 1000 / math.log(2), rel=1e-6)
    shown = run("eval", "first", "--data", "other.txt", "--one-process", "--sequences", "3").stdout
    assert "96 tokens predicted in 3 sequences" in " ".join(shown.split())
    assert "nats per token" in shown


def test_eval_reads_the_run_s_own_held_out_text(first: Any, here: Path) -> None:
    found = json.loads(run("eval", "first", "--one-process", "--json").stdout)
    size = (here / "text.txt").stat().st_size
    assert found["tokens"] == int(size * 0.05) - 1
    assert found["text"].startswith("validation part of")
    train = json.loads(run("eval", "first", "--one-process", "--json", "--split", "train").stdout)
    assert train["tokens"] == size - int(size * 0.05) - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("first", "--data", "nowhere"), "nowhere: no such file or folder"),
        (("first", "--data", "tiny.txt"), "a text of 1 tokens predicts nothing"),
        (("first", "--data", "store"), "made into tokens otherwise"),
        (("second", "--data", "text.txt"), "raw text is read as bytes, and the run's tokenizer is another"),
        (("first", "--stages", "8"), "model.layers = 4: fewer than the 16 model chunks"),
    ],
)
def test_what_eval_cannot_do_is_refused(
    first: Any, tokenized: Path, here: Path, arguments: tuple[str, ...], message: str
) -> None:
    (here / "tiny.txt").write_bytes(b"x")
    assert message in refused(run("eval", *arguments))


def test_eval_of_a_token_store_takes_its_held_out_part(tokenized: Path) -> None:
    config = find("runs/second").config
    text = text_of(config, str(tokenized))
    assert len(text.tokens) < len(text_of(config, str(tokenized), "train").tokens)
    found = json.loads(run("eval", "second", "--data", "store", "--one-process", "--json").stdout)
    assert (found["tokens"], found["bits_per_byte"]) == (len(text.tokens) - 1, None)


def test_losses_add_up() -> None:
    assert Loss(3.0, 2) + Loss(1.0, 2) == Loss(4.0, 4)
    assert Loss(4.0, 4).per_token == 1.0
    assert math.isnan(Loss(0.0, 0).per_token)
    assert Loss(1e9, 1).perplexity > 1e300, "a diverged model still has a line"


@pytest.mark.ray
def test_eval_under_the_pipeline_is_that_in_one_process(
    first: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))  # for Ray's processes, which start elsewhere
    from actors.run import run_evaluation
    from jobs.evaluate import _laid_out

    checkpoint, request = find("runs/first"), Request(str(here / "text.txt"))
    config = _laid_out(checkpoint.config, {"stages": 2, "chunks": 2, "shards": 2, "microbatches": 3})
    alone = evaluate(load_model(checkpoint), request.windows(config)[0], 7)
    together = run_evaluation(config, checkpoint, request, address=None)
    assert together.tokens == alone.tokens
    assert together.per_token == pytest.approx(alone.per_token, rel=1e-5)


# --- export


def test_an_exported_run_is_a_model_and_a_tokenizer_of_transformers(first: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra dev")
    result = run("export", "first", "--to", "hf", "exported", "--max-shard-size", "50KB")
    assert result.exit_code == 0, result.output
    assert "model.safetensors.index.json" in result.stdout
    theirs, tokenizer = (
        kind.from_pretrained("exported") for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    ids = tokenizer("The é", return_tensors="pt").input_ids
    torch.testing.assert_close(theirs(ids).logits, first(ids), rtol=1e-5, atol=1e-5)
    assert theirs.config.max_position_embeddings == 32
    assert theirs.generation_config.eos_token_id == 0, "no foreign token ends a text"
    assert "already" in refused(run("export", "first", "--to", "hf", "exported"))


def test_an_exported_run_brings_its_own_tokenizer(tokenized: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra dev")
    assert run("export", "second", "exported").exit_code == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")
    ours, file = tokenizer_of(find("runs/second").config, Path("runs/second"))
    assert file == tokenized / "tokenizer.json"
    assert tokenizer("quick é").input_ids == ours.encode(["quick é"])[0].tolist()
    assert tokenizer.eos_token == "<|stop|>"


@pytest.mark.parametrize("text", ["", "5", "5XB", "-1GB", "0GB", "GB"])
def test_a_size_that_is_none_is_refused(first: Any, text: str) -> None:
    result = run("export", "first", "out", "--max-shard-size", text)
    assert (result.exit_code == 0) == (text == "5")
    assert "expected a size, such as 5GB" in result.stderr or text == "5"


def test_sizes_are_read_as_they_are_written_elsewhere() -> None:
    from jobs.export import _bytes

    assert [_bytes(text) for text in ("5GB", "1.5 MB", "2GiB", "300kB", "7")] == [
        5 * 10**9,
        1_500_000,
        2**31,
        300_000,
        7,
    ]


def test_another_tokenizer_than_the_run_s_is_refused(tokenized: Path, here: Path) -> None:
    config = find("runs/second").config
    shutil.rmtree(tokenized)
    content = (here / "tokenizer.json").read_text().replace("<|stop|>", "<|endoftext|>")
    (here / "runs" / "second" / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="another tokenizer than the run's"):
        tokenizer_of(config, here / "runs" / "second")
