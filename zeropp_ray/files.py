"""Files: what is in a folder, checksums, and what is on disk for good."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zeropp_ray.errors import ConfigError


def expanded(path: str | Path, named: str = "") -> Path:
    """The path, with the home folder that a leading ``~`` or ``~user`` stands for.

    Raises ConfigError that begins with ``named``, or else the path, if there is no such folder, or it is a URI.
    """
    if isinstance(path, str) and "://" in path:
        setting = named.partition(" ")[0] or f"{path.partition('://')[0]}://"  # it may hold a secret
        raise ConfigError(f"{setting}: a URI does not do here; give a path on this machine")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{named or path}: no home folder of {Path(path).parts[0]} is known; write out the whole path"
        ) from None


def check_inside(names: Iterable[str]) -> None:
    """ValueError if one of the ``names``, which a file gives, is more than that of a file beside it."""
    for name in names:
        if name in ("", "..") or Path(name).name != name:
            raise ValueError(f"it names {name!r}, which is not in its folder")


def files_in(folder: Path) -> list[Path]:
    """All files in a folder and those below it, in the order of their paths; hidden ones are left out."""
    inside = (file for file in folder.rglob("*") if not _hidden(file.relative_to(folder)))
    return sorted(file for file in inside if file.is_file())


def sha256_of(path: Any) -> str:
    """SHA-256 of a file, or of what a URI names, in hexadecimal, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
