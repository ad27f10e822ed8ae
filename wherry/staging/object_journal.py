"""The journal of a conversion to a store of objects: which parts are sent, and which moves they complete.

It is a row of small objects, `journal-<number>`, in the folder of staging objects beside the target. Each holds lines
as the local journal does, with one chain of MACs over all of them, and is created on the condition that it
does not exist: of two runs that believe to own the target, one cannot go on. A group is written for each fiftieth of
the checkpoint that was sent, or for each part of a small one; senders whose parts are finished meanwhile wait. So after
a run that was killed the parts in flight are sent again, and 2 % at most.

Every owner writes its id first. So what carries the id of a run that is in the journal was made by this conversion.
"""

from __future__ import annotations

import io
import json
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.errors import StorageError, storage_error
from wherry.objects.stores import heads
from wherry.objects.uploads import Part, Upload
from wherry.staging.journal import FIRST_MAC, Journal, checked_lines, decode, encode, next_mac
from wherry.staging.key import journal_key
from wherry.storage.location import MOST_CONFIG
from wherry.text.json_values import json_value
from wherry.upload.run import is_inner
from wherry.upload.uploaded_file import SentBefore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from wherry.objects.uploads import ObjectStore, StoredObject
    from wherry.staging.journal import DurableMove, Header, Line
    from wherry.storage.location import Entry, Location

NAME = "journal-"
GROUPS = 50  # of a large checkpoint
_MOST_BYTES = 4 * MOST_CONFIG  # of an object; that of a job has all leaves and parts, about 34 MB a terabyte


@dataclass(frozen=True, slots=True)
class JournalPast:
    """What earlier runs have written.

    Attributes:
        lines: the lines, each with a valid MAC; none if the journal is not used.
        reason: why it is not used; None if it is, or if there is none.
        done: the finished moves.
        uploads: path → the upload of the object.
        parts: path → the parts that were sent, by number.
        notes: what the writers of the target have noted, in order.
        runs: ids of the runs that wrote it.
        count: number of its objects.
    """

    lines: tuple[Line, ...] = ()
    reason: str | None = None
    done: tuple[DurableMove, ...] = ()
    uploads: Mapping[str, Upload] = field(default_factory=dict[str, Upload])
    parts: Mapping[str, Mapping[int, Part]] = field(default_factory=dict[str, "Mapping[int, Part]"])
    notes: tuple[list[Any], ...] = ()
    runs: frozenset[str] = frozenset()
    count: int = 0


def read_past(area: Location, header: Header) -> JournalPast:
    """Read the journal that earlier runs of the same conversion have left.

    Args:
        area: the folder of staging objects.
        header: what identifies the conversion.

    Raises:
        UsageError: the key is too short.
        StorageError: the storage failed.
    """
    names = sorted(entry.name for entry in area.entries() if entry.name.startswith(NAME))
    if not names:
        return JournalPast()
    expected = [f"{NAME}{number:06d}" for number in range(len(names))]
    data = b"".join(area.join(name).read_whole(_MOST_BYTES) for name in names)
    lines, reason = checked_lines(io.BytesIO(data), journal_key())
    if names != expected:
        reason = "a part of the journal of the interrupted run is missing"
    if reason is None:
        try:
            return _past(lines, header, len(names))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"the journal of the interrupted run cannot be read: {error}"
    return JournalPast(reason=reason, count=len(names))


def _past(lines: list[Line], header: Header, count: int) -> JournalPast:
    rows: list[dict[str, Any]] = [json_value(line.text) for line in lines]
    changed = [name for name in header if rows[0].get(name) != header[name]]
    if changed:
        reason = f"the interrupted run had a different {' and '.join(changed)}"
        return JournalPast(reason=reason, count=count)
    uploads: dict[str, Upload] = {}
    parts: dict[str, dict[int, Part]] = {}
    for row in rows[1:]:
        uploads |= {one["path"]: Upload(**one) for one in row.get("uploads", [])}
        for path, one in row.get("parts", []):
            parts.setdefault(path, {})[one["number"]] = Part(**one)
    done = tuple(decode(one) for row in rows[1:] for one in row.get("done", []))
    runs = frozenset(str(row["run"]) for row in rows if "run" in row)
    notes = tuple(one for row in rows[1:] for one in row.get("notes", []))
    return JournalPast(tuple(lines), None, done, uploads, parts, notes, runs, count)


@dataclass(slots=True)
class ObjectJournal(Journal):
    """The journal of one run; thread-safe.

    Attributes:
        area: the folder of staging objects.
        store: its store.
        run: id of the run.
        group: bytes of parts that are finished and not written, at most, beside those in flight.
        members: names of commit members of the target, for `clean`.
        notes: new notes of the writers of the target, about bytes that are sent.
    """

    area: Location = None  # pyright: ignore[reportAssignmentType]  fields of the base class have defaults
    store: ObjectStore = None  # pyright: ignore[reportAssignmentType]
    run: str = ""
    group: int = 0
    members: tuple[str, ...] = ()
    notes: Callable[[], list[list[Any]]] = list
    _number: int = 0
    _rows: list[list[Any]] = field(default_factory=list["list[Any]"])
    _parts: list[tuple[str, dict[str, Any]]] = field(default_factory=list["tuple[str, dict[str, Any]]"])
    _uploads: dict[str, Upload] = field(default_factory=dict[str, Upload])
    _known: set[str] = field(default_factory=set[str])
    _marks: dict[str, str] = field(default_factory=dict[str, str])  # of the objects that this run has written
    _sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def start(self, past: JournalPast, header: Header) -> None:
        """Continue the journal of earlier runs, or begin one: write the id of this run.

        Raises:
            StorageError: the storage failed, or another run has written what it does not list yet.
        """
        self._key, self._number = journal_key(), past.count if past.lines else 0
        self._mac = past.lines[-1].mac if past.lines else FIRST_MAC
        self._known = set(past.uploads)
        self._spans = frozenset((row.source, row.span) for row in self.done)
        begun = {**header, "members": self.members, "run": self.run}
        try:
            self._write({"run": self.run} if past.lines else begun)
        except FileExistsError as error:
            raise StorageError(
                "the journal of another run is there, which the store did not list",
                uri=self.area.uri,
                cure="run the conversion again",
                retryable=True,
            ) from error

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

    def record(self, rows: Iterable[DurableMove]) -> None:
        """Note finished moves, all of whose bytes are in parts that were noted."""
        with self._lock:
            self._rows += [encode(row) for row in rows]

    def flush(self) -> None:
        """Write what was noted.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        with self._writing:
            self._flush()

    def close(self) -> None:
        """There is nothing to close."""

    def remove(self) -> None:
        """Remove the journal, the first object last: without it the rest is never used.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        names = sorted(entry.name for entry in self.area.entries() if entry.name.startswith(NAME))
        paths = [self.area.join(name).path for name in names]
        seen = heads(self.store, [path for path in paths if path not in self._marks])
        marks = self._marks | {path: found.mark for path, found in seen if found is not None}
        self.guard()
        self.store.remove_many({path: marks[path] for path in paths[1:] if path in marks})
        self.store.remove_many({path: marks[path] for path in paths[:1] if path in marks})

    def _is_due(self, part: Part) -> bool:
        """Whether another part of that size would be one too many."""
        return self._sent + part.nbytes > self.group

    def _flush(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, []
            parts, self._parts = self._parts, []
            uploads, self._uploads = self._uploads, {}
            self._known |= set(uploads)
            self._sent = 0
        notes = self.notes()  # after the moves, which may depend on them
        if not rows and not parts and not notes:
            return
        self.guard()
        group = {
            "uploads": [asdict(one) for one in uploads.values()],
            "parts": parts,
            "notes": notes,
            "done": rows,
        }
        try:
            self._write(group)
        except FileExistsError as error:
            self.guard()
            raise storage_error(error, self.area.uri) from error

    def _write(self, row: Mapping[str, Any]) -> None:
        text = json.dumps(row).encode()
        mac = next_mac(self._key, self._mac, text)
        data = b"%b\t%b\n" % (text, mac.hex().encode())
        path = self.area.join(f"{NAME}{self._number:06d}").path
        self._marks[path] = self.store.put_object(path, data, self.run).mark
        self._mac, self._number = mac, self._number + 1


def begin_journal(
    past: JournalPast,
    header: Header,
    area: Location,
    store: ObjectStore,
    run: str,
    guard: Callable[[], None],
    nbytes: int,
    members: tuple[str, ...],
) -> ObjectJournal:
    """Continue or begin the journal of a conversion.

    Args:
        past: what earlier runs have written.
        header: what identifies the conversion.
        area: the folder of staging objects.
        store: its store.
        run: id of this run.
        guard: called before every group; raises if this run may no longer write.
        nbytes: size of the checkpoint.
        members: names of commit members of the target.

    Raises:
        StorageError: the storage failed, or another run has written what it does not list yet.
    """
    journal = ObjectJournal(
        path=None,  # pyright: ignore[reportArgumentType]  it has no local file
        done=past.done, reason=past.reason, guard=guard, area=area, store=store, run=run,
        group=nbytes // GROUPS, members=members,
    )  # fmt: skip
    journal.start(past, header)
    return journal


def finished_journal(
    area: Location,
    store: ObjectStore,
    header: Header,
    members: tuple[str, ...],
    runs: Sequence[str],
    rows: Iterable[DurableMove],
    notes: Iterable[list[Any]] = (),
    parts: Iterable[list[Any]] = (),
    uploads: Iterable[Upload] = (),
) -> None:
    """Write the journal of a run that was interrupted after its last move; an existing one is left.

    It is one object, which is there whole or not at all.

    Args:
        area: the folder of staging objects.
        store: its store.
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
    begun, done = [asdict(one) for one in uploads], [encode(row) for row in rows]
    groups = [{"uploads": begun, "parts": list(parts), "notes": list(notes), "done": done}]
    lines: list[bytes] = []
    key, mac = journal_key(), FIRST_MAC
    for line in (first, *({"run": run} for run in runs[1:]), *groups):
        text = json.dumps(line).encode()
        mac = next_mac(key, mac, text)
        lines.append(b"%b\t%b\n" % (text, mac.hex().encode()))
    with suppress(FileExistsError):
        store.put_object(area.join(f"{NAME}{0:06d}").path, b"".join(lines), runs[0])


def without_parts(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Entries of a walk that are not of wherry itself, such as parts that the store keeps as objects."""
    return (entry for entry in entries if not is_inner(entry.name))


def without_unproved(
    past: JournalPast, objects: Mapping[str, StoredObject], store: ObjectStore
) -> dict[str, StoredObject]:
    """The complete objects of earlier runs of which the journal has the checksum of every part; others are removed.

    A run that is killed between the completion of an object and the next group of the journal leaves one whose
    checksums nobody has compared with ours.

    Raises:
        StorageError: the storage failed.
    """
    kept: dict[str, StoredObject] = {}
    for path, found in objects.items():
        noted = past.parts.get(path, {}).values()
        if sum(part.nbytes for part in noted) == found.nbytes and all(part.checksum for part in noted):
            kept[path] = found
        else:
            store.remove_object(path, found.mark)
    return kept


def sent_before(
    past: JournalPast, objects: Mapping[str, StoredObject], store: ObjectStore
) -> tuple[dict[str, SentBefore], bool]:
    """What earlier runs have sent, as far as store and journal agree; and whether they agree on all of it.

    Args:
        past: the journal.
        objects: path → complete objects of these runs.
        store: the store.

    Raises:
        StorageError: the storage failed.
    """
    found = {
        path: SentBefore(parts=dict(past.parts.get(path, {})), found=one) for path, one in objects.items()
    }
    agreed = all(path in objects or path in past.uploads for path in past.parts)
    for path, upload in past.uploads.items():
        if path in objects:
            store.abort(upload)  # killed after the object was assembled: gs:// may still hold its parts
            continue
        noted = past.parts.get(path, {})
        try:
            present = {part.number: part for part in store.parts(upload)}
        except FileNotFoundError:
            agreed = False
            continue
        same = {number: part for number, part in noted.items() if _is_same(part, present.get(number))}
        agreed = agreed and len(same) == len(noted)
        found[path] = SentBefore(upload, same)
    return found, agreed


def _is_same(noted: Part, present: Part | None) -> bool:
    """Whether the store still has a part as it was noted; not every store lists checksums."""
    if present is None or present.checksum not in ("", noted.checksum):
        return False
    return (noted.nbytes, noted.mark) == (present.nbytes, present.mark)
