"""Build the part of a model that a stage owns, with starting weights that do not depend on the layout.

The model is built on the meta device, where it costs no memory. Then each module that owns something is materialised
and initialised on its own, under a generator seeded from the run seed and the module's full name. So a weight starts
with the same bytes whoever owns it and whatever else they own. A parameter that several modules hold starts as the
first of them makes it: modules are initialised from the last to the first.
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
from torch.overrides import TorchFunctionMode

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


class _Undrawn(TorchFunctionMode):
    """Leaves out what would fill tensors on meta, which hold no numbers. Some of it is written in Python there, and has
    torch import its compiler: most of a second for every member.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.normal_ or getattr(func, "__module__", "") == "torch.nn.init":
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers, without those of its children."""
    return {key: tensor for key, tensor in {**module._parameters, **module._buffers}.items() if tensor is not None}


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
    parameters: tuple[tuple[str, nn.Parameter], ...]  # all that it uses, by full name: embed, blocks in order, head

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
    names = {
        c: list(dict.fromkeys(name for part in description.parts_of(ranges, c) for name in part.parameters))
        for c in sorted(owned)
    }
    with seeded(seed) if description.whole else torch.device("meta"), _Undrawn():
        model = factory()

    # All as built; what replaces a tensor takes all its places, so that what is tied stays tied.
    own = {name: (module, own_tensors(module)) for name, module in model.named_modules()}
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module, tensors in own.values():
        for key, tensor in tensors.items():
            places.setdefault(tensor, []).append((module, key))

    parameters = dict(model.named_parameters())
    kept: set[Tensor] = {parameters[name] for chunk in names.values() for name in chunk}
    blocks = {model.blocks[i] for c in names for i in ranges[c]}
    for _, module in model.named_modules(memo=set(model.blocks) - blocks):
        kept.update(module.buffers(recurse=False))  # they have no owner: all but those of foreign blocks alone

    made: dict[Tensor, Tensor] = {}
    for name, (module, tensors) in reversed(own.items()):
        if description.whole or kept.isdisjoint(tensors.values()):
            continue
        for tensor in tensors.values():
            if tensor not in made:
                made[tensor] = _put(torch.empty_like(tensor, device="cpu"), tensor, places[tensor])
        with seeded(module_seed(seed, name)), torch.no_grad():
            initialiser(model, module)()  # type: ignore[misc]
    for tensor, where in places.items():
        new = made.pop(tensor, tensor)
        if tensor in kept:  # the same object, for the model may hold it in other ways too
            new.data = new.data.to(dtype if tensor.is_floating_point() else tensor.dtype)
        else:
            _put(new.detach().to("meta"), tensor, where)

    parameters, last = dict(model.named_parameters()), len(ranges) - 1
    chunks = {
        c: ModelChunk(c, model, ranges[c], c == 0, c == last, tuple((name, parameters[name]) for name in names[c]))
        for c in names
    }
    return OwnedModel(model, chunks)


def _put(new: Tensor, old: Tensor, places: Iterable[tuple[nn.Module, str]]) -> Tensor:
    """Set `new` in all places of `old`, as what that was: a buffer, or a Parameter, frozen or not."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for module, key in places:
        setattr(module, key, new)
    return new
