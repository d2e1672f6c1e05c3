"""Places that a person names: folders on a disk, and URIs of object stores, which are read and written like folders.

``s3://``, ``gs://`` and ``hdfs://`` go through ``pyarrow.fs``. ``file://`` is a folder. An object store has no folders,
no renaming and no locks: an object appears whole when its last byte is written, and replaces the one of its name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.files import expanded

_S3_OPTIONS = {"endpoint_override", "scheme", "region", "tls_ca_file_path", "tls_ca_dir_path"}
_OPTIONS = {
    "s3": _S3_OPTIONS,
    "gs": {"endpoint_override", "scheme", "retry_limit_seconds", "project_id"},
    "hdfs": {"user", "replication", "kerb_ticket"},
}
_OTHER_NAMES = {"gcs": "gs", "s3a": "s3", "viewfs": "hdfs"}
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

_ADVICE = (
    ("ACCESS_DENIED|SIGNATURE|ACCESS_KEY|TOKEN|CREDENTIAL", "check the credentials in the environment (of S3: "
     "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role of the machine), and that they may list, read, write and "
     "delete there"),
    ("NO_SUCH_BUCKET|bucket does not exist", "make the bucket first, or correct its name"),
    ("NETWORK_CONNECTION|REQUEST_TIMEOUT|resolve|connect", "check the network, and endpoint_override in the URI"),
)  # fmt: skip


class StoreError(ZeroppError):
    """An object store that does not answer or refuses. ``pyarrow`` has tried again for seconds by then."""


class _Stat(NamedTuple):
    st_size: int


class UriPath:
    """A key in an object store, with the part of ``pathlib.Path`` that we use.

    All that touches the store raises FileNotFoundError for what is not there, and StoreError, in one line that names
    the URI, for all else. It may be sent to other processes; credentials do not go along, each has its own environment.
    """

    def __init__(self, root: str, key: str, query: str = "") -> None:
        """``root``: scheme and bucket or host; ``key``: without slashes at its ends."""
        self._root, self._key, self._query = root, key, query

    @classmethod
    def parse(cls, text: str, named: str = "") -> UriPath:
        """From a URI. ConfigError that begins with ``named`` if it cannot be used. Secrets are not told."""
        parts = _split(text, named)
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if named and "@" not in parts.netloc and not parts.query:
            shown = named
        scheme = _OTHER_NAMES.get(parts.scheme.lower(), parts.scheme.lower())
        if scheme not in _OPTIONS:
            raise ConfigError(f"{shown}: {parts.scheme} is not known; use s3, gs, hdfs, or a path")
        options = parse_qsl(parts.query, keep_blank_values=True)
        if "@" in parts.netloc or any("@" in value for name, value in options if name == "endpoint_override"):
            raise ConfigError(
                f"{shown}: holds credentials, which would be written to the run's folder and logs; leave them out, and "
                "give them in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if not parts.netloc and scheme != "hdfs":
            raise ConfigError(f"{shown}: names no bucket")
        if "#" in text:
            raise ConfigError(f"{shown}: goes on after a '#', which a URI does not; write %23 for one in a name")
        for option, _ in options:
            if option not in _OPTIONS[scheme]:
                raise ConfigError(
                    f"{shown}: has the option {option}; those of {scheme} are {', '.join(sorted(_OPTIONS[scheme]))}"
                )
        names = [name for name in unquote(parts.path).split("/") if name]
        if {".", ".."} & set(names):
            raise ConfigError(f"{shown}: holds '.' or '..', which an object store does not know; write it out")
        return cls(f"{scheme}://{parts.netloc}", "/".join(names), parts.query)

    def __str__(self) -> str:
        return f"{self._root}/{quote(self._key)}".rstrip("/") + (f"?{self._query}" if self._query else "")

    def __repr__(self) -> str:
        return f"UriPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UriPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: UriPath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> UriPath:
        return UriPath(self._root, f"{self._key}/{name}".strip("/"), self._query)

    @property
    def name(self) -> str:
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> UriPath:
        return UriPath(self._root, self._key.rpartition("/")[0], self._query)

    def absolute(self) -> UriPath:
        return self

    resolve = absolute

    # -- the store -----------------------------------------------------------------------------------------------------

    @property
    def _at(self) -> tuple[Any, str]:
        """The file system, and the path in it."""
        with _told(self):
            system, base = _file_system(self._root, self._query)
        return system, f"{base.rstrip('/')}/{self._key}"

    def _info(self) -> Any:
        system, path = self._at
        with _told(self):
            return system.get_file_info(path)

    def exists(self) -> bool:
        return self._info().type.name != "NotFound"

    def is_file(self) -> bool:
        return self._info().type.name == "File"

    def is_dir(self) -> bool:
        """Whether there is something below it."""
        return self._info().type.name == "Directory" or next(self.iterdir(), None) is not None

    def stat(self) -> _Stat:
        info = self._info()
        if info.type.name != "File":
            raise FileNotFoundError(2, "no such object", str(self))
        return _Stat(info.size)

    def modified(self) -> float:
        """When it was written, in seconds by the store's own clock."""
        info = self._info()
        if info.mtime_ns is None:
            raise FileNotFoundError(2, "no such object", str(self))
        return info.mtime_ns / 1e9

    def iterdir(self) -> Iterator[UriPath]:
        """What is right below it."""
        import pyarrow.fs

        system, path = self._at
        with _told(self):
            found = system.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
        yield from (self / info.base_name for info in found if info.base_name)

    def glob(self, pattern: str) -> Iterator[UriPath]:
        """Those right below it whose name fits."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[Any]:
        """To read bytes from the start (``rb``) or to write all of it (``wb``); to read at any place (``at``)."""
        system, path = self._at
        opened = {"rb": "open_input_stream", "at": "open_input_file", "wb": "open_output_stream"}[mode]
        with _told(self), getattr(system, opened)(path) as file:
            yield file

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return file.read()

    def write_bytes(self, data: bytes) -> None:
        with self.open("wb") as file:
            file.write(data)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def unlink(self, missing_ok: bool = False) -> None:
        system, path = self._at
        try:
            with _told(self):
                system.delete_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Delete all below it, if there is something."""
        system, path = self._at
        with suppress(FileNotFoundError), _told(self):
            system.delete_dir(path)


Place = Path | UriPath


def is_uri(text: object) -> bool:
    return isinstance(text, str) and _URI.match(text) is not None


def check_uri(text: str, named: str) -> None:
    """ConfigError if ``text`` is a URI that cannot be used: before it is written anywhere."""
    if is_uri(text):
        place(text, named)


def place(where: str | Place, named: str = "") -> Place:
    """What a person names: a path, with its home folder written out, or a URI.

    Raises ConfigError that begins with ``named``, or else the path, if it cannot be used.
    """
    if isinstance(where, UriPath):
        return where
    if not is_uri(where):
        return expanded(where, named)
    if str(where).startswith("file://"):
        parts = _split(str(where), named)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"file://{parts.netloc.rpartition('@')[2]}…: names a host; write file:///PATH, or a path")
        return Path(unquote(parts.path))
    return UriPath.parse(str(where), named)


def absolute(where: str, named: str = "") -> str:
    """The place ``where``, as it can be given in any working folder."""
    return str(place(where, named).absolute())


def remove_tree(folder: Place) -> None:
    """Delete a folder, or all below a URI, as far as that goes."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.remove_tree()


def _split(text: str, named: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError as error:
        raise ConfigError(f"{named.partition(' ')[0] or text.partition('://')[0]}: is no URI: {error}") from None


@cache
def _file_system(root: str, query: str) -> tuple[Any, str]:
    """One per process, bucket and options: connections are used again."""
    import pyarrow.fs

    if root.startswith("s3:"):  # what is small then goes in one request instead of three
        query = f"{query}&allow_delayed_open=true".lstrip("&")
    return pyarrow.fs.FileSystem.from_uri(f"{root}/" + (f"?{query}" if query else ""))


@contextmanager
def _told(uri: UriPath) -> Iterator[None]:
    """What ``pyarrow`` raises, in one line that says what to do."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:
        if getattr(error, "errno", None) is not None or not (isinstance(error, OSError) or _of_arrow(error)):
            raise  # of a file on this machine, or of whoever reads
        text = " ".join(str(error).split())
        advice = next((what for pattern, what in _ADVICE if re.search(pattern, text, re.IGNORECASE)), "")
        raise StoreError(f"{uri}: {text.rstrip('.')}" + (f"; {advice}" if advice else "")) from None


def _of_arrow(error: Exception) -> bool:
    return type(error).__module__.startswith("pyarrow")
