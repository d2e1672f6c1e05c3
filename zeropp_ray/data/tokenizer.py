"""Text to tokens and back: bytes as they are, or by a Hugging Face ``tokenizers`` file.

A tokenizer is known by its identity: ``bytes``, or the SHA-256 of its file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from zeropp_ray.errors import ConfigError
from zeropp_ray.files import expanded
from zeropp_ray.uri import Place

BYTES = "bytes"
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Text to tokens and back. ``identity`` tells it from others; ``end`` is the token after a document."""

    identity: str
    vocabulary: int  # tokens are below this
    end: int
    end_token: str  # how ``end`` is written

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of each text, unsigned; no special token is added."""

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens; what is no text, such as half a character at the end, becomes U+FFFD."""


class ByteTokenizer:
    """Every byte of the UTF-8 is a token.

    Byte 0 ends a document. Text has no use for it, the vocabulary stays 256, so that one model reads plain text and a
    store alike, and a token stays one byte on disk; an end token of its own would be number 256 and double that. A
    byte 0 that a text does hold reads as an end.
    """

    identity, vocabulary, end, end_token = BYTES, 256, 0, "byte 0"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return bytes(token for token in map(int, tokens) if token < 256).decode(errors="replace")


class FileTokenizer:
    """The tokenizer in a ``tokenizer.json``, as the `tokenizers` library writes it and published models carry it."""

    def __init__(self, path: Place, end_token: str = "") -> None:
        """``end_token``: what ends a document; empty takes the first of the usual ones that the file knows.

        Raises ConfigError for a file that is none, and for an end token that it does not know.
        """
        # One thread here: parallel are the processes that prepare, not the library inside each.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        try:
            data = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except OSError as error:
            raise ConfigError(
                f"{path}: no tokenizer can be read there: {error.strerror}; name a tokenizer.json, or 'bytes'"
            ) from None
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(
                f"{path}: not a tokenizer file: {_line(error)}; name a tokenizer.json, or 'bytes'"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        if not known:
            raise ConfigError(f"{path}: a tokenizer without a vocabulary; name a trained one, or 'bytes'")
        self.identity = hashlib.sha256(data).hexdigest()
        self.vocabulary = max(known.values()) + 1
        self.end_token = end_token or next((token for token in _END_TOKENS if token in known), "")
        if self.end_token not in known:
            wanted = f"{end_token!r} is not" if end_token else f"none of {', '.join(_END_TOKENS)} is"
            special = [token for token in known if token[:1] in "<[" and token[-1:] in ">]" and len(token) > 2]
            raise ConfigError(
                f"{path}: {wanted} in its vocabulary; choose the token that ends a document with --end-token, "
                f"such as {' or '.join(sorted(special, key=lambda t: known[t])[:3]) or 'one of its vocabulary'}"
            )
        self.end = known[self.end_token]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def load_tokenizer(name: str | Path = BYTES, end_token: str = "") -> Tokenizer:
    """The tokenizer ``bytes``, or that of the file ``name``; a folder stands for the ``tokenizer.json`` in it."""
    if str(name) == BYTES:
        if end_token:
            raise ConfigError(f"--end-token {end_token}: bytes end a document with byte 0; leave it out")
        return ByteTokenizer()
    path = expanded(name)
    return FileTokenizer(path / "tokenizer.json" if path.is_dir() else path, end_token)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
