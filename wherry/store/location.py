"""Location: a path in a store: the form of a URI that the functions of wherry take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from wherry.core.json_document import file_pieces
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import HostileError, NotFoundError, StorageError, UnsupportedError, storage_error
from wherry.store.open_file import real_path

if TYPE_CHECKING:
    from wherry.store.store import Entry, Store


_T = TypeVar("_T")

MOST_CONFIG = 64 << 20  # size limit of a config file, in bytes
MOST_COMPANION = 32 << 30  # size limit of a companion file, in bytes; a sparse file would fill the disk
_PIECE = 8 << 20
_DEEPEST = 64  # limit of nested folders in a walk
_MOST_VISITS = 16  # limit of visits of one folder through different links, in one walk
_NANOSECONDS = 1e9


def path_uri(path: str) -> str:
    """A local path as it is printed and recorded: the path itself, or a `file://` URI if its bytes are not valid UTF-8.

    Python decodes bytes that are invalid in the locale as lone surrogates, which databases and JSON readers reject.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        data = path.encode("utf-8", "surrogateescape")
    else:
        return path
    try:
        return data.decode()  # valid UTF-8 that an ASCII locale did not decode
    except UnicodeDecodeError:
        return f"file://{quote(data)}"


@dataclass(frozen=True)
class Location:
    """A path in a store: the form of a URI that the functions of wherry take.

    Attributes:
        store: the store that holds the file or folder.
        path: absolute within the store.
        opaque: names of the pickle classes that may be read as opaque values here and below; see `SourceRequest`.
    """

    store: Store
    path: str
    opaque: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def uri(self) -> str:
        """The printed form: a bare path for local files, a URI elsewhere."""
        return (
            path_uri(self.path) if self.store.capabilities.local else f"{self.store.protocol}://{self.path}"
        )

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def parent(self) -> Location:
        """The folder that holds it."""
        head = self.path.rstrip("/").rpartition("/")[0]
        return Location(self.store, head or "/", self.opaque)

    def join(self, name: str) -> Location:
        """A location below this one; `name` is trusted (`member` is for names that were read from data)."""
        return Location(self.store, f"{self.path.rstrip('/')}/{name}", self.opaque)

    def member(self, name: str) -> Location:
        """A location below this one, for a name that was read from checkpoint data.

        Raises:
            HostileError: the name is absolute, empty, or has a `..` part, or no file can have it.
        """
        try:
            name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            # The name has half of a surrogate pair, which is not a byte of any file's name either.
            raise HostileError(
                f"a file name in the data is not Unicode: {name!r}",
                uri=self.uri,
                cure="do not use this checkpoint; no file can have this name",
            ) from error
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
                cure="do not use this checkpoint; it was created or altered to reach other files",
            )
        return self.join(name)

    @cached_property
    def entry(self) -> Entry | None:
        """The entry at this location, looked up once; None if it does not exist."""
        return self.stat()

    def stat(self) -> Entry | None:
        """The present entry at this location; None if it does not exist."""
        try:
            return self.store.stat(self.path)
        except OSError as error:
            raise storage_error(error, self.uri) from error

    def present(self) -> Entry:
        """The present entry of a file that was read a moment ago.

        Raises:
            NotFoundError: it has been removed meanwhile.
            StorageError: the storage failed.
        """
        entry = self.stat()
        if entry is None:
            raise NotFoundError(
                "the file was removed while it was read", uri=self.uri, retryable=True,
                cure="run the command again once nothing writes to it",
            )  # fmt: skip
        return entry

    def exists(self) -> bool:
        """Whether the location exists now."""
        return self.stat() is not None

    def entries(self) -> list[Entry]:
        """Children, sorted by name; empty for a file and for a missing folder."""
        try:
            return self.store.entries(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage_error(error, self.uri) from error

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the file.

        Raises:
            NotFoundError: the file does not exist.
            HostileError: it is not a regular file, or a link points to a forbidden place.
            StorageError: the storage failed.
        """
        return self._named_errors(lambda: self.store.read(self.path, start, stop))

    def fill(self, start: int, buffer: memoryview) -> int:
        """Fill a buffer from an offset of the file; the number of bytes, fewer where the file ends.

        Raises: what `read` does.
        """
        return self._named_errors(lambda: self.store.readinto(self.path, start, buffer))

    def _named_errors(self, read: Callable[[], _T]) -> _T:
        try:
            return read()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise NotFoundError("file not found", uri=self.uri, cure="check the path") from error
        except OSError as error:
            raise storage_error(error, self.uri) from error

    def read_whole(self, most: int) -> bytes:
        """All bytes of a file that is metadata.

        Args:
            most: size limit in bytes.

        Raises:
            HostileError: the file exceeds the limit; and as `read`.
            NotFoundError, StorageError: as `read`.
        """
        entry = self.stat() if self.store.capabilities.local else None
        size = entry.size if entry else 0
        data = self.read(0, most + 1) if size <= most else b""
        if max(size, len(data)) > most:
            raise self._too_large(max(size, len(data)), most)
        return data

    def metadata(self, most: int) -> Iterator[bytes]:
        """The bytes of a file that is metadata, in order; at most 1 MiB at a time. Nothing is kept.

        Args and Raises: as `read_whole`.
        """
        entry = self.stat() if self.store.capabilities.local else None
        if entry is not None and entry.size > most:
            raise self._too_large(entry.size, most)
        yield from file_pieces(self.read, 0, most + 1)  # a byte too many is refused by who reads them

    def pieces(self) -> Iterator[bytes]:
        """The bytes of a companion file, in order; up to 8 MiB at a time, and no more than its present size.

        Raises:
            HostileError: the file exceeds `MOST_COMPANION`; and as `read`.
            NotFoundError, StorageError: as `read`.
        """
        entry = self.stat()
        if entry is not None and entry.size > MOST_COMPANION:
            raise self._too_large(entry.size, MOST_COMPANION)
        size = max(entry.size, 1) if entry else 1  # `read` refuses a missing file or a folder
        for start in range(0, size, _PIECE):
            yield self.read(start, min(start + _PIECE, size))

    def put(self, data: bytes) -> None:
        """Write a small file.

        Raises:
            StorageError: the storage failed.
        """
        try:
            self.store.put(self.path, data)
        except OSError as error:
            raise storage_error(error, self.uri) from error

    def walk(self, prefix: str = "") -> Iterator[Entry]:
        """Every file below, with its path relative to this location; linked folders are entered.

        Args:
            prefix: prepended to each path.

        Raises:
            HostileError: a file below must not be opened, or links form a cycle.
        """
        yield from self._below(prefix, Counter())

    def require_open(self, entry: Entry) -> None:
        """Refuse a child that must not be opened.

        Raises:
            HostileError: it is a FIFO, a socket or a device, or a link that must not or cannot be followed.
            StorageError: the storage failed, and a retry can help.
        """
        if entry.barred:
            place = self.join(entry.name)
            try:
                place.read(0, 1)  # the error that this raises has a more specific cure
            except StorageError as error:
                if error.retryable:
                    raise
            raise HostileError(entry.barred, uri=place.uri, cure="remove it from the checkpoint")

    def _too_large(self, size: int, most: int) -> HostileError:
        return HostileError(
            f"{self.name} has {size:,} bytes, which exceeds the limit of {most:,}",
            uri=self.uri,
            cure="remove it from the checkpoint, or restore the original file",
        )

    def _below(self, prefix: str, visits: Counter[str]) -> Iterator[Entry]:
        if self.store.capabilities.local:
            real = real_path(self.path)
            visits[real] += 1
            circle = visits[real] > _MOST_VISITS
            if circle or prefix.count("/") > _DEEPEST:
                raise HostileError(
                    f"more than {_MOST_VISITS} links lead to this folder"
                    if circle
                    else f"folders are nested more than {_DEEPEST} levels deep",
                    uri=self.uri,
                    cure="remove the links that point to a parent folder, or move the folder away",
                )
        for entry in self.entries():
            self.require_open(entry)
            if entry.is_dir:
                yield from self.join(entry.name)._below(f"{prefix}{entry.name}/", visits)  # noqa: SLF001  its own
            else:
                yield replace(entry, name=f"{prefix}{entry.name}")


def age_of(location: Location) -> float | None:
    """Seconds since the newest file was written; for a folder, only its direct children count."""
    if not location.store.capabilities.local:
        return None
    entries = [one for one in location.entries() if not one.is_dir] or [location.entry]
    marks = [int(one.mark) for one in entries if one is not None and one.mark]
    return max(time.time() - max(marks) / _NANOSECONDS, 0.0) if marks else None


def modified_time(place: Location, members: Iterable[Entry]) -> datetime:
    """When the newest file of a checkpoint was written; UTC.

    Raises:
        NotFoundError: one of the files no longer exists.
        StorageError: the storage failed.
        UnsupportedError: it does not report modification times.
    """
    if place.store.capabilities.local:
        newest = max((int(member.mark) for member in members if member.mark), default=0)
        return datetime.fromtimestamp(newest / _NANOSECONDS, UTC)
    paths = [place.path if member.name == place.name else f"{place.path}/{member.name}" for member in members]
    try:
        return max(map(place.store.modified, paths)).astimezone(UTC)
    except FileNotFoundError as error:
        raise NotFoundError("file not found", uri=place.uri, cure="check the path") from error
    except OSError as error:
        raise storage_error(error, place.uri) from error
    except UnsupportedError as error:
        raise UnsupportedError(
            "the storage does not report modification times", uri=place.uri, cure="select by step instead"
        ) from error
