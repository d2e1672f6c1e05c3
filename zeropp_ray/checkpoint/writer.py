"""The member's side of a save: copies at a committed step, then files, off the critical path.

The copy is what the main thread pays. A thread of its own puts parameters together from the shards, over a process
group of its own (on the training group, background traffic crashed or hung), and writes them. Each parameter is put
together at one of the members that own pieces of it, so that they write the files of a stage side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import save_file

from zeropp_ray.checkpoint.manifest import FileEntry
from zeropp_ray.checkpoint.streams import save
from zeropp_ray.comm.base import Group
from zeropp_ray.files import sha256_of, sync
from zeropp_ray.uri import Place, UriPath


@dataclass(frozen=True)
class ParameterCopy:
    """What one member held of a parameter."""

    name: str
    shape: tuple[int, ...]
    pieces: dict[str, torch.Tensor]  # copies of the local piece, flat: "weights", and the moments if it is trained
    ranges: list[tuple[int, int]]  # the elements that each member of the group holds


def write(
    copies: Sequence[ParameterCopy],
    group: Group,
    stage: int,
    folder: Place,
    written: Callable[[], None] = lambda: None,
) -> list[FileEntry]:
    """Put this member's share of the parameters of ``stage`` together and write it. All members of ``group`` call it,
    who own them between them. ``written`` is called after each file.

    Raises OSError if the disk is full or cannot be written, StoreError if an object store does not take it, PeerLost if
    another member of the group is gone.
    """
    weights: dict[str, torch.Tensor] = {}
    optimizer: dict[str, torch.Tensor] = {}
    load = [0] * group.size
    tag = 0
    for copy in copies:
        owner = load.index(min(load))
        load[owner] += math.prod(copy.shape)
        for kind, piece in copy.pieces.items():
            tag += 1
            whole = _assemble(copy, piece, owner, group, tag)
            if whole is not None:
                named, name = (weights, copy.name) if kind == "weights" else (optimizer, f"{kind}.{copy.name}")
                named[name] = whole.view(copy.shape)
    files = []
    for prefix, tensors in (("weights", weights), ("optimizer", optimizer)):
        if tensors:
            path = folder / f"{prefix}-{stage:03d}-{group.rank:03d}.safetensors"
            size, checksum = _saved(tensors, path)
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            files.append(FileEntry(path.name, size, checksum, shapes))
            written()
    return files


def _saved(tensors: dict[str, torch.Tensor], path: Place) -> tuple[int, str]:
    """Size and SHA-256 of a file that is there for good."""
    if isinstance(path, UriPath):
        return save(tensors, path)
    save_file(tensors, path, metadata={"format": "pt"})
    sync(path)
    return path.stat().st_size, sha256_of(path)


def _assemble(copy: ParameterCopy, mine: torch.Tensor, owner: int, group: Group, tag: int) -> torch.Tensor | None:
    """The whole of a parameter (flat) at ``owner``, from the pieces of all; None elsewhere."""
    if group.rank != owner:
        if mine.numel():
            group.send(mine, owner, tag).wait()
        return None
    whole = torch.empty(math.prod(copy.shape), dtype=mine.dtype)
    for rank, (low, high) in enumerate(copy.ranges):
        if rank == owner:
            whole[low:high] = mine
        elif low < high:
            group.receive(whole[low:high], rank, tag).wait()
    return whole
