"""One thread per process, as a member has, a Ray that neither reports usage nor asks for a token; and fixtures."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def command(tmp_path):
    """Starts ``zeropp train`` as a process of its own; see tests/command.py."""
    from tests.command import CommandRun

    started = []

    def start(*settings: str, **options: Any) -> CommandRun:
        started.append(CommandRun(tmp_path, *settings, **options))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
        run.forget()


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer in the format of published models: byte-level BPE of 500 tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from zeropp_ray.data.corpus import embedded_text

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([embedded_text()[:50_000].decode()], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
