"""The journal of a conversion to a store of objects: how it is begun, continued and removed, and what it proves.

It is a row of small objects, `journal-<number>`, in the folder of staging objects next to the target. Each is created
on the condition that it does not exist: of two runs that believe to own the target, one cannot go on.
"""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from wherry.errors import StorageError
from wherry.storage.location import MOST_CONFIG
from wherry.store.object_store import heads
from wherry.target.durable_move import encode_all
from wherry.target.journal import Journal, JournalPast, past_in
from wherry.target.key import journal_key
from wherry.target.signed_log import ObjectSink, SignedLog, checked_lines
from wherry.target.upload_run import is_inner
from wherry.target.uploaded_file import SentBefore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from wherry.storage.location import Location
    from wherry.store.store import Entry, Part, Store, StoredObject, Upload
    from wherry.target.durable_move import DurableMove
    from wherry.target.journal import Header

NAME = "journal-"
GROUPS = 50  # of a large checkpoint
_MOST_BYTES = 4 * MOST_CONFIG  # of an object; that of a job has all leaves and parts, about 34 MB a terabyte


def read_past(area: Location, header: Header) -> JournalPast:
    """Read the journal that earlier runs of the same conversion have left.

    Args:
        area: the folder of staging objects.
        header: what identifies the conversion.

    Raises:
        UsageError: the key is too short.
        StorageError: the storage failed.
    """
    names = _names(area)
    data = b"".join(area.join(name).read_whole(_MOST_BYTES) for name in names)
    lines, reason = checked_lines(io.BytesIO(data), journal_key())
    if names != [f"{NAME}{number:06d}" for number in range(len(names))]:
        reason = "a part of the journal of the interrupted run is missing"
    elif names and not lines and reason is None:
        reason = "the journal of the interrupted run is empty"
    if reason is None:
        return past_in(lines, header, len(names))
    return JournalPast(reason=reason, count=len(names))


def begin_journal(
    past: JournalPast,
    header: Header,
    area: Location,
    store: Store,
    run: str,
    guard: Callable[[], None],
    nbytes: int,
    members: tuple[str, ...],
) -> Journal:
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
    sink = ObjectSink(store, area, NAME, past.count if past.lines else 0, run)
    log = SignedLog(sink, journal_key(), past.lines)
    try:
        log.append({"run": run} if past.lines else {**header, "members": members, "run": run})
    except FileExistsError as error:
        raise StorageError(
            "the journal of another run is there, which the store did not list",
            uri=area.uri,
            cure="run the conversion again",
            retryable=True,
        ) from error
    return Journal(log, past, guard, nbytes // GROUPS)


def remove_journal(journal: Journal, area: Location, store: Store) -> None:
    """Remove the journal, the first object last: without it the rest is never used.

    Args:
        journal: of this run.
        area: the folder of staging objects.
        store: its store.

    Raises:
        TargetInUseError: another run has taken over the target.
        StorageError: the storage failed.
    """
    sink = journal.log.sink
    assert isinstance(sink, ObjectSink), "the journal of a store lies in objects"
    paths = [area.join(name).path for name in _names(area)]
    seen = heads(store, [path for path in paths if path not in sink.marks])
    known = {**sink.marks, **{path: found.mark for path, found in seen if found is not None}}
    journal.guard()
    store.remove_many({path: known[path] for path in paths[1:] if path in known})
    store.remove_many({path: known[path] for path in paths[:1] if path in known})


def _names(area: Location) -> list[str]:
    return sorted(entry.name for entry in area.entries() if entry.name.startswith(NAME))


def finished_journal(
    area: Location,
    store: Store,
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
    begun = [asdict(upload) for upload in uploads]
    group = {"uploads": begun, "parts": list(parts), "notes": list(notes), **encode_all(rows)}
    log = SignedLog(ObjectSink(store, area, NAME, 0, runs[0]), journal_key())
    with suppress(FileExistsError):
        log.append(first, *({"run": run} for run in runs[1:]), group)


def without_parts(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Entries of a walk that are not of wherry itself, such as parts that the store keeps as objects."""
    return (entry for entry in entries if not is_inner(entry.name))


def without_unproved(
    past: JournalPast, objects: Mapping[str, StoredObject], store: Store, guard: Callable[[], None]
) -> dict[str, StoredObject]:
    """The complete objects of earlier runs of which the journal has the checksum of every part; others are removed.

    A run that is killed between the completion of an object and the next group of the journal leaves one whose
    checksums nobody has compared with ours.

    Args:
        past: the journal.
        objects: path → complete objects of its runs.
        store: the store.
        guard: called before each removal; raises if this run has lost the target.

    Raises:
        TargetInUseError: another run has taken over the target.
        StorageError: the storage failed.
    """
    kept: dict[str, StoredObject] = {}
    for path, found in objects.items():
        noted = past.parts.get(path, {}).values()
        if sum(part.nbytes for part in noted) == found.nbytes and all(part.checksum for part in noted):
            kept[path] = found
        else:
            store.remove_object(path, found.mark, guard)
    return kept


def sent_before(
    past: JournalPast,
    objects: Mapping[str, StoredObject],
    store: Store,
    guard: Callable[[], None] = lambda: None,
) -> tuple[dict[str, SentBefore], bool]:
    """What earlier runs have sent, as far as store and journal agree; and whether they agree on all of it.

    Args:
        past: the journal.
        objects: path → complete objects of these runs.
        store: the store.
        guard: see without_unproved.

    Raises:
        TargetInUseError: another run has taken over the target.
        StorageError: the storage failed.
    """
    found = {
        path: SentBefore(parts=dict(past.parts.get(path, {})), found=one) for path, one in objects.items()
    }
    agreed = all(path in objects or path in past.uploads for path in past.parts)
    for path, upload in past.uploads.items():
        if path in objects:
            guard()
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
