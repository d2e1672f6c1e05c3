"""Build the part of a model that a stage owns, with starting weights that do not depend on the layout.

The model is built on the meta device, where it costs no memory. Then each module that owns something is materialised
and initialised on its own, under a generator seeded from the run seed and the module's full name. So a weight starts
with the same bytes whoever owns it and whatever else they own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from zeropp_ray.models.describe import ModelDescription
    from zeropp_ray.models.layered import Factory


def module_seed(seed: int, name: str) -> int:
    """The seed of the module with full name `name` ("" is the model itself) in a run with seed `seed`."""
    return int.from_bytes(sha256(f"{seed}:{name}".encode()).digest()[:8], "little") % 2**63


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run under fixed global generators of torch (CPU), numpy and Python, and put them back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers, without those of its children."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def initialiser(model: Any, module: nn.Module) -> Callable[[], Any] | None:
    """What initialises `module`'s own tensors: the model's `init_module(m)`, else its own `reset_parameters()`."""
    if hasattr(model, "init_module"):
        return lambda: model.init_module(module)
    return getattr(module, "reset_parameters", None)


@dataclass(frozen=True, eq=False)
class ModelChunk:
    """One of the P·V consecutive pieces of a model. It holds the user's modules and never changes them."""

    index: int  # model chunk
    model: Any  # the layered model
    blocks: range
    first: bool
    last: bool
    parameters: tuple[tuple[str, nn.Parameter], ...]  # (full name, parameter): embed, blocks in order, head

    def modules(self) -> list[nn.Module]:
        """The modules that hold the chunk's parameters themselves, each once, in that order."""
        names = dict.fromkeys(name.rpartition(".")[0] for name, _ in self.parameters)
        return [self.model.get_submodule(name) for name in names]

    def __call__(self, x: Tensor) -> Tensor:
        """`ids [b, s]` on the first chunk, else `h [b, s, h]`, to `h`, or to `logits [b, s, vocab]` on the last."""
        h = self.model.embed(x) if self.first else x
        for i in self.blocks:
            h = self.model.blocks[i](h)
        return self.model.head(h) if self.last else h


@dataclass(frozen=True, eq=False)
class OwnedModel:
    """A model of which only some chunks are real; all other parameters are on the meta device."""

    model: Any
    chunks: dict[int, ModelChunk]  # by model chunk


def build_owned(
    factory: Factory,
    description: ModelDescription,
    ranges: Sequence[range],
    owned: Iterable[int],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> OwnedModel:
    """The model as its factory gives it, with the model chunks in `owned` on the CPU and the rest on meta.

    `description`: from `describe`, of the same factory. `ranges`: the blocks of every model chunk, from `cut`.
    Initialised in the model's own dtype, then floating-point tensors are converted to `dtype`.
    A model that cannot be built on meta (`description.whole` says why) is built whole under `seed` and pruned.
    """
    names = {c: [n for part in description.parts_of(ranges, c) for n in part.parameters] for c in sorted(owned)}
    kept = {name for chunk in names.values() for name in chunk}
    with seeded(seed) if description.whole else torch.device("meta"):
        model = factory()

    blocks = {i for c in names for i in ranges[c]}
    elsewhere = {module for i, block in enumerate(model.blocks) if i not in blocks for module in block.modules()}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        wanted = {key for key in own_tensors(module) if prefix + key in kept}
        if module not in elsewhere:  # buffers have no owner: all but those inside of blocks of others are kept
            wanted |= {key for key, _ in module.named_buffers(recurse=False)}
        if wanted and not description.whole:
            module.to_empty(device="cpu", recurse=False)
            with seeded(module_seed(seed, name)), torch.no_grad():
                initialiser(model, module)()  # type: ignore[misc]
        _keep(module, wanted, dtype)

    parameters, last = dict(model.named_parameters()), len(ranges) - 1
    chunks = {
        c: ModelChunk(c, model, ranges[c], c == 0, c == last, tuple((name, parameters[name]) for name in names[c]))
        for c in names
    }
    return OwnedModel(model, chunks)


@torch.no_grad()
def _keep(module: nn.Module, wanted: set[str], dtype: torch.dtype) -> None:
    """Convert a module's own `wanted` tensors to `dtype`, if they are floating-point; put its others on meta."""
    for name, tensor in own_tensors(module).items():
        new = tensor.to(dtype) if tensor.is_floating_point() else tensor
        new = new if name in wanted else new.to("meta")
        if new is not tensor:
            setattr(module, name, nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new)
