"""The memory of tensors, measured: of any code that runs in this thread, ours or another's.

Every storage that an operation reads or makes counts from then on until it is freed. Allocators and the operating
system are not asked, so the figure is exact, the same in every run, and the same on CPU and GPU.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Held:
    """A live storage: its bytes, which kind of memory it is (for who tells kinds apart), and what made it."""

    __slots__ = ("alive", "bytes", "kind", "maker")

    def __init__(self, bytes: int, kind: str, maker: Any, alive: weakref.ref[torch.UntypedStorage]) -> None:
        self.bytes, self.kind, self.maker, self.alive = bytes, kind, maker, alive


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of live tensors while it is entered::

        with TensorMemory() as memory:
            step()
        memory.peak_bytes

    Tensors that exist at the start count too, if Python knows them: of a graph that waits for its backward, autograd
    alone knows some. Views of one storage count once, and a storage at the size that it has at the moment. Not seen:
    what a kernel allocates for itself, and memory that is no tensor's. Operations take several times as long; their
    results are the same. One at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, Held] = {}  # by identity of the storage, which torch keeps as long as it lives
        self._now: tuple[str, Any] = ("", None)  # kind and maker of what comes into being

    def __enter__(self) -> TensorMemory:
        self.bytes = self.peak_bytes = 0
        gc.collect()  # what only cycles hold is nobody's
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):  # isinstance would ask things that only pretend to be something
                self._see(thing)
                if thing.is_leaf and thing.grad is not None:  # Python may never have seen it
                    self._see(thing.grad)
        # No operation, so the mode does not hear of it; how FSDP releases parameters, and we do.
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._live.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor, say: what it does with its local tensor comes by
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta or tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            return
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        held = self._live.get(key)
        if held is None:
            kind, maker = self._now
            self._live[key] = Held(size, kind, maker, weakref.ref(storage, partial(self._freed, key)))
            self._grow(size)
        elif held.bytes != size:
            more, held.bytes = size - held.bytes, size
            self._grow(more)

    def _resized(self, storage: Any, size: int) -> Any:
        result = self._resize(storage, size)
        held = self._live.get(id(storage))
        if held is not None:
            more, held.bytes = storage.nbytes() - held.bytes, storage.nbytes()
            self._grow(more)
        return result

    def _freed(self, key: int, _: Any) -> None:
        held = self._live.pop(key, None)
        if held is not None:
            self.bytes -= held.bytes

    def _grow(self, more: int) -> None:
        self.bytes += more
        self.peak_bytes = max(self.peak_bytes, self.bytes)
