"""Staging in a store of objects: nothing is renamed, and no byte is on a local disk.

Next to the target are the lease, `.wherry-<name>.lease`, and the folder of staging objects, `.wherry-<name>.<id>/`,
with the journal and with commit members that are held back. All other objects have their final names as soon as they
are complete. They are created on the condition that nothing is there, and carry the id of the run that made them: a run
removes and replaces only its own objects and those of runs of the same conversion that have ended.

A target without its commit member is not there for any reader. The commit creates that member, last, on the condition
that it does not exist; so of two runs, whatever they believe, one makes the target.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from wherry.core import threads
from wherry.core.progress import Meter, OnProgress
from wherry.errors import TargetExistsError, WherryError
from wherry.store.folders import PREFIX
from wherry.store.location import MOST_CONFIG, Location
from wherry.store.object_view import objects_below
from wherry.store.ranges import read_ranges
from wherry.store.remote_store import heads
from wherry.store.sidecar import sidecar_name
from wherry.store.store import Part, Store, StoredObject, Upload
from wherry.target.journal import Header, Journal, JournalPast, begin_journal, read_past
from wherry.target.lease import lease_of
from wherry.target.parts import OVERFLOW, Sender, parts_share, reading_share
from wherry.target.signed_log import NAME as JOURNAL
from wherry.target.signed_log import ObjectSink
from wherry.target.staged_objects import StagedObjects
from wherry.target.staging import CopiedFile, Staging
from wherry.target.upload_run import UploadRun, is_inner
from wherry.target.uploaded_file import PART_BYTES, SentBefore, UploadContext, part_size

_COPIES = 4  # files that are copied at the same time
_PROVED_BYTES = 1 << 20  # a smaller file is read back by itself: a sidecar, a config, an index
_AREA = re.compile(r"\.[0-9a-f]{8}")


class ObjectStaging(Staging):
    """The objects of one conversion to a store that takes parts; see Staging.

    Files that are put at `location` are uploaded at once.

    Attributes:
        run: the objects.
    """

    run: UploadRun

    def __init__(
        self,
        target: Location,
        identity: str,
        header: Header,
        members: tuple[str, ...],
        nbytes: int,
        *,
        resume: bool = True,
        is_file: bool = False,
        memory: int | None = None,
        by_checksum: bool = False,
    ) -> None:
        """Choose the names, without a call to the store.

        Args:
            target: what will be committed.
            identity: eight hex digits of the conversion; the same conversion finds its objects again.
            header: what identifies the conversion, for the journal.
            members: names of commit members, relative to the target.
            nbytes: size of the checkpoint.
            resume: whether a later run of the conversion goes on where this one ends.
            is_file: whether the target is a single file.
            memory: budget in bytes, of which parts take a share; None for what Sender takes by default.
            by_checksum: whether the checksums of the store are the proof, so that those of every part must be known; a
                single file is then read by nobody before the commit.
        """
        store = target.store
        self._stem = f"{PREFIX}{target.name}"
        self._area = target.parent.join(f"{self._stem}.{identity}")
        super().__init__(target, lease_of(target), self._area.uri, resume=resume)
        self.location = target
        self.spill = Path(tempfile.gettempdir()) / f"{PREFIX}spill-{secrets.token_hex(8)}"
        self._store: Store = store
        self._header, self._members, self._nbytes = header, members, nbytes
        self._held = None if memory is None else parts_share(memory)
        self._by_checksum, self._direct = by_checksum, by_checksum and is_file
        self._log = ObjectSink(self._area, self._lease.token)
        self._journal: Journal

    def journal(self) -> Journal:
        """See Staging."""
        return self._journal

    def copy_files(self, files: Sequence[CopiedFile], memory: int, progress: OnProgress | None) -> int:
        """See Staging. The caller proves the result by its digests."""
        meter = Meter("fetch", sum(entry.size for _source, _place, entry in files), progress)

        def copy(file: CopiedFile) -> int:
            return _copy_file(self.run, file, reading_share(memory) // _COPIES, meter.add)

        with threads.executor(_COPIES, "wherry-fetch", numbers=False) as pool:
            try:
                resumed = sum(pool.map(copy, files))
            except BaseException:
                self.run.using.sender.stop()
                pool.shutdown(cancel_futures=True)
                raise
        self.run.finish()
        return resumed

    def prove_small(self) -> None:
        """See Staging."""
        self.run.prove_small()

    def withdraw(self) -> None:
        """Let the target that was committed be removed at the end of the `with` block."""
        self._committed = False

    def _open(self) -> None:
        """Resume the objects that earlier runs of this conversion have sent, and remove those of other conversions."""
        if is_committed(self.target, self._members):
            raise _exists(self.target)
        past = read_past(self._log, self._header)
        if past.reason:
            self.discarded, past = past.reason, JournalPast()
        present = self._taken_up(past)
        if any(self.target.join(name).path in present for name in self._members[:1]):
            raise _exists(self.target)  # committed since, by a run that was stopped or whose request was late
        own, fresh = present, self._lease.require_fresh
        if self._by_checksum:
            own = without_unproved(past, present, self._store, fresh)
        before, agreed = sent_before(past, own, self._store, fresh)
        if not agreed:
            self.discarded = "the store no longer has all parts that the interrupted run had sent"
        if not agreed or len(own) < len(present):  # moves whose bytes are gone are not done
            past = replace(past, done=())
        self._journal = begin_journal(
            self._log, past, self._header, self.require_held, self._lease.token, self._members, self._nbytes
        )
        using = UploadContext(
            self._store, self._lease.token, Sender(self._held), self._journal,
            past.runs.union(filter(None, [self._lease.former])), self.require_held, self._lease.require_fresh,
        )  # fmt: skip
        self.run = UploadRun(self.target, self._area.path, using, self._members, before, past.notes)
        # Units of one file send their parts under its staging name. Where an upload is aborted by an empty object at
        # its name, all are sent under it: a file that is not whole would be visible.
        direct = self._direct and self._store.aborts_apart
        self.run.direct = direct and self.run.place(self.target.path) not in before
        self._journal.notes = self.run.new_notes
        self.location = Location(StagedObjects(self.target.store, self.run), self.target.path)

    def _taken_up(self, past: JournalPast) -> Mapping[str, StoredObject]:
        """The complete objects of the runs of a journal; objects and uploads of all others are removed.

        Raises:
            TargetExistsError: there are objects that no run of wherry has put there.
        """
        areas = list(areas_of(self.target))
        own: dict[str, StoredObject] = {}
        others: dict[str, StoredObject] = {}
        for path, found in heads(self._store, self._present(areas, journal=not past.lines)):
            if found is None:
                continue
            if found.run in past.runs and path.startswith(self._area.join(OVERFLOW).path):
                self._drop(path, found)
            elif found.run in past.runs:
                own[path] = found
            elif self._is_inner(path) or (areas and found.run):
                others[path] = found
            else:  # at the first one: there may be a million more
                raise _exists(self.target)
        if areas:
            self._drop_sidecar()
        self._drop_others(others, past)
        return own

    def _drop_others(self, others: Mapping[str, StoredObject], past: JournalPast) -> None:
        """Remove the objects of other conversions, and all uploads but those of a journal.

        The staging objects are removed last, and the head of a journal after all others: as long as one of them is
        there, the target is known to be unfinished, whatever a run that ends here leaves at its names.
        """
        staged = sorted(filter(self._is_inner, others), reverse=True)
        for path in [path for path in others if not self._is_inner(path)]:
            self._drop(path, others[path])
        self._abort_uploads(past.uploads)
        for path in staged:
            self._drop(path, others[path])
        if others:
            self.discarded = self.discarded or (
                "the interrupted run had a different source, plan, option or digest algorithm"
            )

    def _abort_uploads(self, kept: Mapping[str, Upload]) -> None:
        """Abort the uploads of the target, except some; also those whose ids were lost with an answer."""
        known, apart = {upload.key for upload in kept.values()}, self._store.aborts_apart
        for upload in list(uploads_of(self.target, self._store)):
            if upload.key not in known and (apart or upload.path not in kept):
                self._lease.require_fresh()
                self._store.abort(upload)

    def _drop(self, path: str, found: StoredObject) -> None:
        self._store.remove_object(path, found.mark, self._lease.require_fresh)

    def _present(self, areas: list[Location], *, journal: bool) -> Iterator[str]:
        """Paths of the objects of the target and of all folders of staging objects.

        Args:
            areas: these folders.
            journal: whether the objects of this conversion's journal count.
        """
        for entry in objects_below(self.target):
            if not is_inner(entry.name):
                yield self.target.join(entry.name).path
        for area in areas:
            for entry in objects_below(area):
                own = area == self._area and not journal and entry.name.startswith(JOURNAL)
                if not own and not is_inner(entry.name):
                    yield area.join(entry.name).path

    def _is_inner(self, path: str) -> bool:
        """Whether a path is that of a staging object."""
        return path.startswith(self.target.parent.join(f"{self._stem}.").path)

    def _stop(self) -> None:
        self.run.using.sender.stop()
        shutil.rmtree(self.spill, ignore_errors=True)

    def _commit(self, sidecar: bytes | None) -> None:
        self.require_held()
        if sidecar is not None:
            # In place of one that was left by a target that no longer exists.
            place = self.target.parent.join(sidecar_name(self.target.name)).path
            before = self._store.head(place)
            if self._store.head(self.target.path) is not None:
                raise _exists(self.target)
            replaces = before.mark if before else ""
            try:
                self._store.put_object(place, sidecar, self._lease.token, replaces=replaces)
            except FileExistsError as error:
                raise _exists(self.target) from error
        self.run.commit()
        self._committed = True

    def _drop_sidecar(self, *runs: str) -> None:
        """Remove the sidecar of a file that does not exist; only that of some runs, if any are named."""
        place = self.target.parent.join(sidecar_name(self.target.name)).path
        found = self._store.head(place)
        if found is not None and found.run and (not runs or found.run in runs):
            self._store.remove_object(place, found.mark, self.require_held)

    def _keep(self) -> None:
        with suppress(WherryError):
            self._journal.flush()
            self.run.drop_overflow()

    def _remove(self) -> None:
        # A run that this one continued may have committed the target.
        members = [self.target.join(name).path for name in self._members[:1]] or [self.target.path]
        heads_of_members = (self._store.head(path) for path in members)
        former = self.run.using.former
        self.run.abort(committed=any(found is not None and found.run in former for found in heads_of_members))
        self._drop_sidecar(self._lease.token)
        self._remove_log()

    def _remove_rest(self) -> None:
        self.run.drop_staged()
        self._remove_log()

    def _remove_log(self) -> None:
        """Remove the journal, after aborting the remaining uploads, whose ids were lost."""
        if not self._store.names_uploads:
            self._abort_uploads({})
        self._log.remove(self.require_held)


def _copy_file(run: UploadRun, file: CopiedFile, memory: int, report: Callable[[int, str], object]) -> int:
    """Copy a file as it is: by the store, if it is in the bucket of the target, else in parts, from buffer to buffer.

    Returns:
        Bytes that the store had before: what an interrupted run has sent or copied.
    """
    source, place, entry = file
    if place.store.capabilities.object_copy and bucket_of(source) == bucket_of(place):
        found = run.using.store.head(source.path)
        kept = run.copy(place.path, source.path, found.mark if found else "", kept=entry.size)
        report(entry.size, entry.name)
        return kept
    if entry.size <= min(_PROVED_BYTES, PART_BYTES):
        run.put(place.path, source.read_whole(MOST_CONFIG) if entry.size else b"")
        report(entry.size, entry.name)
        return 0
    sending, step = run.file(place.path, entry.size), part_size(entry.size, run.using.store.part_limits)
    ranges = [(start, min(start + step, entry.size)) for start in range(0, entry.size, step)]
    missing = [one for one in ranges if not sending.has_bytes(*one)]
    resumed = entry.size - sum(stop - start for start, stop in missing)
    report(resumed, entry.name)
    for part in read_ranges(source, missing, memory):
        sending.write(missing[part.number][0] + part.offset, part.data)
        report(len(part.data), entry.name)
    return resumed


def bucket_of(place: Location) -> tuple[str, str]:
    """Protocol and name of the bucket of a place."""
    return place.store.protocol, place.path.partition("/")[0]


def without_unproved(
    past: JournalPast, objects: Mapping[str, StoredObject], store: Store, guard: Callable[[], None]
) -> dict[str, StoredObject]:
    """The complete objects of earlier runs of which the journal has the checksum of every part; others are removed.

    A run that is killed between the completion of an object and the next group of the journal leaves an object whose
    checksums were not compared with ours.

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
    """What earlier runs have sent, as far as store and journal agree, and whether they agree on all of it.

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


def areas_of(target: Location) -> Iterator[Location]:
    """The folders of staging objects that runs have left for a target.

    Raises:
        StorageError: the storage failed.
    """
    stem = f"{PREFIX}{target.name}"
    for entry in target.parent.entries():
        if entry.is_dir and entry.name.startswith(stem) and _AREA.fullmatch(entry.name[len(stem) :]):
            yield target.parent.join(entry.name)


def uploads_of(target: Location, store: Store) -> Iterator[Upload]:
    """The uploads of a target, and of its staging objects, that are not assembled.

    Raises:
        StorageError: the storage failed.
    """
    inside = f"{target.path}/"
    for upload in store.uploads(target.path):
        if upload.path == target.path or upload.path.startswith(inside):
            yield upload
    yield from store.uploads(target.parent.join(f"{PREFIX}{target.name}.").path)


def is_committed(target: Location, members: tuple[str, ...]) -> bool:
    """Whether a target in a store of objects has its commit member: of several, that which is written last.

    Args:
        target: a file or folder.
        members: names of commit members of its format.

    Raises:
        StorageError: the storage failed.
    """
    store = target.store
    if not store.capabilities.parts:
        return False
    if any(store.head(path) for path in (target.path, *(target.join(name).path for name in members[:1]))):
        return True
    # A run that was killed in its commit still has the staging object of the last one.
    return any(store.head(target.join(name).path) for name in members[1:]) and not any(
        store.head(area.join(members[0]).path) for area in areas_of(target)
    )


def _exists(target: Location) -> TargetExistsError:
    return TargetExistsError(
        "target already exists", uri=target.uri, cure="choose another target, or remove this one"
    )
