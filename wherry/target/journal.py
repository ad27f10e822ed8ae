"""The journal: which moves of an interrupted conversion are done, so that a second run writes only the rest.

It is a signed log (see `wherry.target.signed_log`) in the staging area, with which it is removed. The first line
identifies the conversion: plan digest, source fingerprint and version. The journal of another conversion is not used;
a new one is started, and the reason is kept. Each further line is a group of facts that are durable:

- moves: each was synced, with the names in the staging area, before its line was. A move is recorded once every leaf
  that it touches has been hashed, together with those digests, so a resumed run does not read it again;
- in a store of objects: uploads that were begun, parts that were sent, and what the writers of the target have noted.

On a file system each group commit is a line. In a store a group is an object, and is written for each fiftieth of the
checkpoint that was sent, or for each part of a small one; senders whose parts are finished meanwhile wait. So after a
run that was killed the parts in flight are sent again, and 2 % at most. There every owner writes its id first, so what
carries the id of a run that is in the journal was made by this conversion.

A `DurableMove` is a move whose bytes are durable, as a journal and the receipts of units record it. Moves of small
tensors, of which a large model has a hundred thousand, are recorded as columns.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from wherry.core.account import NO_LOSSES, Losses
from wherry.core.digest import LEAF
from wherry.core.json_document import json_value
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Span
from wherry.errors import StorageError, storage_error
from wherry.store.location import Location
from wherry.store.store import Part, Upload
from wherry.target.signed_log import FileSink, Line, LogSink, ObjectSink, SignedLog, journal_key

# Start, stop and checksum of pieces of a tensor.
Checks: TypeAlias = Sequence[tuple[int, int, int]]


class DurableMove(NamedTuple):
    """A move whose bytes are durable.

    Attributes:
        source: key path of the tensor in the source.
        span: canonical bytes that were written.
        leaves: number of each leaf that it touches → raw hashes; see `LeafHasher.leaves`.
        checks: start, stop and checksum of pieces, where the writer needs them; see `MapWriter.checks`.
        losses: what was counted of its values.
    """

    source: KeyPath
    span: Span
    leaves: Mapping[int, bytes]
    checks: tuple[tuple[int, int, int], ...] = ()
    losses: Losses = NO_LOSSES


class MoveLog(Protocol):
    """Where durable moves are noted, and which of them are done already."""

    @property
    def done(self) -> tuple[DurableMove, ...]:
        """What earlier runs finished."""
        ...

    def has(self, source: KeyPath, span: Span) -> bool:
        """Whether a move is done, or is not to be made here."""
        ...

    def record(self, moves: Iterable[DurableMove]) -> None:
        """Note finished moves, whose data must already be durable, or in parts that were noted."""


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
        raise ValueError("a leaf is outside the bytes that were moved")
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


Header = Mapping[str, str]
GROUPS = 50  # of a large checkpoint


@dataclass(frozen=True, slots=True)
class JournalPast:
    """The facts that earlier runs have written.

    Attributes:
        lines: the lines, each with a valid MAC; none if the journal is not used.
        reason: why it is not used; None if it is, or if there is none.
        done: the finished moves.
        uploads: path → the upload of the object.
        parts: path → the parts that were sent, by number.
        notes: what the writers of the target have noted, in order.
        runs: ids of the runs that wrote it.
    """

    lines: tuple[Line, ...] = ()
    reason: str | None = None
    done: tuple[DurableMove, ...] = ()
    uploads: Mapping[str, Upload] = field(default_factory=dict[str, Upload])
    parts: Mapping[str, Mapping[int, Part]] = field(default_factory=dict[str, "Mapping[int, Part]"])
    notes: tuple[list[Any], ...] = ()
    runs: frozenset[str] = frozenset()


def past_in(lines: list[Line], header: Header) -> JournalPast:
    """What the lines of a journal say, if it is that of the same conversion.

    Args:
        lines: with valid MACs.
        header: what identifies the conversion; every field must agree with an earlier run's.
    """
    if not lines:
        return JournalPast()
    try:
        first, *groups = [json_value(line.text) for line in lines]
        changed = [name for name in header if first.get(name) != header[name]]
        if changed:
            return JournalPast(reason=f"the interrupted run had a different {' and '.join(changed)}")
        uploads: dict[str, Upload] = {}
        parts: dict[str, dict[int, Part]] = {}
        for group in groups:
            uploads |= {row["path"]: Upload(**row) for row in group.get("uploads", ())}
            for path, row in group.get("parts", ()):
                parts.setdefault(path, {})[row["number"]] = Part(**row)
        done = tuple(move for group in groups if "run" not in group for move in decode_all(group))
        runs = frozenset(str(group["run"]) for group in (first, *groups) if "run" in group)
        notes = tuple(note for group in groups for note in group.get("notes", ()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return JournalPast(reason=f"the journal of the interrupted run cannot be read: {error}")
    return JournalPast(tuple(lines), None, done, uploads, parts, notes, runs)


@dataclass(slots=True)
class Journal:
    """The journal of one run; thread-safe.

    Attributes:
        log: its lines.
        past: what earlier runs have written.
        guard: called before every line; raises if this run may no longer write.
        group: bytes of parts that are sent and not written, at most, besides those in flight; None on a file system,
            where each group of moves is written at once.
        notes: new notes of the writers of the target, about bytes that are sent.
    """

    log: SignedLog
    past: JournalPast = JournalPast()
    guard: Callable[[], None] = lambda: None
    group: int | None = None
    notes: Callable[[], list[list[Any]]] = list
    _spans: frozenset[tuple[KeyPath, Span]] = field(default_factory=frozenset[tuple["KeyPath", "Span"]])
    _moves: list[DurableMove] = field(default_factory=list["DurableMove"])
    _parts: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    _uploads: dict[str, Upload] = field(default_factory=dict[str, Upload])
    _known: set[str] = field(default_factory=set[str])
    _sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Look up what is done."""
        self._spans = frozenset((move.source, move.span) for move in self.done)
        self._known = {upload.key for upload in self.past.uploads.values()}

    @property
    def done(self) -> tuple[DurableMove, ...]:
        """What earlier runs finished."""
        return self.past.done

    @property
    def reason(self) -> str | None:
        """Why an earlier journal was not used; None if there was none or it is used."""
        return self.past.reason

    @property
    def nbytes(self) -> int:
        """Bytes that earlier runs finished."""
        return sum(move.span.nbytes for move in self.done)

    def has(self, source: KeyPath, span: Span) -> bool:
        """Whether a move is done."""
        return (source, span) in self._spans

    def record(self, moves: Iterable[DurableMove]) -> None:
        """Note finished moves, whose data must already be durable, or in parts that were noted.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        if self.group is None:
            self._write(encode_all(moves))
            return
        with self._lock:
            self._moves += moves

    def part(self, upload: Upload, part: Part) -> None:
        """Note a part that the store has; see UploadLog."""
        with self._lock:
            if upload.key not in self._known:
                self._uploads[upload.key] = upload
            self._parts.append((upload.path, asdict(part)))
            self._sent += part.nbytes
        if self._is_due(part) or self._writing.locked():
            with self._writing:
                if self._is_due(part):
                    self._flush()

    def whole(self, path: str, part: Part) -> None:
        """Note an object that was put at once; see UploadLog."""
        with self._lock:
            self._parts.append((path, asdict(part)))
            self._sent += part.nbytes

    def flush(self) -> None:
        """Write what was noted.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        with self._writing:
            self._flush()

    def close(self) -> None:
        """Close the log, which is kept for a later run."""
        self.log.sink.close()

    def _is_due(self, part: Part) -> bool:
        """Whether another part of that size would be one too many."""
        return self._sent + part.nbytes > (self.group or 0)

    def _flush(self) -> None:
        with self._lock:
            moves, self._moves = self._moves, []
            parts, self._parts = self._parts, []
            uploads, self._uploads = self._uploads, {}
            self._known |= set(uploads)
            self._sent = 0
        notes = self.notes()  # after the moves, which may depend on them
        begun = [asdict(upload) for upload in uploads.values()]
        self._write({"uploads": begun, "parts": parts, "notes": notes, **encode_all(moves)})

    def _write(self, group: Mapping[str, Any]) -> None:
        """Append a group, unless it is empty."""
        if not (group["done"] or group["small"]["paths"] or group.get("parts") or group.get("notes")):
            return
        self.guard()
        try:
            self.log.append(group)
        except FileExistsError as error:
            self.guard()
            raise storage_error(error, self.log.sink.uri) from error


def read_past(sink: LogSink, header: Header) -> JournalPast:
    """Read the journal that earlier runs of the same conversion have left.

    Args:
        sink: where it is.
        header: what identifies the conversion; every field must agree with an earlier run's.

    Raises:
        UsageError: the key is too short.
        StorageError: the storage failed.
    """
    lines, reason = sink.read(journal_key())
    return past_in(lines, header) if reason is None else JournalPast(reason=reason)


def begin_journal(
    sink: LogSink,
    past: JournalPast,
    header: Header,
    guard: Callable[[], None] = lambda: None,
    run: str = "",
    members: tuple[str, ...] = (),
    nbytes: int = 0,
) -> Journal:
    """Begin or continue the journal of a conversion.

    Args:
        sink: where it is.
        past: what was read there.
        header: what identifies the conversion.
        guard: called before every line; raises if this run may no longer write.
        run: id of this run, in a store of objects; else empty.
        members: names of commit members of the target, in a store of objects.
        nbytes: size of the checkpoint, in a store of objects.

    Raises:
        StorageError: the storage failed, or another run has written what it does not list yet.
    """
    try:
        log = SignedLog(sink, journal_key(), past.lines)
        if not past.lines:
            log.append({**header, "members": members, "run": run} if run else header)
        elif run:
            log.append({"run": run})
        return Journal(log, past, guard, nbytes // GROUPS if run else None)
    except FileExistsError as error:
        raise StorageError(
            "the journal of another run is there, which the store did not list",
            uri=sink.uri,
            cure="run the conversion again",
            retryable=True,
        ) from error
    except BaseException:
        sink.close()
        raise


def open_journal(path: Path, header: Header, guard: Callable[[], None] = lambda: None) -> Journal:
    """Read, and begin or continue, the journal of a staging area on a file system; see the functions above.

    Raises:
        UsageError: the key is too short.
        StorageError: the storage failed.
    """
    sink = FileSink(path)
    return begin_journal(sink, read_past(sink, header), header, guard)


def finished_journal(
    area: Location,
    header: Header,
    members: tuple[str, ...],
    runs: Sequence[str],
    rows: Iterable[DurableMove],
    notes: Iterable[list[Any]] = (),
    parts: Iterable[list[Any]] = (),
    uploads: Iterable[Upload] = (),
) -> None:
    """Write the journal of a run that was interrupted after its last move; an existing journal is kept.

    It is one object, which is there whole or not at all.

    Args:
        area: the folder of staging objects.
        header: what identifies the conversion.
        members: names of commit members of the target.
        runs: ids of the runs that have made the objects; at least one.
        rows: the moves.
        notes: of the writers.
        parts: path of an object and one of its parts.
        uploads: that are not assembled.

    Raises:
        StorageError: the storage failed.
    """
    first = {**header, "members": members, "run": runs[0]}
    begun = [asdict(upload) for upload in uploads]
    group = {"uploads": begun, "parts": list(parts), "notes": list(notes), **encode_all(rows)}
    log = SignedLog(ObjectSink(area, runs[0]), journal_key())
    with suppress(FileExistsError):
        log.append(first, *({"run": run} for run in runs[1:]), group)
