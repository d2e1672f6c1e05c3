"""What the rest of the system must know of a model before anyone builds it: its parts, their parameters and costs.

Nothing is asked of the user but the layered-model protocol. Which parameters a part uses is read from the autograd
graph of a trial forward on the meta device, so `embed` and `head` may be methods over any modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from zeropp_ray.errors import ConfigError
from zeropp_ray.models.build import initialiser, own_tensors, seeded
from zeropp_ray.models.layered import Factory
from zeropp_ray.precision import FLOAT32, Precision
from zeropp_ray.split_backward import DEFERRED, WeightQueue, can_defer, defer


@dataclass(frozen=True)
class Part:
    """The embedding, one block, or the head."""

    name: str
    parameters: dict[str, tuple[int, ...]]  # full name -> shape of all that it uses, in the model's order
    flops: int  # of the forward, per sequence
    linear_flops: int  # those of them in `nn.Linear`, whose weight gradient is deferred
    frozen_flops: int  # those of them in a frozen `nn.Linear`, which has no weight gradient
    backward: bool  # whether anything up to here is trained, so that a backward comes through
    saved_elements: int  # that autograd keeps from the forward of one sequence; of wide dtypes each counts as several
    stashed_elements: int  # of one sequence, that `B` leaves for `W`: inputs and output gradients of deferred layers
    widest: int  # elements that the widest `nn.Linear` puts out for one sequence
    in_place: bool  # whether it changes the tensor that it is given

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(torch.Size(shape).numel() for shape in self.parameters.values())

    @property
    def cost(self) -> tuple[int, int, int]:
        """FLOPs per sequence of (F, B, W): the gradient of an input costs a forward, and so does that of a weight."""
        gradients = (2 * self.flops - self.frozen_flops) * self.backward
        return self.flops, gradients - self.linear_flops, self.linear_flops


@dataclass(frozen=True)
class ParameterSet:
    """Parameters that the same model chunks use, all trained or all frozen. They are sharded and gathered together."""

    chunks: tuple[int, ...]  # model chunks, ascending
    trained: bool
    shapes: dict[str, tuple[int, ...]]  # by full name

    @property
    def shared(self) -> bool:
        """Whether several chunks use it, as with tied embeddings; else it is one chunk's own."""
        return len(self.chunks) > 1

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


@dataclass(frozen=True)
class ModelDescription:
    """A model's parts and sizes. Plain data; the same for every member of a run."""

    embed: Part
    blocks: tuple[Part, ...]
    head: Part
    seq_len: int
    hidden: int
    vocab: int
    frozen: frozenset[str]  # parameters with requires_grad=False
    deferred: frozenset[str]  # those whose gradient `W` computes
    by_hand: frozenset[str]  # those of them that have a part of it from `B`
    whole: str = ""  # why the model cannot be built on the meta device; empty if it can

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.embed, *self.blocks, self.head)

    @property
    def elements(self) -> int:
        """Number of parameters; one that is shared counts once."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, by full name."""
        return {name: shape for part in self.parts for name, shape in part.parameters.items()}

    def parts_of(self, ranges: Sequence[range], chunk: int) -> tuple[Part, ...]:
        """The parts of one model chunk, in the order of the forward; `ranges` are the blocks of every chunk."""
        first = (self.embed,) if chunk == 0 else ()
        last = (self.head,) if chunk == len(ranges) - 1 else ()
        return (*first, *(self.blocks[i] for i in ranges[chunk]), *last)

    def sets(self, ranges: Sequence[range]) -> tuple[ParameterSet, ...]:
        """All parameters by the model chunks that use them, trained and frozen apart."""
        users: dict[str, dict[int, None]] = {}
        for chunk in range(len(ranges)):
            for part in self.parts_of(ranges, chunk):
                for name in part.parameters:
                    users.setdefault(name, {})[chunk] = None
        sets: dict[tuple[tuple[int, ...], bool], dict[str, tuple[int, ...]]] = {}
        for name, shape in self.shapes.items():
            sets.setdefault((tuple(users[name]), name not in self.frozen), {})[name] = shape
        return tuple(ParameterSet(chunks, trained, shapes) for (chunks, trained), shapes in sets.items())


def describe(factory: Factory, seq_len: int, *, seed: int = 0, precision: Precision = FLOAT32) -> ModelDescription:
    """Try the model on one sequence of `seq_len` tokens in the dtypes of a run: on the meta device, or, if it cannot,
    whole on the CPU.

    `ConfigError` when the model breaks the layered-model protocol, or needs what is not supported: parameters that
    are unused or no plain ones, random numbers, changed buffers or parameters in the forward, another dtype between
    parts than that of the parameters.
    """
    whole = ""
    try:
        with torch.device("meta"):
            model = factory()
        _check_protocol(model)
        whole = _obstacle(model)
        if not whole:
            return _probe(model, seq_len, torch.device("meta"), "", precision)
    except ConfigError:
        raise
    except Exception as error:
        whole = _one_line(error)
    try:
        with seeded(seed):
            model = factory()
        _check_protocol(model)
        return _probe(model, seq_len, torch.device("cpu"), whole, precision)
    except ConfigError:
        raise
    except Exception as error:
        narrow = "" if precision == FLOAT32 else f" with parameters in {_name(precision.compute)} (train.dtype)"
        raise _refuse(
            f"building the model and running one sequence{narrow} failed, {_one_line(error)}; check model.args"
        ) from error


def _check_protocol(model: Any) -> None:
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise _refuse(f"returns {kind}; it must return a torch.nn.Module with embed, blocks and head")
    for part in ("embed", "head"):
        if not callable(getattr(model, part, None)):
            raise _refuse(f"{kind} has no {part}; give it a module or a method of that name")
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, Sequence | nn.ModuleList | nn.Sequential) or not len(blocks):
        raise _refuse(f"{kind} has no blocks; give it `blocks`, an nn.ModuleList of at least one module")
    if not all(isinstance(block, nn.Module) for block in blocks):
        raise _refuse(f"{kind} has blocks that are not modules; make `blocks` an nn.ModuleList")


def _obstacle(model: nn.Module) -> str:
    """Why this model, built on meta, cannot be initialised module by module; empty if it can.

    An initialiser has to write all of its module's own tensors and no others: else a weight would start as garbage, or
    in a way that depends on what else the member owns.
    """
    holders: dict[int, list[nn.Module]] = {}  # of each tensor, in the model's order
    for module in model.modules():
        for tensor in own_tensors(module).values():
            holders.setdefault(_storage(tensor), []).append(module)
    for name, module in model.named_modules():
        kind = f"{name or 'the model'} ({type(module).__name__})"
        plain = [value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")]
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(plain)):
            return f"{kind} keeps a tensor that is neither a parameter nor a buffer"
        if not own_tensors(module):
            continue
        if any(parameter._backward_hooks for parameter in module.parameters(recurse=False)):
            return f"{kind} has a parameter with a hook on its gradient, which only the constructor can set"
        if not hasattr(model, "init_module") and not all(p.requires_grad for p in module.parameters(recurse=False)):
            return f"{kind} has a frozen parameter, whose values only the constructor knows as there is no init_module"
        initialise = initialiser(model, module)
        if initialise is None:
            return f"{kind} has parameters or buffers of its own and no reset_parameters()"
        with _Watch() as watch, torch.no_grad():
            initialise()
        own = {key: _storage(tensor) for key, tensor in own_tensors(module).items()}
        # What is shared starts as the first module that holds it makes it; the others need not.
        missed = [key for key, at in own.items() if at not in watch.written and holders[at][0] is module]
        if not missed and all(module in holders.get(at, [module]) for at in watch.written):
            continue
        fault = f"leaves its {missed[0]} as it was" if missed else "writes to other modules too"
        if hasattr(model, "init_module"):
            raise _refuse(
                f"init_module, called with {kind}, {fault}; it must write all that this module itself holds, only that"
            )
        return f"reset_parameters() of {kind} {fault}"
    return ""


class _Watch(TorchDispatchMode):
    """Notes which storages are read, which are written in place, and whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()  # written in place or not
        self.made: set[int] = set()
        self.written: set[int] = set()
        self.random = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _storages(args, kwargs)
        self.read |= read
        arguments = func._schema.arguments
        given = (
            {a.name: a.default_value for a in arguments}
            | dict(zip((a.name for a in arguments), args, strict=False))
            | kwargs
        )
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = tree_leaves(given.get(argument.name))
                self.written |= {_storage(tensor) for tensor in written if isinstance(tensor, Tensor)}
        # Attention kernels carry the tag for the dropout that they could do.
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p") != 0.0:
            self.random = str(func)
        result = func(*args, **kwargs)
        self.made |= _storages(result) - read
        return result


def _probe(model: Any, seq_len: int, device: torch.device, whole: str, precision: Precision) -> ModelDescription:
    """Run embed, each block and head once on one sequence, and note what each uses and costs."""
    trial = _Trial(model, precision)
    h = trial.run("embed", model.embed, torch.zeros(1, seq_len, dtype=torch.int64, device=device))
    if h.ndim != 3 or h.shape[:2] != (1, seq_len) or not h.is_floating_point():
        raise _refuse(f"embed returns {_kind(h)} for ids [1, {seq_len}]; it must return h [1, {seq_len}, hidden]")
    if h.dtype != precision.compute:
        raise _refuse_dtype("embed returns", h, precision)
    for i, block in enumerate(model.blocks):
        y = trial.run(f"blocks.{i}", block, h)
        if y.dtype != h.dtype:
            raise _refuse_dtype(f"blocks.{i} returns", y, precision)
        if y.shape != h.shape:
            raise _refuse(f"blocks.{i} turns {_kind(h)} into {_kind(y)}; a block must keep shape and dtype")
        h = y
    logits = trial.run("head", model.head, h)
    if logits.ndim != 3 or logits.shape[:2] != (1, seq_len):
        raise _refuse(f"head returns {_kind(logits)}; it must return logits [1, {seq_len}, vocabulary]")
    used = trial.trained | trial.frozen & {name for part in trial.parts for name in part.parameters}
    unused = [name for name in trial.names.values() if name not in used]
    if unused:
        reading = [part.name for part in trial.parts if unused[0] in part.parameters]
        if reading:
            raise _refuse(
                f"{reading[0]} uses {unused[0]} where no gradient reaches it, as under torch.no_grad or {_REENTRANT}; "
                f"let a gradient through, or set its requires_grad to False; for checkpointing {_CHECKPOINTING}"
            )
        raise _refuse(
            f"no part uses {unused[0]} to make the logits; unused parameters are not supported yet, remove it"
        )
    if not trial.trained:
        raise _refuse("all parameters have requires_grad=False, there is nothing to train; leave it True for some")
    embed, *blocks, head = trial.parts
    return ModelDescription(
        embed,
        tuple(blocks),
        head,
        seq_len,
        h.shape[-1],
        logits.shape[-1],
        frozenset(trial.frozen),
        frozenset(trial.deferred),
        frozenset(trial.by_hand),
        whole,
    )


_REENTRANT = "torch.utils.checkpoint with use_reentrant=True"
_CHECKPOINTING = "take use_reentrant=False, or leave it out and set parallel.recompute"


class _Trial:
    """A trial forward, part by part."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.model = model
        self._width = precision.compute.itemsize
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}  # the first, if it is shared
        self.trained: set[str] = set()  # those that a backward from a part reaches
        self.frozen = {name for parameter, name in self.names.items() if not parameter.requires_grad}
        self.by_hand: set[str] = set()  # deferred ones that are used in other ways than by their layer as well
        self.parts: list[Part] = []
        modules = [module for module in model.modules() if type(module) is nn.Linear]
        self._linears = [m for m in modules if can_defer(m) or not m.weight.requires_grad]
        self._deferring = [module for module in model.modules() if can_defer(module)]
        self.deferred = {self.names[weight] for weight in defer(model, WeightQueue())}
        self._storages: dict[int, str] = {}
        for parameter, name in self.names.items():
            if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
                kind = "" if type(parameter) is nn.Parameter else f"a {type(parameter).__name__} of "
                what = f"{kind}{str(parameter.dtype).removeprefix('torch.')}"
                raise _refuse(f"{name} is {what}; make it a plain nn.Parameter of floating-point numbers")
            if parameter._post_accumulate_grad_hooks:
                raise _refuse(
                    f"{name} has a hook on its accumulated gradient, which is spread over members and micro-batches; "
                    "use register_hook, which sees that of one micro-batch"
                )
            other = self._storages.setdefault(_storage(parameter), name)
            if other != name:
                raise _refuse(
                    f"{name} and {other} are two parameters in the same memory; to share one, assign the same "
                    "nn.Parameter to both"
                )
        precision.apply(model)
        self._storages = {_storage(parameter): name for parameter, name in self.names.items()}

    def run(self, part: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(bool(self.trained))
        names = self._storages | {_storage(buffer): name for name, buffer in self.model.named_buffers()}
        saved = _Saved(watch := _Watch(), self._width)
        with (
            _flops_of(self._linears) as (linear, frozen),
            _stashes_of(self._deferring) as stashes,
            FlopCounterMode(display=False) as counter,
            watch,
            saved,
            torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor),
        ):
            given = x.clone()  # not a leaf, as in a whole model: a part may work on it in place
            y = function(given)
        if not isinstance(y, Tensor):
            raise _refuse(f"{part} returns {type(y).__name__}; it must return one tensor")
        if watch.random:
            raise _refuse(f"{part} draws random numbers ({watch.random}); that is not supported yet, set dropout to 0")
        changed = sorted(names[storage] for storage in watch.written if storage in names)
        if changed:
            kind = "parameter" if changed[0] in self._storages.values() else "buffer"
            raise _refuse(f"{part} changes its {kind} {changed[0]} in the forward; that is not supported yet")
        if any(node.name() == "CheckpointFunctionBackward" for node in _graph(y)):
            raise _refuse(f"{part} uses {_REENTRANT}, which hides its parameters from autograd; {_CHECKPOINTING}")
        used = {self._storages[storage] for storage in watch.read if storage in self._storages}
        for leaf, deferred in _uses(y):
            name = self.names.get(leaf)
            if name is not None and name not in used:
                raise _refuse(
                    f"{part} uses what an earlier part made from {name}; a part gets h and its own parameters only"
                )
            if name is not None:
                self.trained.add(name)
                if name in self.deferred and not deferred:
                    self.by_hand.add(name)
            elif leaf is not x:
                raise _refuse(
                    f"{part} uses a parameter {_kind(leaf)} that is not registered in the model; make it an "
                    "nn.Parameter of one of its modules, and lists of modules an nn.ModuleList"
                )
        shapes = {name: tuple(p.shape) for p, name in self.names.items() if name in used}
        flops = counter.get_total_flops()
        kept = saved.elements, stashes.elements, stashes.widest, _storage(given) in watch.written
        self.parts.append(Part(part, shapes, flops, sum(linear), sum(frozen), bool(self.trained), *kept))
        return y


class _Saved(TorchFunctionMode):
    """What autograd keeps from a forward and the forward made: parameters and tables are there anyway. Views of one
    storage count once.

    On meta, attention falls back to a kernel that keeps the matrix of scores; what trains keeps its inputs and output
    only, and puts heads last.
    """

    def __init__(self, watch: _Watch, width: int) -> None:
        super().__init__()
        self._watch, self._width = watch, width
        self._kept: dict[int, Tensor] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) in self._watch.made:
            self._kept.setdefault(_storage(tensor), tensor)
        return tensor

    @property
    def elements(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values()) // self._width

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            y = func(*args, **kwargs)
            if y.is_meta and y.ndim == 4:
                y = y.transpose(1, 2).contiguous().transpose(1, 2)
        for tensor in (*args, *kwargs.values(), y):
            if isinstance(tensor, Tensor):
                self.keep(tensor)
        return y


def _graph(y: Tensor) -> Iterator[Any]:
    """The nodes of the autograd graph behind `y`, without those that fill a `.grad`."""
    todo = [y.grad_fn] if y.grad_fn is not None else []
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        following = {after for after, _ in node.next_functions if after is not None and not hasattr(after, "variable")}
        todo += following - seen
        seen |= following


def _uses(y: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Each use of a tensor whose `.grad` a backward from `y` would fill, and whether it is that of a deferred layer."""
    for node in _graph(y):
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                yield following.variable, node.name() in DEFERRED


@contextmanager
def _flops_of(linears: Sequence[nn.Linear]) -> Iterator[tuple[list[int], list[int]]]:
    """Collects the FLOPs of each call of one of these: of trained ones, and of frozen ones."""
    flops: tuple[list[int], list[int]] = ([], [])

    def count(module: nn.Linear, args: Any, y: Tensor) -> None:
        flops[not module.weight.requires_grad].append(2 * y.numel() * module.in_features)

    handles = [module.register_forward_hook(count) for module in linears]
    try:
        yield flops
    finally:
        for handle in handles:
            handle.remove()


class _Stashes:
    """What deferred layers stash in the backward of a forward that runs now; a gradient has the size of its output."""

    def __init__(self) -> None:
        self._inputs: dict[int, Tensor] = {}
        self._gradients = self.widest = 0

    def note(self, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        self._inputs |= {_storage(x): x for x in args}
        self._gradients += y.numel()
        self.widest = max(self.widest, y.numel())

    @property
    def elements(self) -> int:
        return self._gradients + sum(x.numel() for x in self._inputs.values())


@contextmanager
def _stashes_of(modules: Sequence[nn.Module]) -> Iterator[_Stashes]:
    stashes = _Stashes()
    handles = [module.register_forward_hook(stashes.note) for module in modules]
    try:
        yield stashes
    finally:
        for handle in handles:
            handle.remove()


def _storages(*values: Any) -> set[int]:
    return {_storage(tensor) for tensor in tree_leaves(values) if isinstance(tensor, Tensor)}


def _storage(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor, also on meta; views share it."""
    return tensor.untyped_storage()._cdata


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {_name(tensor.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _refuse_dtype(what: str, h: Tensor, precision: Precision) -> ConfigError:
    wanted, given = _name(precision.compute), _name(h.dtype)
    return _refuse(
        f"{what} h in {given}, and parameters are {wanted} (train.dtype); h must be {wanted} too: cast what raises it, "
        f"such as a buffer in {given}, with .to(h.dtype)"
    )


def _refuse(what: str) -> ConfigError:
    return ConfigError(f"model.factory: {what}")
