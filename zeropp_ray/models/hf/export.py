"""Write a model in Hugging Face layout, so that `transformers` loads it with `from_pretrained`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from zeropp_ray.config import ModelSection
from zeropp_ray.errors import ConfigError
from zeropp_ray.models.hf.names import theirs
from zeropp_ray.models.hf.sizes import to_config
from zeropp_ray.models.hf.weights import INDEX, SINGLE, shapes_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_model(
    weight: Callable[[str], Tensor],
    model: ModelSection,
    folder: Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
    dtype: str = "float32",
    end: int | None = None,
    tokenizer: str = "",
    end_token: str = "",
) -> list[Path]:
    """Write `model` with the weights that `weight` gives by our full names to a new folder; its files.

    A file holds at most `max_shard_bytes`, or one tensor; one file's tensors are in memory at a time. `end`: the token
    that ends a text. `tokenizer`: the content of its `tokenizer.json`, in which `end` is written `end_token`. The
    folder appears when it is whole.
    """
    if model.factory:
        raise ConfigError(
            f"model.factory = {model.factory!r}: only the families llama and gpt2 have a Hugging Face layout; the "
            "checkpoint's own files are safetensors too, with one tensor for each parameter"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: there is something already; name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _write_weights(weight, model, partial, max_shard_bytes, DTYPES[dtype])
            _write_json(partial / "config.json", to_config(model, dtype, end))
            if tokenizer:
                (partial / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
                special = {"eos_token": end_token, "bos_token": end_token} if end_token else {}
                _write_json(
                    partial / "tokenizer_config.json",
                    {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special},
                )
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return sorted(folder.iterdir())


def _write_weights(
    weight: Callable[[str], Tensor], model: ModelSection, folder: Path, most: int, dtype: torch.dtype
) -> None:
    shards = list(_split(shapes_of(model), most, dtype.itemsize))
    map_to_file: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            there = theirs(model.family, name)
            tensor = weight(name).detach().to(dtype)
            tensors[there.name] = (tensor.t() if there.transposed else tensor).contiguous()
            total += tensor.nbytes
            map_to_file[there.name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": map_to_file})


def _split(shapes: Mapping[str, tuple[int, ...]], most: int, width: int) -> Iterator[list[str]]:
    """The names of each file, in the model's order."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        bytes_ = torch.Size(shape).numel() * width
        if names and size + bytes_ > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes_
    yield names


def byte_tokenizer() -> str:
    """A `tokenizer.json` whose tokens are the bytes of the text, as ours are without a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the others stand for themselves shifted by 256
    shifted = iter(range(256, 512))
    signs = {chr(byte if byte in printable else next(shifted)): byte for byte in range(256)}
    assert signs.keys() == set(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=signs, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str(pretty=True)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
