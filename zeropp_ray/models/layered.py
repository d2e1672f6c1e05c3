"""The layered-model protocol: all that a model needs, to be trained by this project.

A *factory*, `factory(**args) -> model`, gives an ordinary `nn.Module` with

    embed(ids) -> h         ids [b, s] int64, h [b, s, hidden]; a module or a method
    blocks                  nn.ModuleList of at least one module; each h -> h, one tensor of the same shape and dtype
    head(h) -> logits       [b, s, vocabulary]; a module or a method

The model is cut between blocks. Its code runs as it is; it never mentions parallelism, and needs no base class:

    class Net(nn.Module):
        def __init__(self, width=64, depth=4):
            super().__init__()
            self.embed = nn.Embedding(256, width)
            self.blocks = nn.ModuleList(MyBlock(width) for _ in range(depth))
            self.head = nn.Linear(width, 256)

    [model]                 # the run configuration
    factory = "mynet:Net"   # or "package.module:function"; the folder where the command is started is importable
    seq_len = 128
    args = {width = 96}

Initial weights. The model is built on the meta device and each module that holds parameters or buffers itself is
initialised on its own, by the model's `init_module(module)` if it has one, else by the module's `reset_parameters()`
(all layers of torch have it). Either must write all that the module itself holds, and nothing else. A model that
cannot be built so is built whole, on the CPU of every member, and the log says so and why.

A parameter that several modules hold (tied embeddings, a block at several places) goes by its first name in the order
of `named_modules()`, and starts as the first of these modules makes it. A frozen one (requires_grad=False) has no
gradient, no optimizer state and no weight decay; what it holds only the constructor knows, so that a model with frozen
parameters is built whole, too, unless it has `init_module`.

Refused by name: dropout, buffers or parameters that the forward changes, unused parameters, and those that are no plain
nn.Parameter of floating-point numbers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropp_ray.errors import ConfigError
from zeropp_ray.models.gpt2 import GPT2
from zeropp_ray.models.llama import Llama

if TYPE_CHECKING:
    from zeropp_ray.config import ModelSection

Factory = Callable[[], Any]  # gives a layered model


def resolve_factory(model: ModelSection) -> Factory:
    """What builds the configured model, without arguments: the family, or the user's own `model.factory`.

    `ConfigError` if the dotted path cannot be imported or is not callable. The current directory is made importable.
    """
    if model.factory:
        return partial(_load(model.factory), **model.args)
    fields = ("layers", "dim", "heads", "ffn_dim", "vocab_size", "tie_embeddings", "norm_eps")
    sizes: dict[str, Any] = {name: getattr(model, name) for name in fields}
    if model.family == "gpt2":
        return partial(GPT2, **sizes, context=model.context or model.seq_len)
    rotary: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_factor": model.rope_factor}
    return partial(Llama, **sizes, **rotary, kv_heads=model.kv_heads, head_dim=model.head_dim)


def _load(path: str) -> Callable[..., Any]:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that a file of the user never hides one of ours
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise _refuse(
                path, f"there is no module {error.name}; start in the folder that holds it, or install it"
            ) from error
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise _refuse(
            path, f"importing {module_name} failed, {text}; `python -c 'import {module_name}'` shows where"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise _refuse(path, f"{module.__file__} has no {attribute}; define it there, or name what it has")
    if not callable(found):
        raise _refuse(path, f"{attribute} is a {type(found).__name__}; name a function or class that returns the model")
    return found


def _refuse(path: str, what: str) -> ConfigError:
    return ConfigError(f"model.factory = {path!r}: {what}")
