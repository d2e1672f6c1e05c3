"""What a checkpoint is on disk, and its manifest.

::

    runs/NAME/checkpoints/step-00000010/
        manifest.json                     run, step, cursor, configuration, names and checksums
        weights-000-001.safetensors       of stage 0, member 1: full fp32 tensors by parameter name
        optimizer-000-001.safetensors     exp_avg.NAME and exp_avg_sq.NAME

Every parameter is in exactly one file. A folder is made under a name that starts with a dot, and renamed once all files
and the manifest are on disk: what is visible is whole (in an object store, once its manifest is there, see shelf.py).
Loading executes no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeropp_ray.files import check_inside, sync
from zeropp_ray.uri import Place

VERSION = 2
NAME = "manifest.json"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its size, its checksum, and the shape of every tensor in it."""

    name: str
    bytes: int
    sha256: str
    tensors: dict[str, list[int]]


@dataclass(frozen=True)
class Progress:
    """How far a run is. All of it is global: no part depends on the layout."""

    step: int  # steps done, skipped ones included
    commits: int  # optimizer updates among them
    samples: int  # the cursor: number of the next sample
    tokens: int  # valid tokens trained on


@dataclass(frozen=True)
class Manifest:
    version: int
    run: str  # id of the run that it is of, see run_id.py
    progress: Progress
    config: dict[str, Any]  # resolved
    units: list[int]
    data: dict[str, Any]  # what the text was, so that another one is noticed
    files: dict[str, FileEntry]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, by full name."""
        return {
            name: tuple(shape)
            for file in self.files.values()
            if file.name.startswith("weights")
            for name, shape in file.tensors.items()
        }

    def to_json(self) -> str:
        """With a checksum over everything else in it, so that an altered manifest is noticed too."""
        values = asdict(self)
        return json.dumps({"checksum": _checksum(values), **values}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ValueError, KeyError or TypeError if it is none, or one of another version."""
        values = json.loads(text)
        if values["version"] != VERSION:
            age = "newer" if values["version"] > VERSION else "older"
            raise ValueError(f"version {values['version']} is {age} than {VERSION}, which this program reads")
        if values.pop("checksum") != _checksum(values):
            raise ValueError("its checksum differs, it has been altered")
        files = {name: FileEntry(**entry) for name, entry in values.pop("files").items()}
        check_inside(entry.name for entry in files.values())
        return cls(progress=Progress(**values.pop("progress")), files=files, **values)


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def folders(run: Place) -> Iterator[Place]:
    """The checkpoint folders of a run, newest first."""
    found: list[Any] = sorted((run / CHECKPOINTS).glob("step-" + "[0-9]" * 8), reverse=True)
    yield from (path for path in found if isinstance(path, Path) or (path / NAME).exists())


def is_checkpoint(path: Place) -> bool:
    """Whether the folder ``path`` looks like a checkpoint. A token store has a manifest of that name too."""
    return (path / NAME).exists() and not any(path.glob("*.arrow"))


def publish(partial: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest beside the files in ``partial`` and make the whole visible as ``final``."""
    path = partial / NAME
    path.write_text(manifest.to_json(), encoding="utf-8")
    sync(path)
    sync(partial)
    partial.rename(final)
    sync(final.parent)


def entries(parts: Iterable[Iterable[FileEntry]]) -> dict[str, FileEntry]:
    """The files of all members. Raises ValueError if a parameter is in two of them."""
    files = {entry.name: entry for part in parts for entry in part}
    names = [name for entry in files.values() for name in entry.tensors]
    if len(set(names)) != len(names):
        raise ValueError(f"saved twice: {sorted({name for name in names if names.count(name) > 1})}")
    return files
