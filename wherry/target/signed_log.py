"""SignedLog: lines that can only be appended, and that nobody without the user's key can forge, reorder or cut.

A line is JSON, a tab and a MAC over the line and the MAC before it. The log is where its sink puts it: in a file, or in
objects that are created one after another. Lines are verified before they are parsed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from wherry.errors import storage_error, storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from wherry.storage.location import Location
    from wherry.store.store import Store

LONGEST_LINE = 64 << 20
_FIRST_MAC = b"wherry journal 1"  # takes the place of the MAC before the first line
_ALTERED = "the journal of the interrupted run was altered, or signed with another key"


class Line(NamedTuple):
    """A line with a valid MAC: its JSON, its MAC and its bytes in the log."""

    text: bytes
    mac: bytes
    size: int


class LogSink(Protocol):
    """Where lines are put.

    Attributes:
        uri: of the place, for errors.
    """

    uri: str

    def append(self, data: bytes) -> None:
        """Put lines after those that are there; they are durable when it returns.

        Raises:
            FileExistsError: another process has put its lines there.
            StorageError: the storage failed.
        """

    def close(self) -> None:
        """Release what is open; the lines are kept."""


class SignedLog:
    """Appends lines to those of earlier processes; not thread-safe.

    Attributes:
        sink: where they are put.
    """

    def __init__(self, sink: LogSink, key: bytes, lines: Iterable[Line] = ()) -> None:
        """Go on after some lines.

        Args:
            sink: where the lines are put.
            key: signs them.
            lines: those that are there.
        """
        self.sink, self._key, self._mac = sink, key, _FIRST_MAC
        for line in lines:
            self._mac = line.mac

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Append a line for each row, all of them at once.

        Raises:
            FileExistsError: another process has put its lines there.
            StorageError: the storage failed.
        """
        data, mac = _sign_all(rows, self._key, self._mac)
        self.sink.append(data)
        self._mac = mac


class FileSink:
    """A file that is synced after each line; see LogSink."""

    def __init__(self, path: Path, size: int) -> None:
        """Open it for appending.

        Args:
            path: the file; it may not exist.
            size: number of its bytes that are kept.

        Raises:
            StorageError: the storage failed.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        self.uri, self._descriptor = str(path), -1
        try:
            with storage_errors(self.uri):
                self._descriptor = os.open(path, flags, 0o600)
                os.ftruncate(self._descriptor, size)
                if size:  # lines that are not durable yet must not be lost before those that follow them
                    os.fsync(self._descriptor)
        except BaseException:
            self.close()
            raise

    def append(self, data: bytes) -> None:
        """See LogSink."""
        view = memoryview(data)
        with storage_errors(self.uri):
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, which is kept."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ObjectSink:
    """A row of objects with numbered names, each created on the condition that it does not exist; see LogSink.

    Attributes:
        uri: of the folder.
        marks: path → mark of the objects that this process has written.
    """

    def __init__(self, store: Store, folder: Location, name: str, number: int, run: str) -> None:
        """Go on after some objects.

        Args:
            store: that of the folder.
            folder: of the objects.
            name: the beginning of their names.
            number: how many there are.
            run: id of this run.
        """
        self.uri, self.marks = folder.uri, dict[str, str]()
        self._store, self._folder, self._name, self._number, self._run = store, folder, name, number, run

    def append(self, data: bytes) -> None:
        """See LogSink."""
        path = self._folder.join(f"{self._name}{self._number:06d}").path
        self.marks[path] = self._store.put_object(path, data, self._run).mark
        self._number += 1

    def close(self) -> None:
        """See LogSink; nothing is open."""


def read_log(path: Path, key: bytes) -> tuple[list[Line], str | None]:
    """The lines of a file up to the first incomplete one, and the reason if the log is rejected.

    Raises:
        StorageError: the storage failed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return [], "the journal of the interrupted run is not a file"
            return checked_lines(file, key)
    except FileNotFoundError:
        return [], None
    except OSError as error:
        raise storage_error(error, str(path)) from error


def checked_lines(file: BinaryIO, key: bytes) -> tuple[list[Line], str | None]:
    """The same for the contents of a log, wherever it is kept."""
    lines: list[Line] = []
    while (data := file.readline(LONGEST_LINE)).endswith(b"\n"):
        text, _tab, mac = data[:-1].rpartition(b"\t")
        expected = _next_mac(key, lines[-1].mac if lines else _FIRST_MAC, text)
        if not hmac.compare_digest(expected.hex().encode(), mac):
            return [], _ALTERED
        lines.append(Line(text, expected, len(data)))
    return lines, None


def sign(row: Mapping[str, Any], key: bytes) -> bytes:
    """A log of one line."""
    return _sign_all((row,), key, _FIRST_MAC)[0]


def _sign_all(rows: Iterable[Mapping[str, Any]], key: bytes, mac: bytes) -> tuple[bytes, bytes]:
    """Lines that follow the line with a MAC, and the MAC of the last one."""
    lines: list[bytes] = []
    for row in rows:
        text = json.dumps(row).encode()
        mac = _next_mac(key, mac, text)
        lines.append(b"%b\t%b\n" % (text, mac.hex().encode()))
    return b"".join(lines), mac


def _next_mac(key: bytes, before: bytes, text: bytes) -> bytes:
    """The MAC of a line after the line with another MAC."""
    return hmac.digest(key, before + text, hashlib.sha256)
