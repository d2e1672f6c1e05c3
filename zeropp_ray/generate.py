"""Text from a model, one token after another, in one process.

A model with `new_cache()` and `forward(ids, cache) -> logits`, as the built-in families have, reads each token once:
the cache keeps what its attention needs of those before. Any other layered model reads the whole text again for each
token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zeropp_ray.data.tokenizer import ByteTokenizer, Tokenizer
from zeropp_ray.errors import ConfigError, ZeroppError

_PIECE = 256  # tokens of a prompt that are read at once: bounds the memory of logits that nobody looks at
_UNFINISHED = 8  # tokens that a character may need; after as many it is shown as it is


def has_cache(model: Any) -> bool:
    """Whether `model` can keep what it has read."""
    return hasattr(model, "new_cache")


def generate(
    model: Any,
    prompt: Sequence[int],
    *,
    tokens: int,
    window: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    vocabulary: int | None = None,
    end: int | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Up to `tokens` tokens that follow `prompt`, as they are made; the same for the same `seed`.

    Args:
        window: tokens that the model looks back on at most. A text that outgrows it goes on from its last half.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draws from so many of the likeliest; 0: from all.
        vocabulary: tokens are below this; None: whatever the model's head tells apart.
        end: stop before this token.

    `ConfigError` for an empty prompt or a token that is not in the vocabulary, `ZeroppError` if the logits are not
    finite.
    """
    if not prompt:
        raise ConfigError("the prompt holds no token; give it some text")
    random = torch.Generator().manual_seed(seed)
    text = list(prompt)
    begin = max(0, len(text) - window)
    reader = _Reader(model, use_cache and has_cache(model))
    for _ in range(tokens):
        if len(text) - begin > window:
            begin = len(text) - max(1, window // 2)
            reader = _Reader(model, reader.cached)
        logits = reader.read(text[begin:])[:vocabulary]
        token = draw(logits, temperature, top_k, random)
        if token == end:
            return
        text.append(token)
        yield token


class _Reader:
    """Gives the logits of the token that follows a text which grows at its end."""

    def __init__(self, model: Any, cached: bool) -> None:
        self._model, self.cached = model, cached
        self._cache = model.new_cache() if cached else None
        self._read = 0

    @torch.inference_mode()
    def read(self, text: Sequence[int]) -> Tensor:
        """Logits `[vocabulary]`."""
        if not self.cached:
            return self._whole(text)
        for begin in range(self._read, len(text), _PIECE):
            logits = self._model(torch.tensor([text[begin : begin + _PIECE]]), self._cache)
        self._read = len(text)
        return logits[0, -1]

    def _whole(self, text: Sequence[int]) -> Tensor:
        try:
            h = self._model.embed(torch.tensor([text]))
            for block in self._model.blocks:
                h = block(h)
            return self._model.head(h)[0, -1]
        except Exception as error:  # whatever a user's model raises
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise ZeroppError(f"the model cannot read a text of {len(text)} tokens: {cause}") from error


def draw(logits: Tensor, temperature: float, top_k: int, random: torch.Generator) -> int:
    """A token by its logits `[vocabulary]`; see `generate`."""
    if not bool(logits.isfinite().all()):
        raise ZeroppError(
            "the model gives logits that are not finite; its weights are damaged or its training diverged"
        )
    if temperature == 0:
        return int(logits.argmax())
    values, tokens = logits.double().topk(min(top_k or len(logits), len(logits)))
    chosen = torch.multinomial((values / temperature).softmax(0), 1, generator=random)
    return int(tokens[chosen])


class TextStream:
    """Tokens to text as they come. Half a character waits for its other half, so that what is shown stays right."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt`: the tokens of what is shown already. A word that begins a text has no space before it, by many
        tokenizers; the first one after a prompt does."""
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if isinstance(tokenizer, ByteTokenizer) else None
        self._shown = list(prompt)  # or the last tokens of it: how a token reads depends on the one before
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """What can be shown now that `token` has come."""
        if self._bytes is not None:
            return self._bytes.decode(bytes([token]))
        self._waiting.append(token)
        text = self._following()
        if text.endswith("\ufffd") and len(self._waiting) < _UNFINISHED:
            return ""
        self._shown, self._waiting = self._waiting, []
        return text

    def end(self) -> str:
        """What is left: a character that was never finished becomes U+FFFD."""
        return self._bytes.decode(b"", final=True) if self._bytes is not None else self._following()

    def _following(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._waiting)[len(before) :]
