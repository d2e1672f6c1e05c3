"""Sampling: the cache changes nothing, a seed decides everything, and text is never shown in halves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests import reference, user_models
from zeropp_ray.data.tokenizer import ByteTokenizer, FileTokenizer
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.generate import TextStream, draw, generate, has_cache
from zeropp_ray.models.gpt2 import GPT2
from zeropp_ray.models.llama import Llama

VOCAB = 48
FAMILIES = {
    "llama": partial(Llama, layers=3, dim=32, heads=4, kv_heads=2, vocab_size=VOCAB),
    "gpt2": partial(GPT2, layers=3, dim=32, heads=4, vocab_size=VOCAB, context=80),
}


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """With weights that are large enough to make a difference."""
    model = reference.build(FAMILIES[name], 5).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return model


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pieces", [[1] * 70, [70], [30, 1, 1, 38], [5, 65]], ids=str)
@torch.no_grad()
def test_logits_with_a_cache_are_those_without(name: str, pieces: list[int]) -> None:
    model = model_of(name, torch.float64)
    ids = torch.randint(VOCAB, (2, 70), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache()
    cached = torch.cat([model(piece, cache) for piece in ids.split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(cached, model(ids), rtol=1e-10, atol=1e-10)
    assert [kept.length for kept in cache] == [70] * 3


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("window", [80, 16, 1])
def test_generation_with_a_cache_is_that_without(name: str, window: int) -> None:
    settings = {"tokens": 60, "window": window, "temperature": 0.7, "top_k": 10, "seed": 3}
    a, b = (list(generate(model_of(name), [1, 2, 3], use_cache=cache, **settings)) for cache in (True, False))
    assert a == b
    assert len(a) == 60


def test_a_prompt_longer_than_a_piece_or_the_window_is_read() -> None:
    model, prompt = model_of("llama"), [i * 7 % VOCAB for i in range(600)]
    for window in (1000, 300):
        a, b = (list(generate(model, prompt, tokens=5, window=window, use_cache=c, seed=1)) for c in (True, False))
        assert a == b


def test_a_seed_decides() -> None:
    model = model_of("llama")
    one, same, other = (list(generate(model, [1], tokens=40, window=64, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    list(generate(model, [1], tokens=5, window=64))
    assert torch.equal(torch.rand(2), expected), "the global generator is left alone"


def test_temperature_zero_takes_the_likeliest() -> None:
    model = model_of("gpt2")
    text = [4]
    for token in generate(model, [4], tokens=20, window=80, temperature=0, seed=9):
        assert token == int(model(torch.tensor([text]))[0, -1].argmax())
        text.append(token)


def test_top_k_and_temperature_shape_the_choice() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 2.0, -1.0, 3.0])
    random = torch.Generator().manual_seed(0)

    def drawn(temperature: float, top_k: int) -> torch.Tensor:
        return torch.bincount(
            torch.tensor([draw(logits, temperature, top_k, random) for _ in range(4000)]), minlength=6
        )

    assert (drawn(1.0, 2) > 0).sum() == 2  # of three that are equally likely
    assert drawn(1.0, 4).nonzero().flatten().tolist() == [1, 2, 3, 5]
    for temperature in (1.0, 2.0):
        torch.testing.assert_close(drawn(temperature, 0) / 4000, (logits / temperature).softmax(0), atol=0.03, rtol=0)
    assert (drawn(0.01, 0) > 0).tolist() == [False, True, True, False, False, True]


def test_what_stops_and_what_is_refused() -> None:
    model = model_of("llama")
    text = list(generate(model, [1], tokens=40, window=64, seed=1))
    end = text[10]
    assert list(generate(model, [1], tokens=40, window=64, seed=1, end=end)) == text[: text.index(end)]
    assert max(generate(model, [1], tokens=40, window=64, seed=1, vocabulary=5)) < 5
    with pytest.raises(ConfigError, match="prompt holds no token"):
        next(generate(model, [], tokens=1, window=64))
    model.head.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ZeroppError, match="not finite"):
        next(generate(model, [1], tokens=1, window=64))


def test_a_model_without_a_cache_reads_the_text_again() -> None:
    model = user_models.own_model()
    assert not has_cache(model)
    text = list(generate(model, [1], tokens=30, window=16, seed=1))
    assert len(text) == 30
    assert max(text) < 32


def test_a_model_for_one_length_alone_says_so() -> None:
    model = user_models.own_model()
    model.blocks[0] = torch.nn.Bilinear(24, 24, 24)
    with pytest.raises(ZeroppError, match="cannot read a text of 2 tokens: TypeError"):
        next(generate(model, [1, 2], tokens=3, window=16))


# --- text


class Merging:
    """A tokenizer as published ones are: characters cut in pieces, and a space that belongs to the word behind it."""

    identity, vocabulary, end, end_token = "merging", 300, 0, ""

    def encode(self, texts: Any) -> Any:
        raise NotImplementedError

    def decode(self, tokens: Any) -> str:
        pieces = {256: b" Hello", 257: b" w\xc3", 258: b"\xb6rld"}
        return b"".join(pieces.get(t, bytes([t % 256])) for t in tokens).decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("text", ["plain", "é语🙂 mixed \n", "a\ud7ff"])
def test_bytes_become_characters_when_they_are_whole(text: str) -> None:
    stream = TextStream(ByteTokenizer())
    shown = [stream.add(byte) for byte in text.encode()]
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)
    assert stream.end() == ""


def test_bytes_that_are_no_text_do_not_stall() -> None:
    stream = TextStream(ByteTokenizer())
    assert "".join(stream.add(byte) for byte in b"\xffab\xc3") + stream.end() == "\ufffdab\ufffd"


def test_tokens_become_text_when_they_are_whole() -> None:
    stream = TextStream(Merging())  # type: ignore[arg-type]
    assert [stream.add(token) for token in (256, 257, 258, 256)] == ["Hello", "", " wörld", " Hello"]
    assert "".join(stream.add(0xC3) for _ in range(8)) == "\ufffd" * 8, "what never becomes text is shown as it is"
    stream.add(257)
    assert stream.end() == " w\ufffd"


@pytest.fixture(scope="module", params=["Metaspace", "replacing"])
def spaced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """As SentencePiece makes them: a word holds the space before it, and the first one of a text is shown without."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
    if request.param == "Metaspace":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:  # as Llama 2 has it
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    special = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog and the dog does not mind"] * 9, trainer
    )
    path = tmp_path_factory.mktemp("spaced") / "tokenizer.json"
    tokenizer.save(str(path))
    return FileTokenizer(path)


@pytest.mark.parametrize("prompt", ["the quick", "the quick ", "the qui", "d", ""])
@pytest.mark.parametrize("more", [" brown fox", "ck dog", "  lazy", "é🙂 fox", ""])
def test_prompt_and_text_read_as_one(spaced: FileTokenizer, prompt: str, more: str) -> None:
    before, after = (spaced.encode([text])[0].tolist() for text in (prompt, more))
    stream = TextStream(spaced, before)
    shown = "".join(stream.add(token) for token in after) + stream.end()
    assert spaced.decode(before) + shown == spaced.decode(before + after)
