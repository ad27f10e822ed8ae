"""Where bytes live: one small set of operations over local files and everything fsspec reaches.

A `Location` is a store and a path in it. What a store can do is declared, not guessed (restic's
`Properties`): whether a rename can refuse to overwrite, whether a put can be create-only, whether byte ranges
can be read and written. Local paths never import fsspec: they are the fast path, and `os.pread` beats it.

Credentials come only from each library's own chain; a URI never carries them, and none is ever printed.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from wherry.errors import HostileError, NotFoundError, UsageError, missing_extra, storage_error

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do.

    Attributes:
        atomic_rename: a folder appears under its final name in one step that cannot overwrite.
        create_only_put: an object can be created on the condition that it does not exist yet.
        ranged_writes: bytes can be written at any offset of a file.
        local: paths are paths of this machine's file system.
    """

    atomic_rename: bool
    create_only_put: bool
    ranged_writes: bool
    local: bool


LOCAL = Capabilities(atomic_rename=True, create_only_put=True, ranged_writes=True, local=True)
OBJECTS = Capabilities(atomic_rename=False, create_only_put=True, ranged_writes=False, local=False)
READ_ONLY = Capabilities(atomic_rename=False, create_only_put=False, ranged_writes=False, local=False)

# protocol → (capabilities, package that provides it, extra of wherry that installs the package).
_PROTOCOLS: dict[str, tuple[Capabilities, str, str]] = {
    "file": (LOCAL, "", ""),
    "memory": (OBJECTS, "fsspec", ""),
    "gs": (OBJECTS, "gcsfs", "gcs"),
    "gcs": (OBJECTS, "gcsfs", "gcs"),
    "s3": (OBJECTS, "s3fs", "s3"),
    "hf": (READ_ONLY, "huggingface_hub", "hub"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or folder: its name within its parent (or its relative path), size and change mark."""

    name: str
    size: int
    is_dir: bool
    mark: str = ""


class Store(Protocol):
    """The operations that the rest of wherry may rely on; paths are absolute within the store."""

    protocol: str
    capabilities: Capabilities

    def stat(self, path: str) -> Entry | None:
        """The entry at a path, following links, or None."""
        ...

    def entries(self, path: str) -> list[Entry]:
        """Children of a folder, sorted by name."""
        ...

    def read(self, path: str, start: int, stop: int | None) -> bytes:
        """Bytes [start, stop) of a file; fewer where the file ends earlier."""
        ...

    def readinto(self, path: str, start: int, buffer: memoryview) -> int:
        """Fill a buffer from an offset; the number of bytes that the file had."""
        ...

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small file whole; create-only raises FileExistsError."""
        ...


@dataclass(frozen=True)
class Location:
    """A path in a store; what every function of wherry takes once a URI has been read."""

    store: Store
    path: str

    @property
    def uri(self) -> str:
        """The printed form: a bare path for local files, a URI elsewhere."""
        return self.path if self.store.capabilities.local else f"{self.store.protocol}://{self.path}"

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def parent(self) -> Location:
        """The folder that holds it."""
        head = self.path.rstrip("/").rpartition("/")[0]
        return Location(self.store, head or "/")

    def join(self, name: str) -> Location:
        """A location below this one; `name` is trusted (`member` is for names that were read from data)."""
        return Location(self.store, f"{self.path.rstrip('/')}/{name}")

    def member(self, name: str) -> Location:
        """A location below this one, for a name that was read from checkpoint data.

        Raises:
            HostileError: the name is absolute, empty, or has a `..` part.
        """
        parts = name.split("/")
        if (
            not name
            or name.startswith("/")
            or "\\" in name
            or "\0" in name
            or any(p in ("..", "") for p in parts)
        ):
            raise HostileError(
                f"a file name in the data points outside its folder: {name!r}",
                uri=self.uri,
                cure="do not use this checkpoint; it was made or altered to reach other files",
            )
        return self.join(name)

    @cached_property
    def entry(self) -> Entry | None:
        """What is there, looked up once."""
        return self.stat()

    def stat(self) -> Entry | None:
        """What is there now."""
        try:
            return self.store.stat(self.path)
        except OSError as error:
            raise storage_error(error, self.uri) from error

    def exists(self) -> bool:
        """Whether anything is there now."""
        return self.stat() is not None

    def entries(self) -> list[Entry]:
        """Children, sorted by name; empty for a file or where nothing is."""
        try:
            return self.store.entries(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage_error(error, self.uri) from error

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of the file.

        Raises:
            NotFoundError: there is no such file.
            StorageError: the storage failed.
        """
        try:
            return self.store.read(self.path, start, stop)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise NotFoundError("no such file", uri=self.uri) from error
        except OSError as error:
            raise storage_error(error, self.uri) from error

    def put(self, data: bytes) -> None:
        """Write a small file whole.

        Raises:
            StorageError: the storage failed.
        """
        try:
            self.store.put(self.path, data)
        except OSError as error:
            raise storage_error(error, self.uri) from error

    def walk(self, prefix: str = "") -> Iterator[Entry]:
        """Every file below, with its path relative to this location."""
        for entry in self.entries():
            name = f"{prefix}{entry.name}"
            if entry.is_dir:
                yield from self.join(entry.name).walk(f"{name}/")
            else:
                yield Entry(name, entry.size, is_dir=False, mark=entry.mark)


class LocalStore:
    """Files of this machine. Links are followed, as the Hugging Face cache needs; listings show them too."""

    protocol = "file"
    capabilities = LOCAL

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        try:
            return _entry(Path(path).name, Path(path).stat())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def entries(self, path: str) -> list[Entry]:
        """See Store. A dangling link is listed with size -1, so that it is never mistaken for absence."""
        with os.scandir(path) as found:
            return sorted((_scanned(entry) for entry in found), key=lambda entry: entry.name)

    def read(self, path: str, start: int, stop: int | None) -> bytes:
        """See Store."""
        with open(path, "rb") as file:
            file.seek(start)
            return file.read() if stop is None else file.read(max(stop - start, 0))

    def readinto(self, path: str, start: int, buffer: memoryview) -> int:
        """See Store."""
        with open(path, "rb", buffering=0) as file:
            return os.preadv(file.fileno(), [buffer], start)

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store. The file is synced; its folder is the caller's business."""
        flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if create_only else os.O_TRUNC)
        descriptor = os.open(path, flags, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def make_folder(location: Location) -> None:
    """Make a local folder and its parents.

    Raises:
        StorageError: the storage failed.
    """
    try:
        Path(location.path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, location.uri) from error


def _scanned(entry: os.DirEntry[str]) -> Entry:
    try:
        return _entry(entry.name, entry.stat())
    except FileNotFoundError:
        return Entry(entry.name, -1, is_dir=False)


def _entry(name: str, status: os.stat_result) -> Entry:
    return Entry(name, status.st_size, stat.S_ISDIR(status.st_mode), mark=str(status.st_mtime_ns))


class FsspecStore:
    """Any store that fsspec reaches."""

    def __init__(self, protocol: str, capabilities: Capabilities) -> None:
        import fsspec  # a tenth of a second that local runs do not pay

        self.protocol = protocol
        self.capabilities = capabilities
        self.fs: Any = fsspec.filesystem(protocol)

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        try:
            return self._entry(self.fs.info(path))
        except FileNotFoundError:
            return None

    def entries(self, path: str) -> list[Entry]:
        """See Store. Listings are never taken from fsspec's cache: another process may have written."""
        rows = self.fs.ls(
            path, detail=True, **({"refresh": True} if self.protocol in ("gs", "gcs", "s3") else {})
        )
        found = [self._entry(row) for row in rows if row["name"].strip("/") != path.strip("/")]
        return sorted(found, key=lambda entry: entry.name)

    def read(self, path: str, start: int, stop: int | None) -> bytes:
        """See Store."""
        return self.fs.cat_file(path, start=start, end=stop)

    def readinto(self, path: str, start: int, buffer: memoryview) -> int:
        """See Store."""
        data = self.read(path, start, start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store."""
        if create_only and self.fs.exists(path):
            raise FileExistsError(path)
        self.fs.pipe_file(path, data, **({"mode": "create"} if create_only else {}))

    def _entry(self, row: dict[str, Any]) -> Entry:
        mark = next(
            (str(row[key]) for key in ("generation", "etag", "ETag", "mtime", "created") if row.get(key)), ""
        )
        name = row["name"].rstrip("/").rsplit("/", 1)[-1]
        return Entry(name, int(row.get("size") or 0), row["type"] == "directory", mark=mark)


def locate(uri: str | os.PathLike[str]) -> Location:
    """Read a URI or a path.

    Raises:
        UsageError: an empty or relative-to-nothing URI, or one that carries credentials.
        MissingExtraError: the package for its protocol is not installed.
    """
    text = os.fspath(uri)
    if not text:
        raise UsageError("an empty URI")
    protocol, separator, rest = text.partition("://")
    if not separator:
        return Location(LocalStore(), str(Path(text).absolute()))
    if protocol == "file":
        return Location(LocalStore(), str(Path(unquote(urlsplit(text).path)).absolute()))
    if "@" in rest.split("/")[0]:
        raise UsageError(
            "a URI must not carry credentials", cure="use the storage library's own credential chain"
        )
    return Location(_remote(protocol), rest.rstrip("/"))


def _remote(protocol: str) -> FsspecStore:
    capabilities, package, extra = _PROTOCOLS.get(protocol, (READ_ONLY, "fsspec", ""))
    try:
        return FsspecStore(protocol, capabilities)
    except ImportError as error:
        raise missing_extra(package, extra or protocol, f"{protocol}:// storage") from error
    except ValueError as error:
        raise UsageError(
            f"unknown storage protocol {protocol}://", cure="use file, gs, s3, hf or memory"
        ) from error
