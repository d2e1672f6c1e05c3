"""Every example is a complete configuration that trains: run at small size by the command, from a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zeropp_ray.config import load_config
from zeropp_ray.data.corpus import embedded_text

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parent.parent
SMALL = ["train.steps=2", "train.warmup_steps=1", "train.eval_sequences=4", "resources.cpus=0.25"]
TINY = ["model.dim=16", "model.heads=2", "model.seq_len=16"]
EXAMPLES = {
    "demo": TINY,
    "own_text": TINY,
    "own_model": ["model.seq_len=16", "model.args.width=16"],
    "store": [*TINY, "model.vocab_size=512", "train.tokens_per_step=256", "train.decay_steps=1"],
    "replicas": [*TINY, "train.tokens_per_step=512"],
    "deep_pipeline": TINY,
    "hf_layers": ["model.seq_len=16"],
}
QUICK = {"own_model", "store"}  # the others are run by make test-all


def zeropp(folder: Path, *arguments: str) -> str:
    """What the command prints, run in ``folder``."""
    done = subprocess.run(
        [sys.executable, "-m", "zeropp_ray", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_example_is_forgotten() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.toml")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_valid_configuration_as_it_stands(name: str) -> None:
    config = load_config(ROOT / "examples" / f"{name}.toml").resolved()
    if name in ("store", "replicas"):
        sequences = config.train.tokens_per_step / config.model.seq_len
        assert config.parallel.global_batch == sequences


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in EXAMPLES])
def test_an_example_trains(name: str, tmp_path: Path, bpe: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    text = embedded_text()[:100_000]
    (tmp_path / "book.txt").write_bytes(text)
    if name == "store":
        (tmp_path / "texts").mkdir()
        for part in range(10):
            (tmp_path / "texts" / f"{part}.txt").write_bytes(text[part * 10_000 : (part + 1) * 10_000])
        zeropp(tmp_path, "data", "prepare", "texts/", "--out", "stores/texts", "--tokenizer", str(bpe))
    settings = [part for setting in (*SMALL, *EXAMPLES[name]) for part in ("--set", setting)]
    zeropp(tmp_path, "train", f"examples/{name}.toml", "--name", "first", *settings)
    summary = json.loads((tmp_path / "runs" / "first" / "summary.json").read_text())
    assert (summary["steps"], summary["skipped_steps"]) == (2, 0)
    assert summary["validation_loss"] > 0
    assert (tmp_path / "runs" / "first" / "tokenizer.json").exists() == (name == "store")
