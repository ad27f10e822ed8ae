"""The signed log: lines that are valid only in their order, in a file that grows or in numbered objects.

Each line has a MAC with the user's key over it and the MAC of the line before. One code for both: a sink takes lines.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from wherry.store.store import Store

_FIRST = bytes(32)


class LogSink(Protocol):
    """Where lines are kept."""

    def lines(self) -> list[bytes]:
        """The lines that are there, in order."""
        ...

    def append(self, line: bytes) -> None:
        """Add a line durably; another owner's line in its place is an error."""
        ...


class FileLog:
    """A file; an incomplete last line is cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[bytes]:
        """See LogSink."""
        data = self._path.read_bytes() if self._path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            os.truncate(self._path, len(whole))
        return whole.split(b"\n")[:-1]

    def append(self, line: bytes) -> None:
        """See LogSink."""
        with self._path.open("ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())


class ObjectLog:
    """Numbered objects, each created once."""

    def __init__(self, store: Store, path: str, run: str, read: Callable[[str], bytes | None]) -> None:
        self._store, self._path, self._run, self._read = store, path, run, read
        self._count = 0

    def lines(self) -> list[bytes]:
        """See LogSink."""
        found = list(self._found())
        self._count = len(found)
        return found

    def append(self, line: bytes) -> None:
        """See LogSink."""
        self._store.put_object(f"{self._path}-{self._count:06d}", line, self._run)
        self._count += 1

    def _found(self) -> Iterator[bytes]:
        number = 0
        while (data := self._read(f"{self._path}-{number:06d}")) is not None:
            yield data
            number += 1


class SignedLog:
    """A log of one job."""

    def __init__(self, sink: LogSink, key: bytes, header: dict[str, Any]) -> None:
        """Read what is there; a log of another job, or one that was altered, is refused.

        Raises:
            ValueError: the log is not of this job.
        """
        self._sink, self._key, self._mac = sink, key, _FIRST
        self.records: list[dict[str, Any]] = []
        self.nbytes = 0
        rows = [self._checked(line) for line in sink.lines()]
        if rows and rows[0] != header:
            raise ValueError("the log is of another job, or of another build of the codec")
        self.records = rows[1:]
        if not rows:
            self._append(header)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; everything that it says is durable. It is not kept: the state has taken it."""
        self._append(record)

    def _append(self, row: dict[str, Any]) -> None:
        text = json.dumps(row).encode()
        self._mac = self._next(text)
        line = text + b"\t" + self._mac.hex().encode()
        self._sink.append(line)
        self.nbytes += len(line)

    def _checked(self, line: bytes) -> dict[str, Any]:
        text, _, mac = line.rpartition(b"\t")
        self._mac = self._next(text)
        if not hmac.compare_digest(self._mac.hex().encode(), mac):
            raise ValueError("a line of the log was altered, or is not in its place")
        return json.loads(text)

    def _next(self, text: bytes) -> bytes:
        return hmac.digest(self._key, self._mac + text, hashlib.sha256)
