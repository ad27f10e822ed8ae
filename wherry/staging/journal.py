"""The journal: which moves of an interrupted conversion are done, so that a second run writes only the rest.

Each group commit appends one JSON line, which is synced only after its data, and after the names in the staging area;
so a readable line is true. The first line identifies the conversion: plan digest, source fingerprint and version. The
journal of another conversion is not used; a new one is started, and the reason is kept.

Moves of small tensors, of which a large model has a hundred thousand, are recorded as columns.

A move is recorded once every leaf that it touches has been hashed, together with those digests, so a resumed run does
not read it again. The journal is in the staging area and is removed with it.

Every line ends with a MAC over the line and the MAC before it, made with the user's key (see `key`): a journal that was
forged, reordered, cut in the middle or copied from another place is rejected, and the conversion starts over. Lines
are verified before they are parsed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from wherry.core.account import NO_LOSSES, Losses
from wherry.core.digest import LEAF
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.tensorspec import Span
from wherry.errors import storage_error
from wherry.staging.key import journal_key
from wherry.text.json_values import json_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

Header = Mapping[str, str]
FIRST_MAC = b"wherry journal 1"  # takes the place of the MAC before the first line
LONGEST_LINE = 64 << 20


class DurableMove(NamedTuple):
    """A move whose bytes are durable.

    Attributes:
        source: key path of the tensor in the source.
        span: canonical bytes that were written.
        leaves: number of each leaf that it touches → raw hashes; see `LeafHasher.leaves`.
        checks: start, stop and checksum of pieces, where the writer needs them; see `Writer.checks`.
        losses: what was counted of its values.
    """

    source: KeyPath
    span: Span
    leaves: Mapping[int, bytes]
    checks: tuple[tuple[int, int, int], ...] = ()
    losses: Losses = NO_LOSSES


@dataclass(slots=True)
class Journal:
    """The journal of one staging area; open it with `open_journal`, close it when done.

    Attributes:
        path: the file.
        done: what an earlier run finished.
        reason: why an earlier journal was not used; None if there was none or it is used.
        guard: called before every line; raises if this run may no longer write.
    """

    path: Path
    done: tuple[DurableMove, ...] = ()
    reason: str | None = None
    guard: Callable[[], None] = lambda: None
    _key: bytes = b""
    _mac: bytes = FIRST_MAC
    _descriptor: int = -1
    _spans: frozenset[tuple[KeyPath, Span]] = field(default_factory=frozenset[tuple[KeyPath, Span]])

    @property
    def nbytes(self) -> int:
        """Bytes that an earlier run finished."""
        return sum(row.span.nbytes for row in self.done)

    def has(self, source: KeyPath, span: Span) -> bool:
        """Whether a move is done."""
        return (source, span) in self._spans

    def record(self, rows: Iterable[DurableMove]) -> None:
        """Append finished moves; their data must already be durable.

        Raises:
            StorageError: the storage failed.
            TargetInUseError: another run has taken over the target.
        """
        line = encode_all(rows)
        if line["done"] or line["small"]["paths"]:
            self.guard()
            self._append(line)

    def close(self) -> None:
        """Close the file, which is kept for a later run."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, row: dict[str, Any]) -> None:
        text = json.dumps(row).encode()
        mac = next_mac(self._key, self._mac, text)
        try:
            _write_all(self._descriptor, b"%b\t%b\n" % (text, mac.hex().encode()))
            os.fsync(self._descriptor)
        except OSError as error:
            raise storage_error(error, str(self.path)) from error
        self._mac = mac

    def begin(self, header: Header, size: int) -> None:
        """Open the file for appending, and write the header if it has none.

        Args:
            header: what identifies the conversion.
            size: number of bytes of the file that are kept.

        Raises:
            StorageError: the storage failed.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self.path, flags, 0o600)
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise storage_error(error, str(self.path)) from error
        if not size:
            self._append(dict(header))
        self._spans = frozenset((row.source, row.span) for row in self.done)


def open_journal(path: Path, header: Header, guard: Callable[[], None] = lambda: None) -> Journal:
    """Open the journal of a staging area, and resume that of an earlier run of the same conversion.

    Args:
        path: the file; it may not exist.
        header: what identifies the conversion; every field must agree with an earlier run's.
        guard: called before every line; raises if this run may no longer write.

    Raises:
        UsageError: the key is too short.
        StorageError: the storage failed.
    """
    key = journal_key()
    lines, reason = signed_lines(path, key)
    done, reason = _rows(lines, header) if reason is None else ((), reason)
    kept = lines if done else []
    journal = Journal(path, done, reason, guard, key, kept[-1].mac if kept else FIRST_MAC)
    try:
        journal.begin(header, sum(line.size for line in kept))
    except BaseException:
        journal.close()
        raise
    return journal


class Line(NamedTuple):
    """A line with a valid MAC: its JSON, its MAC and its bytes in the file."""

    text: bytes
    mac: bytes
    size: int


def signed_lines(path: Path, key: bytes) -> tuple[list[Line], str | None]:
    """The lines of a journal up to the first incomplete one, and the reason if the journal is rejected.

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
    """The same for the contents of a journal, wherever it is kept."""
    lines: list[Line] = []
    while (data := file.readline(LONGEST_LINE)).endswith(b"\n"):
        text, _tab, mac = data[:-1].rpartition(b"\t")
        expected = next_mac(key, lines[-1].mac if lines else FIRST_MAC, text)
        if not hmac.compare_digest(expected.hex().encode(), mac):
            return [], "the journal of the interrupted run was altered, or signed with another key"
        lines.append(Line(text, expected, len(data)))
    return lines, None


def next_mac(key: bytes, before: bytes, text: bytes) -> bytes:
    """The MAC of a line after the line with another MAC."""
    return hmac.digest(key, before + text, hashlib.sha256)


def _rows(lines: list[Line], header: Header) -> tuple[tuple[DurableMove, ...], str | None]:
    if not lines:
        return (), None
    try:
        rows: list[dict[str, Any]] = [json_value(line.text) for line in lines]
        changed = [name for name in header if rows[0].get(name) != header[name]]
        if changed:
            return (), f"the interrupted run had a different {' and '.join(changed)}"
        return tuple(row for group in rows[1:] for row in decode_all(group)), None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return (), f"the journal of the interrupted run cannot be read: {error}"


def encode(row: DurableMove) -> list[Any]:
    """A move as a part of a line."""
    leaves = base64.b64encode(b"".join(row.leaves.values())).decode()
    rest = [list(row.checks), list(astuple(row.losses))] if row.checks or row.losses else []
    return [render(row.source), *row.span, list(row.leaves), leaves, *rest]


def decode(row: list[Any]) -> DurableMove:
    """The inverse of `encode`; raises ValueError, KeyError or TypeError."""
    path, start, stop, numbers, text, *rest = row
    checks, losses = rest or ((), ())
    if not all(isinstance(number, int) for number in (start, stop, *numbers)):
        raise TypeError("bytes and leaves are counted by integers")
    if not all(start < (number + 1) * LEAF and number * LEAF < stop for number in numbers):
        raise ValueError("a leaf lies outside the bytes that were moved")
    raw = base64.b64decode(text, validate=True)
    width = len(raw) // len(numbers) if numbers else 0
    leaves = {number: raw[place * width : (place + 1) * width] for place, number in enumerate(numbers)}
    pieces = tuple((int(first), int(last), int(value)) for first, last, value in checks)
    *counts, error = losses or (0, 0.0)
    counted = Losses(*map(int, counts), error=float(error))
    return DurableMove(parse(path), Span(start, stop), leaves, pieces, counted)


def encode_all(rows: Iterable[DurableMove]) -> dict[str, Any]:
    """Moves as a line: those of small tensors, of which there are the most, as columns."""
    done: list[list[Any]] = []
    paths: list[str] = []
    sizes: list[int] = []
    leaves: list[bytes] = []
    for row in rows:
        source, (start, stop), known, checks, losses = row
        if start or stop > LEAF or len(known) != 1 or checks or losses is not NO_LOSSES:
            done.append(encode(row))
        else:
            paths.append(render(source))
            sizes.append(stop)
            leaves.append(known[0])
    text = base64.b64encode(b"".join(leaves)).decode()
    return {"done": done, "small": {"paths": paths, "sizes": sizes, "leaves": text}}


def decode_all(line: Mapping[str, Any]) -> Iterator[DurableMove]:
    """The inverse of `encode_all`; raises ValueError, KeyError or TypeError."""
    yield from map(decode, line["done"])
    small = line["small"]
    paths, sizes, raw = small["paths"], small["sizes"], base64.b64decode(small["leaves"], validate=True)
    if not all(type(size) is int and 0 < size <= LEAF for size in sizes):
        raise TypeError("a small tensor has one leaf")
    width = len(raw) // len(paths) if paths else 0
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        yield DurableMove(parse(path), Span(0, size), {0: raw[number * width : (number + 1) * width]})


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
