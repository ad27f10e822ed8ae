"""Staging in a store of objects: nothing is renamed, and no byte lies on a local disk.

Beside the target are the lease, `.wherry-<name>.lease`, and the folder of staging objects, `.wherry-<name>.<id>/`, with
the journal and with commit members that are held back. All other objects have their final names as soon as they are
complete. They are created on the condition that nothing is there, and carry the id of the run that made them: a run
removes and replaces only its own objects and those of runs of the same conversion that have ended.

A target without its commit member is not there for any reader. The commit creates that member, last, on the condition
that it does not exist; so of two runs, whatever they believe, one makes the target.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from wherry.core.progress import logger
from wherry.errors import StorageError, TargetExistsError, WherryError
from wherry.objects.listing_view import objects_below
from wherry.objects.stores import heads, object_store
from wherry.staging.object_journal import (
    NAME,
    JournalPast,
    begin_journal,
    read_past,
    sent_before,
    without_unproved,
)
from wherry.staging.object_lease import ObjectLease
from wherry.storage.folders import PREFIX
from wherry.storage.location import Location
from wherry.storage.sidecar import sidecar_name
from wherry.upload.overflow import PREFIX as OVERFLOW
from wherry.upload.run import UploadRun, is_inner
from wherry.upload.sender import Sender
from wherry.upload.staged_objects import StagedObjects
from wherry.upload.uploaded_file import UploadContext

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from wherry.objects.uploads import ObjectStore, StoredObject, Upload
    from wherry.staging.journal import Header, Journal
    from wherry.staging.object_journal import ObjectJournal

_AREA = re.compile(r"\.[0-9a-f]{8}")
# Failures of a store that its user mends, and then goes on.
_MENDED_OUTSIDE = ("expired", "no-credentials", "refused", "forbidden", "quota", "clock")
_log = logger(__name__)


class ObjectStaging:
    """The staging of one conversion to a store of objects; use it in a `with` statement, as `Staging`.

    Attributes:
        target: where the checkpoint will appear.
        location: the target as this run sees it; files that are put there are uploaded at once.
        spill: a local folder for temporary files of decoded bytes.
        discarded: why what an earlier run left was not resumed; None if there was none.
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
        held: int | None = None,
        resume: bool = True,
        by_checksum: bool = False,
        direct: bool = False,
    ) -> None:
        """Choose the names; nothing is asked of the store.

        Args:
            target: what will be committed.
            identity: eight hex digits of the conversion; the same conversion finds its objects again.
            header: what identifies the conversion, for the journal.
            members: names of commit members, relative to the target.
            nbytes: size of the checkpoint.
            held: bytes of parts that are in memory at a time; see Sender.
            resume: whether a later run of the conversion goes on where this one ends.
            by_checksum: whether the checksums of the store are the proof, so that those of every part must be known.
            direct: whether the target is one file that nobody reads before the commit; see UploadRun.
        """
        store = object_store(target.store)
        assert store is not None, "the caller has asked"
        self.target, self.location = target, target
        self.discarded: str | None = None
        self.spill = Path(tempfile.gettempdir()) / f"{PREFIX}spill-{secrets.token_hex(8)}"
        self._store: ObjectStore = store
        self._header, self._members, self._nbytes, self._held = header, members, nbytes, held
        self._stem = f"{PREFIX}{target.name}"
        self._area = target.parent.join(f"{self._stem}.{identity}")
        self._lease = ObjectLease(store, target.parent.join(f"{self._stem}.lease"), target.uri)
        self._error: BaseException | None = None
        self._committed, self._resume, self._by_checksum, self._direct = False, resume, by_checksum, direct
        self._journal: ObjectJournal

    def __enter__(self) -> Self:
        self._lease.__enter__()
        try:
            self._open()
        except BaseException as error:
            self._lease.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run.using.sender.stop()
        shutil.rmtree(self.spill, ignore_errors=True)
        lost = self._is_lost()
        try:
            if not lost and not self._committed:
                kept = self._resume and _resumable(self._error or error)
                self._keep() if kept else self._remove()
        finally:
            self._lease.__exit__(kind, error, trace)
        if lost and not self._committed and isinstance(error, Exception):
            raise self._lease.lost() from error

    def journal(self) -> Journal:
        """The journal, begun or continued."""
        return self._journal

    def require_held(self) -> None:
        """Check that this run may still write.

        Raises:
            TargetInUseError: another run has taken over the target.
        """
        self._lease.require_held()

    def failed(self, error: WherryError) -> WherryError:
        """Declare that the target will not be committed, while others share the `with` block; see Staging."""
        self._error = self._lease.lost() if self._is_lost() else error
        return self._error

    def flush(self) -> None:
        """Write what the journal has noted."""
        self._journal.flush()

    def commit(self, beside: bytes | None = None) -> None:
        """Make the target appear; see Staging.

        Args:
            beside: contents of the sidecar of a single file, which is written beside it just before.

        Raises:
            TargetExistsError: the target exists; it was not touched.
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        self._lease.require_held()
        if beside is not None:
            self._put_beside(beside)
        try:
            self.run.commit()
        except TargetExistsError:
            self._lease.require_held()
            raise
        self._committed = True
        try:
            self.run.drop_staged()
            self._journal.remove()
        except WherryError as error:  # the target is whole; `clean` finds what is left
            _log.warning("objects of the run were not removed: %s", error)

    def withdraw(self) -> None:
        """Let the target that was committed be removed at the end of the `with` block."""
        self._committed = False

    def _open(self) -> None:
        """Take up what earlier runs of this conversion have sent, and remove what others have left."""
        if is_committed(self.target, self._members):
            raise _exists(self.target)
        past = read_past(self._area, self._header)
        if past.reason:
            self.discarded, past = past.reason, JournalPast()
        present = self._taken_up(past)
        own = without_unproved(past, present, self._store) if self._by_checksum else present
        before, agreed = sent_before(past, own, self._store)
        if not agreed:
            self.discarded = "the store no longer has all parts that the interrupted run had sent"
        if not agreed or len(own) < len(present):  # moves whose bytes are gone are not done
            past = replace(past, done=())
        self._journal = begin_journal(
            past,
            self._header,
            self._area,
            self._store,
            self._lease.token,
            self.require_held,
            self._nbytes,
            self._members,
        )
        using = UploadContext(
            self._store, self._lease.token, Sender(self._held), self._journal, self.target.store.protocol
        )
        self.run = UploadRun(
            self.target, self._area.path, using, self._members, before, past.notes, self.require_held
        )
        # Units of one file send their parts under its staging name.
        self.run.direct = self._direct and self.run.place(self.target.path) not in before
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
                self._store.remove_object(path, found.mark)
            elif found.run in past.runs:
                own[path] = found
            elif self._is_inner(path) or (areas and found.run):
                others[path] = found
            else:  # at the first one: there may be a million more
                raise _exists(self.target)
        if areas:
            self._drop_beside()
        self._drop_others(others, past)
        return own

    def _drop_others(self, others: Mapping[str, StoredObject], past: JournalPast) -> None:
        """Remove the objects of other conversions, and all uploads but those of a journal."""
        for path, found in others.items():
            self._store.remove_object(path, found.mark)
        known, apart = {upload.key for upload in past.uploads.values()}, self._store.aborts_apart
        for upload in list(self._uploads()):
            if upload.key not in known and (apart or upload.path not in past.uploads):
                self._store.abort(upload)
        if others:
            self.discarded = self.discarded or (
                "the interrupted run had a different source, plan, option or digest algorithm"
            )

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
                own = area == self._area and not journal and entry.name.startswith(NAME)
                if not own and not is_inner(entry.name):
                    yield area.join(entry.name).path

    def _is_inner(self, path: str) -> bool:
        """Whether a path is that of a staging object."""
        return path.startswith(self.target.parent.join(f"{self._stem}.").path)

    def _uploads(self) -> Iterator[Upload]:
        inside = f"{self.target.path}/"
        for upload in self._store.uploads(self.target.path):
            if upload.path == self.target.path or upload.path.startswith(inside):
                yield upload
        yield from self._store.uploads(self.target.parent.join(f"{self._stem}.").path)

    def _put_beside(self, data: bytes) -> None:
        """Put the sidecar of a single file in place of one that was left by a target that no longer exists."""
        place = self.target.parent.join(sidecar_name(self.target.name))
        before = self._store.head(place.path)
        if self._store.head(self.target.path) is not None:
            raise _exists(self.target)
        try:
            self._store.put_object(
                place.path, data, self._lease.token, replaces=before.mark if before else ""
            )
        except FileExistsError as error:
            self._lease.require_held()
            raise _exists(self.target) from error

    def _drop_beside(self, *runs: str) -> None:
        """Remove the sidecar of a file that does not exist; only that of some runs, if any are named."""
        place = self.target.parent.join(sidecar_name(self.target.name)).path
        found = self._store.head(place)
        if found is not None and found.run and (not runs or found.run in runs):
            self._store.remove_object(place, found.mark)

    def _keep(self) -> None:
        """Leave everything for the next run of this conversion."""
        with suppress(WherryError):
            self._journal.flush()
            self.run.drop_overflow()

    def _remove(self) -> None:
        """Remove everything that this run, and those that it continued, have put into the store."""
        try:
            self.run.abort()
            self._drop_beside(self._lease.token)
            self._journal.remove()
        except WherryError as error:
            _log.warning("objects of the run were not removed; `wherry clean` finds them: %s", error)

    def _is_lost(self) -> bool:
        try:
            return not self._lease.holds()
        except StorageError:
            return False  # a storage error does not mean that another run took over


def areas_of(target: Location) -> Iterator[Location]:
    """The folders of staging objects that runs have left for a target.

    Raises:
        StorageError: the storage failed.
    """
    stem = f"{PREFIX}{target.name}"
    for entry in target.parent.entries():
        if entry.is_dir and entry.name.startswith(stem) and _AREA.fullmatch(entry.name[len(stem) :]):
            yield target.parent.join(entry.name)


def is_committed(target: Location, members: tuple[str, ...]) -> bool:
    """Whether a target in a store of objects has its commit member: of several, that which is written last.

    Args:
        target: a file or folder.
        members: names of commit members of its format.

    Raises:
        StorageError: the storage failed.
    """
    store = object_store(target.store)
    if store is None:
        return False
    if any(store.head(path) for path in (target.path, *(target.join(name).path for name in members[:1]))):
        return True
    # A run that was killed in its commit still has the staging object of the last one.
    return any(store.head(target.join(name).path) for name in members[1:]) and not any(
        store.head(area.join(members[0]).path) for area in areas_of(target)
    )


def is_unfinished(target: Location, members: tuple[str, ...]) -> bool:
    """Whether what is at a target in a store of objects was left by a run that has not committed it.

    Args:
        target: a file or folder.
        members: names of commit members of its format.

    Raises:
        StorageError: the storage failed.
    """
    if object_store(target.store) is None or is_committed(target, members):
        return False
    return next(areas_of(target), None) is not None


def _resumable(cause: BaseException | None) -> bool:
    """Whether the same conversion goes on after this: a stop from outside, or an error that ends without a change."""
    if cause is None:
        return False
    if isinstance(cause, StorageError) and cause.kind in _MENDED_OUTSIDE:
        return True
    return not isinstance(cause, Exception) or (isinstance(cause, WherryError) and cause.retryable)


def _exists(target: Location) -> TargetExistsError:
    return TargetExistsError(
        "target already exists", uri=target.uri, cure="choose another target, or remove this one"
    )
