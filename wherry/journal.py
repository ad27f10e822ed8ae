"""The journal: which moves of an interrupted conversion are done, so that a second run writes only the rest.

One JSON line a group commit, appended and synced only after the data that it covers was made durable, and the names
of the staging area before them; so a line that can be read is true. The first line says which conversion it belongs
to: plan digest, source fingerprint and version. A journal of another conversion is worthless and is begun anew, with
the reason kept.

A move is recorded once every leaf that it touches has been hashed, together with those digests, so a resumed run
needs no byte of it again. It lies beside the staging area, and both go when the target is committed.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.errors import storage_error
from wherry.keypath import KeyPath, parse, render
from wherry.tensorspec import Span

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Header = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Done:
    """A move whose bytes are durable.

    Attributes:
        source: key path of the tensor in the source.
        span: canonical bytes that were written.
        leaves: number of each leaf that it touches → raw SHA-256.
    """

    source: KeyPath
    span: Span
    leaves: Mapping[int, bytes]


@dataclass(slots=True)
class Journal:
    """The journal of one staging area; open it with `open_journal`, close it when done.

    Attributes:
        path: the file.
        done: what an earlier run finished.
        reason: why an earlier journal was not used; None where there was none or it is used.
    """

    path: Path
    done: tuple[Done, ...] = ()
    reason: str | None = None
    _descriptor: int = -1
    _spans: frozenset[tuple[KeyPath, Span]] = field(default_factory=frozenset[tuple[KeyPath, Span]])

    @property
    def nbytes(self) -> int:
        """Bytes that an earlier run finished."""
        return sum(row.span.nbytes for row in self.done)

    def has(self, source: KeyPath, span: Span) -> bool:
        """Whether a move is done."""
        return (source, span) in self._spans

    def record(self, rows: Iterable[Done]) -> None:
        """Append finished moves; their data must already be durable.

        Raises:
            StorageError: the storage failed.
        """
        lines = [_encode(row) for row in rows]
        if lines:
            self._append({"done": lines})

    def close(self) -> None:
        """Close the file; it stays for a later run."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Close the file and remove it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _append(self, row: dict[str, Any]) -> None:
        try:
            _write_all(self._descriptor, (json.dumps(row) + "\n").encode())
            os.fsync(self._descriptor)
        except OSError as error:
            raise storage_error(error, str(self.path)) from error

    def begin(self, header: Header) -> None:
        """Open the file for appending, with the header where it has none.

        Raises:
            StorageError: the storage failed.
        """
        try:
            fresh = not self.done
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if fresh else 0)
            self._descriptor = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise storage_error(error, str(self.path)) from error
        if fresh:
            self._append(dict(header))
        self._spans = frozenset((row.source, row.span) for row in self.done)


def open_journal(path: Path, header: Header) -> Journal:
    """Open the journal of a staging area, using what an earlier run of the same conversion left.

    Args:
        path: the file; it may not exist.
        header: what identifies the conversion; every field must agree with an earlier run's.

    Raises:
        StorageError: the storage failed.
    """
    done, reason = _read(path, header)
    journal = Journal(path, done, reason)
    journal.begin(header)
    if done:
        _cut_torn_line(path)
    return journal


def _read(path: Path, header: Header) -> tuple[tuple[Done, ...], str | None]:
    if not path.exists():
        return (), None
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line end was torn by the kill
    try:
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        if not rows:
            return (), None
        changed = [name for name in header if rows[0].get(name) != header[name]]
        if changed:
            return (), f"the interrupted run had another {' and '.join(changed)}"
        return tuple(_decode(row) for group in rows[1:] for row in group["done"]), None
    except (ValueError, KeyError, TypeError) as error:
        return (), f"the journal of the interrupted run cannot be read: {error}"


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)


def _encode(row: Done) -> list[Any]:
    leaves = base64.b64encode(b"".join(row.leaves.values())).decode()
    return [render(row.source), *row.span, list(row.leaves), leaves]


def _decode(row: list[Any]) -> Done:
    path, start, stop, numbers, text = row
    raw = base64.b64decode(text, validate=True)
    leaves = {number: raw[place * 32 : place * 32 + 32] for place, number in enumerate(numbers)}
    return Done(parse(path), Span(start, stop), leaves)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
