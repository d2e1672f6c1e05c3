"""The weights in a Hugging Face folder, by our names. Nothing is read before it is asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zeropp_ray.config import ModelSection, RunConfig
from zeropp_ray.data.store import TOKENIZER
from zeropp_ray.data.tokenizer import BYTES
from zeropp_ray.models.hf.names import HEAD, NOT_WEIGHTS, PREFIX, Theirs, theirs
from zeropp_ray.models.hf.sizes import refuse
from zeropp_ray.models.layered import resolve_factory

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def initial_weights(config: RunConfig) -> Mapping[str, Tensor] | None:
    """What a run with `model.init_from` starts from, else None."""
    return weights_of(Path(config.model.init_from), config.model) if config.model.init_from else None


def foreign_tokenizer(folder: Path, identity: str) -> bool:
    """Whether the model in `folder` comes with another tokenizer than the one of a text, known by its `identity`."""
    try:
        content = (folder / TOKENIZER).read_bytes()
        vocabulary = len(json.loads(content)["model"]["vocab"]) if identity == BYTES else 0
    except (OSError, ValueError, KeyError, TypeError):
        return False  # it does not say
    return vocabulary != 256 if identity == BYTES else hashlib.sha256(content).hexdigest() != identity


def weights_of(folder: Path, model: ModelSection) -> Mapping[str, Tensor]:
    """Every parameter of `model` by its full name, fp32, from the safetensors files in `folder`.

    `ConfigError` with a list unless the folder holds exactly the model's parameters, in their shapes.
    """
    return _Weights(folder, model)


def shapes_of(model: ModelSection) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a built-in family by full name, tied ones once."""
    with torch.device("meta"):
        built = resolve_factory(model)()
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


class _Weights(Mapping[str, Tensor]):
    def __init__(self, folder: Path, model: ModelSection) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}  # opened, by name
        self._places: dict[str, str] = {}  # their name, with its prefix -> file
        prefix = PREFIX[model.family]
        bare = set()  # names in the files that lack the prefix
        for name, file in self._listed().items():
            if not NOT_WEIGHTS.search(name):
                full = name if name.startswith(prefix) or name == HEAD else prefix + name
                self._places[full] = file
                bare |= {full} if full != name else set()
        self._prefix, self._bare = prefix, bare
        shapes = shapes_of(model)
        self._theirs = {name: theirs(model.family, name) for name in shapes}
        self._check(shapes, model)

    def __getitem__(self, name: str) -> Tensor:
        there = self._theirs[name]
        tensor = self._open(self._places[there.name]).get_tensor(self._stored(there.name))
        return (tensor.t() if there.transposed else tensor).to(torch.float32).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._prefix) if name in self._bare else name

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise refuse(self._folder, f"{file} cannot be read: {error}") from None
        return self._files[file]

    def _listed(self) -> dict[str, str]:
        """Their name -> file."""
        index = self._folder / INDEX
        if index.exists():
            try:
                listed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise refuse(self._folder, f"{INDEX} cannot be used: {error!r}") from None
        elif (self._folder / SINGLE).exists():
            listed = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            pickled = sorted(path.name for path in self._folder.glob("*.bin"))
            hint = f"{pickled[0]} is not loaded, because a pickle can run code; save it as" if pickled else "expected"
            raise refuse(self._folder, f"no weights: {hint} {SINGLE}, or files with {INDEX}")
        for file in set(listed.values()):
            if Path(file).name != file:
                raise refuse(self._folder, f"{INDEX} names {file!r}, which is not in the folder")
        return listed

    def _check(self, shapes: Mapping[str, tuple[int, ...]], model: ModelSection) -> None:
        wrong = []
        for name, shape in shapes.items():
            there = self._theirs[name]
            wanted = shape[::-1] if there.transposed else shape
            found = self._shape(there)
            if found != wanted:
                has = "is missing" if found is None else f"is {list(found)} instead of {list(wanted)}"
                wrong.append(f"{there.name} {has}")
        used = {there.name for there in self._theirs.values()} | ({HEAD} if model.tie_embeddings else set())
        wrong += [f"{name} belongs to no parameter" for name in self._places if name not in used]
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise refuse(self._folder, f"not the model of its config.json: {'; '.join(wrong[:8])}{more}")

    def _shape(self, there: Theirs) -> tuple[int, ...] | None:
        if there.name not in self._places:
            return None
        file = self._open(self._places[there.name])
        try:
            return tuple(file.get_slice(self._stored(there.name)).get_shape())
        except SafetensorError:  # the index says that it is there
            return None
