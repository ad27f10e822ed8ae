"""SignedLog: lines that can only be appended, and that nobody without the user's key can forge, reorder or cut.

A line is JSON, a tab and a MAC over the line and the MAC before it. The log is where its sink puts it: in a file, or in
objects that are created one after another. Lines are verified before they are parsed.

The key signs the lines, so that a run resumes only conversions of the same user. It is the text of `WHERRY_KEY`, which
several machines can share; otherwise a random key that is created once in `WHERRY_HOME`, readable by its user alone. If
neither is available, a process has a key of its own, which the workers that it starts get: it works, but what it leaves
cannot be resumed after an interruption.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import secrets
import shlex
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from wherry.core.progress import logger
from wherry.errors import StorageError, UsageError, storage_error, storage_errors
from wherry.store.folders import create_file
from wherry.store.home import ensure_home, home
from wherry.store.location import MOST_CONFIG, Location

KEY_ENV = "WHERRY_KEY"
_NAME = "journal.key"
_SHORTEST = 16  # characters of WHERRY_KEY
_MOST = 1024
_log = logger(__name__)


def journal_key() -> bytes:
    """The key, 32 bytes.

    Raises:
        UsageError: `WHERRY_KEY` is too short to be a secret.
    """
    given = os.environ.get(KEY_ENV)
    if given is None:
        text = _stored_key() or _own_key()
    elif len(given) >= _SHORTEST:
        text = os.fsencode(given)  # the variable may hold any bytes
    else:
        raise UsageError(
            f"{KEY_ENV} is shorter than {_SHORTEST} characters",
            cure=f"export {KEY_ENV}=$(openssl rand -hex 32)",
        )
    return hashlib.sha256(b"wherry-journal-key" + text).digest()


def key_for_workers() -> dict[str, str]:
    """The variable that another process on this machine, of the same user, needs to have the key of this one."""
    return {} if KEY_ENV in os.environ or _stored_key() else {KEY_ENV: _own_key().decode()}


def require_shared_key() -> None:
    """Refuse a job whose workers this process does not start, if they could not have its key.

    Raises:
        UsageError: the home has no key that can be used, and `WHERRY_KEY` is not set.
    """
    if key_for_workers():
        raise UsageError(
            f"the processes of a job need one key, and WHERRY_HOME ({home()}) has none that can be used",
            cure=f"export {KEY_ENV}=$(openssl rand -hex 32)",
        )


def _stored_key() -> bytes | None:
    """The random key in the home; None if the home cannot store it."""
    try:
        path = ensure_home() / _NAME
        return _read(path) or _create_key(path)
    except OSError as error:
        if not _own_key.cache_info().currsize:  # once
            _log.warning(
                "the journal cannot be signed, so this run cannot be resumed if it is interrupted: %s", error
            )
        return None


@cache
def _own_key() -> bytes:
    return secrets.token_hex(32).encode()


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if not stat.S_ISREG(found.st_mode) or not private:
            raise StorageError(
                "the journal key must be a regular file that only its owner can access",
                uri=str(path),
                cure=f"rm {shlex.quote(str(path))}",
            )
        text = os.read(descriptor, _MOST)
    finally:
        os.close(descriptor)
    if len(text) < _SHORTEST:
        raise StorageError(
            f"the journal key is shorter than {_SHORTEST} characters",
            uri=str(path),
            cure=f"rm {shlex.quote(str(path))}",
        )
    return text


def _create_key(path: Path) -> bytes:
    """Create the key; if several runs create it at the same time, the first one wins."""
    with suppress(FileExistsError):
        create_file(path, secrets.token_hex(32).encode(), mode=0o600)
    found = _read(path)
    if found is None:
        raise FileNotFoundError(path)
    return found


LONGEST_LINE = 64 << 20
NAME = "journal-"
MOST_BYTES = 4 * MOST_CONFIG  # of an object; that of a job has all leaves and parts, about 34 MB a terabyte
_FIRST_MAC = b"wherry journal 1"  # takes the place of the MAC before the first line
_ALTERED = "the journal of the interrupted run was altered, or signed with another key"


class Line(NamedTuple):
    """A line with a valid MAC: its JSON, its MAC and its bytes in the log."""

    text: bytes
    mac: bytes
    size: int


class LogSink(Protocol):
    """Where lines are put: read, then begun or continued, then appended to.

    Attributes:
        uri: of the place, for errors.
    """

    uri: str

    def read(self, key: bytes) -> tuple[list[Line], str | None]:
        """The lines that earlier processes have put, and the reason if they are rejected.

        Raises:
            StorageError: the storage failed.
        """
        ...

    def begin(self, lines: Sequence[Line]) -> None:
        """Go on after some of the lines that were read, or begin anew if there are none.

        Raises:
            StorageError: the storage failed.
        """

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

    def __init__(self, sink: LogSink, key: bytes, lines: Sequence[Line] = ()) -> None:
        """Go on after some lines, or begin anew.

        Args:
            sink: where the lines are put.
            key: signs them.
            lines: those of the sink that count.

        Raises:
            StorageError: the storage failed.
        """
        self.sink, self._key, self._mac = sink, key, lines[-1].mac if lines else _FIRST_MAC
        sink.begin(lines)

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

    def __init__(self, path: Path) -> None:
        """Choose the file; it may not exist."""
        self.uri, self._path, self._descriptor = str(path), path, -1

    def read(self, key: bytes) -> tuple[list[Line], str | None]:
        """See LogSink."""
        return read_log(self._path, key)

    def begin(self, lines: Sequence[Line]) -> None:
        """See LogSink; what follows the lines is cut off."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        size = sum(line.size for line in lines)
        try:
            with storage_errors(self.uri):
                self._descriptor = os.open(self._path, flags, 0o600)
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
    """A row of small objects, `journal-<number>`, in a folder of a store; see LogSink.

    Each is created on the condition that it does not exist: of two processes that believe to own the log, one cannot go
    on.
    """

    def __init__(self, folder: Location, run: str) -> None:
        """Choose the folder.

        Args:
            folder: of the objects.
            run: id of this run.
        """
        self.uri = folder.uri
        self._folder, self._store, self._run, self._number = folder, folder.store, run, 0
        self._marks: dict[str, str] = {}  # of the objects that this process has written, by their paths

    def read(self, key: bytes) -> tuple[list[Line], str | None]:
        """See LogSink."""
        names = self._names()
        self._number = len(names)
        data = b"".join(self._folder.join(name).read_whole(MOST_BYTES) for name in names)
        lines, reason = checked_lines(io.BytesIO(data), key)
        if names != [f"{NAME}{number:06d}" for number in range(len(names))]:
            return [], "a part of the journal of the interrupted run is missing"
        if names and not lines and reason is None:
            reason = "the journal of the interrupted run is empty"
        return lines, reason

    def begin(self, lines: Sequence[Line]) -> None:
        """See LogSink."""
        self._number = self._number if lines else 0

    def append(self, data: bytes) -> None:
        """See LogSink."""
        path = self._folder.join(f"{NAME}{self._number:06d}").path
        self._marks[path] = self._store.put_object(path, data, self._run).mark
        self._number += 1

    def close(self) -> None:
        """See LogSink; nothing is open."""

    def remove(self, guard: Callable[[], None]) -> None:
        """Remove the objects, the first last: without it the rest is never used.

        Args:
            guard: called before; raises if this run may no longer write.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        from wherry.store.remote_store import heads  # it imports ssl; a log in a file needs none

        paths = [self._folder.join(name).path for name in self._names()]
        seen = heads(self._store, [path for path in paths if path not in self._marks])
        known = {**self._marks, **{path: found.mark for path, found in seen if found is not None}}
        guard()
        self._store.remove_many({path: known[path] for path in paths[1:] if path in known})
        self._store.remove_many({path: known[path] for path in paths[:1] if path in known})

    def _names(self) -> list[str]:
        return sorted(entry.name for entry in self._folder.entries() if entry.name.startswith(NAME))


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
    """The valid lines of a log, as `read_lines` returns them, from its contents in an open file."""
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
