"""Safetensors files in an object store: written as they go out, and read by ranges. Neither needs a disk.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the length of the header, the header in
JSON with type, shape and range of each tensor, then their bytes, little-endian and in C order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from zeropp_ray.uri import UriPath

_TYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_BLOCK = 1 << 24  # bytes that are handed over at once
_LONGEST_HEADER = 100_000_000  # as the library has it


def save(tensors: Mapping[str, torch.Tensor], to: UriPath) -> tuple[int, str]:
    """Write a file; its size in bytes and its SHA-256. Raises StoreError if the store does not take it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with to.open("wb") as file:
        piece: Any
        for piece in (len(text).to_bytes(8, "little"), text, *map(_bytes, tensors.values())):
            for first in range(0, len(piece), _BLOCK):
                block = piece[first : first + _BLOCK]
                digest.update(block)
                file.write(block)
    return 8 + len(text) + end, digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> Any:
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class RemoteTensors:
    """An open file, as ``safetensors.safe_open`` gives it: one request for each tensor."""

    def __init__(self, path: UriPath) -> None:
        """Raises ValueError if it is no such file, or a damaged one."""
        self._path = path
        total = path.stat().st_size
        length = int.from_bytes(self._read(0, min(8, total)), "little")
        if not 2 <= length <= min(_LONGEST_HEADER, total - 8):
            raise ValueError("its header is damaged")
        try:
            header = json.loads(self._read(8, length))
            header.pop("__metadata__", None)
            self._entries = {
                name: (_TYPES[entry["dtype"]], [int(size) for size in entry["shape"]], *entry["data_offsets"])
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its header cannot be used: {error!r}") from None
        self._first = 8 + length
        for name, (dtype, shape, begin, end) in self._entries.items():
            if (
                not 0 <= begin <= end <= total - self._first
                or torch.Size(shape).numel() * dtype.itemsize != end - begin
            ):
                raise ValueError(f"its header places {name} wrong")

    def keys(self) -> list[str]:
        return list(self._entries)

    def get_tensor(self, name: str) -> torch.Tensor:
        dtype, shape, begin, end = self._entries[name]
        data = bytearray(self._read(self._first + begin, end - begin))
        return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)

    def _read(self, first: int, count: int) -> bytes:
        with self._path.open("at") as file:
            return file.read_at(count, first)
