"""What of a working folder travels with a job: its code and small files, and this package; as one zip file."""

from __future__ import annotations

import fnmatch
import os
import stat
import subprocess
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.report import size
from zeropp_ray.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
OWN = ("zeropp_ray", "actors", "jobs")  # they travel too: a job runs the code that submitted it
ENTRY = "jobs/pretrain.py"  # which a job starts
LIMIT_BYTES = 512 * 2**20  # what Ray takes: RAY_max_grpc_message_size
NAMED = 5  # so many of the biggest files are named if there is too much

# Folders with one of these are made anew where they are needed, or lie where all nodes see them.
MARKS = ("pyvenv.cfg", "run-id", "manifest.json", "CACHEDIR.TAG")  # environment; run; checkpoint or token store; cache
FOLDERS = ("__pycache__", "node_modules", "runs", "build", "dist", "*.egg-info")
SECRETS = ("*.env", "*.pem", "*.key")
FILES = (
    *("*.pyc", "*.safetensors", "*.parquet", "*.pt", "*.pth", "*.bin", "*.npy", "*.npz", "*.tar", "*.gz", "*.zip"),
    *SECRETS,
)


@dataclass(frozen=True)
class Package:
    """Files that travel: where each lies here, by its path in the package."""

    files: dict[str, Path]

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())

    def check_size(self, limit: int = LIMIT_BYTES) -> None:
        """Raise ConfigError, with the biggest files, if Ray would not take it."""
        if self.bytes <= limit:
            return
        biggest = sorted(self.files, key=lambda name: self.files[name].stat().st_size, reverse=True)[:NAMED]
        names = ", ".join(f"{name} ({size(self.files[name].stat().st_size)})" for name in biggest)
        raise ConfigError(
            f"--working-dir: {len(self.files):,} files of {size(self.bytes)}, and Ray takes {size(limit)}; the biggest "
            f"are {names}; leave out what the job does not need with --exclude PATTERN, or by .gitignore"
        )

    def write(self, path: Path, more: dict[str, str]) -> None:
        """As a zip file; ``more``: the text of further files by their path. The same content gives the same bytes, so
        that Ray uploads it once. Raises ConfigError if a file cannot be sent.
        """
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, source in sorted(self.files.items()):
                try:
                    archive.writestr(_entry(name, source.stat().st_mode), source.read_bytes())
                except (OSError, UnicodeError) as error:
                    why = "its name is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
                    raise ConfigError(
                        f"--working-dir: {name!a} cannot be sent: {why}; leave it out with --exclude PATTERN"
                    ) from None
            for name, text in sorted(more.items()):
                archive.writestr(_entry(name, 0o644), text)


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)  # of 1980, whenever it was written
    entry.external_attr = (stat.S_IFREG | stat.S_IMODE(mode)) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def pack(folder: Path, exclude: Sequence[str] = ()) -> Package:
    """What of ``folder`` travels: all but hidden files (``.git``, ``.venv``, ``.env``), keys, environments, caches,
    runs, checkpoints, token stores, weights and archives, what git ignores, links to what does not travel, and
    ``exclude``, patterns of names or paths.

    Raises ConfigError if it is no folder, or has one with the name of a package of ours.
    """
    if not folder.is_dir():
        raise ConfigError(f"--working-dir {folder}: no such folder")
    files = {name: folder / name for name in _listed(folder, exclude)}
    for package in OWN:
        there = [name for name in files if name.startswith(f"{package}/")]
        if not there:
            files |= {name: ROOT / name for name in _walk(ROOT, ROOT / package)}
        elif not (folder / ENTRY).is_file():  # else it is a copy of this program
            raise ConfigError(
                f"--working-dir {folder}: {there[0]} would be in the place of this program's own {package}/; rename "
                f"that folder, or leave it out with --exclude {package}"
            )
    return Package(files)


def _listed(folder: Path, exclude: Sequence[str]) -> Iterator[str]:
    """Paths in ``folder`` of its files that are neither left out by our rules or ``exclude`` nor ignored by git; links
    only to such files.
    """
    known, top = _known_to_git(folder), folder.resolve()
    names = [name for name in _walk(folder, folder) if (known is None or name in known) and not _matches(name, exclude)]
    travel = {top / name for name in names}
    return (name for name in names if (top / name).resolve() in travel)


def _walk(root: Path, start: Path) -> Iterator[str]:
    for place, folders, files in os.walk(start):
        if any(mark in files for mark in MARKS) and Path(place) != root:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not _matches(name, FOLDERS))
        for name in sorted(files):
            if not name.startswith(".") and not _matches(name, FILES) and (path := Path(place, name)).is_file():
                yield path.relative_to(root).as_posix()


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern fits the whole path, or a name on the way to the file."""
    return any(
        fnmatch.fnmatch(path, pattern) or any(fnmatch.fnmatch(part, pattern) for part in path.split("/"))
        for pattern in (pattern.rstrip("/") for pattern in patterns)
    )


def _known_to_git(folder: Path) -> set[str] | None:
    """What git tracks or would; None outside of a repository, in a folder that is ignored itself, or without git."""
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is None or _git(folder, "check-ignore", "-q", ".") is not None:
        return None
    known = set[str]()
    for name in listed.split("\0"):
        inner = folder / name
        if name and (inner / ".git").exists() and not inner.is_symlink():  # a repository of its own, or a submodule
            known |= {f"{name.rstrip('/')}/{below}" for below in _known_to_git(inner) or ()}
        else:
            known.add(name)
    return known


def _git(folder: Path, *words: str) -> str | None:
    """What git says in ``folder``; None if it fails, or there is none."""
    try:
        said = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return os.fsdecode(said.stdout)
