"""A run's id: which checkpoints are its own, whatever its folder is called and wherever it lies."""

from __future__ import annotations

import secrets
from pathlib import Path

from zeropp_ray.errors import ConfigError
from zeropp_ray.files import sync
from zeropp_ray.uri import Place

FILE = "run-id"


def create(run: Place) -> None:
    """Draw the id of the new run in folder ``run``, and have it on disk."""
    path = run / FILE
    path.write_text(secrets.token_hex(16) + "\n", encoding="utf-8")
    if isinstance(path, Path) and isinstance(run, Path):
        sync(path)
        sync(run)


def read(run: Place) -> str:
    """The id of the run in folder ``run``. ConfigError if its file is gone: no checkpoint can be told to be its own."""
    try:
        return (run / FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"{run}: {FILE} cannot be read, so the run's own checkpoints cannot be told from others; it holds what "
            "their manifests give as run"
        ) from None
