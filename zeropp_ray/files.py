"""Files: what is in a folder, checksums, and what is on disk for good."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def files_in(folder: Path) -> list[Path]:
    """All files in a folder and those below it, in the order of their paths; hidden ones are left out."""
    inside = (file for file in folder.rglob("*") if not _hidden(file.relative_to(folder)))
    return sorted(file for file in inside if file.is_file())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, read in blocks."""
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
