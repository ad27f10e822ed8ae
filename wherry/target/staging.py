"""Staging and commit: a target appears complete, under its final name, in one step, or not at all.

A conversion holds the lease of its target while it writes into a place that no reader takes for a checkpoint. The rule
is the same wherever the target is; what differs is the sink, which has a class of its own:

- `FileStaging`, a file system: an area next to the target, and a rename that replaces nothing.
- `ObjectStaging`, a store that takes parts: objects, and a create-only put of the commit members (`object_staging`).
- `CopiedStaging`, a store of whole files: a local area, whose files are copied at the commit; and `HubStaging`, where
  they become one commit of a repository (`copied_staging`).

If anything fails before the commit, nothing is left at the destination. A process that is killed, interrupted or
cancelled leaves what it has written, which `detect` calls unfinished; the same conversion resumes it, another one to
the same target discards it, and `wherry clean` removes it. If a run was stopped for so long that another run took over
its target, it ends with TargetInUseError, and does not touch what the other run writes. After the commit the target is
there, and what fails then is only a warning.

**On a file system** the area has a name that begins with a dot and a letter, so that neither Lingua (which
treats any folder that begins with ten digits as a checkpoint) nor Orbax (which lists digits and `<prefix>_<digits>`,
and deletes its own temporary names) ever touches it. Other users cannot access it; files in it have the modes of the
umask, and keep them when they are committed. The commit is a rename that replaces nothing (`wherry.store.folders`)
and an fsync of the parent. New parent folders are synced into their own parents, and removed if the run fails.

Every owner commits only from its own area, and only while it holds the target's lease: the area of a run that was taken
over no longer exists.

**Areas** of earlier runs are resumed. An area is a folder `.wherry-<name>.<id>-<token>` next to the target, created
exclusively and accessible to its user alone. It holds the staged target under its own name, the journal, and other
files of the run. The token is that of the owner's lease: all files of one run are under one name, a takeover is one
rename, and after it the paths that the former owner knows no longer exist. A run that ends normally, and can be
resumed, removes the token from the name.

A former owner that is not known to have ended may still hold files open, and write to them at any later time. So its
area is copied, and its later writes never reach the files of the new run. Logs are copied before the data that they
describe.

Only an area of the same user is resumed: a folder with mode 0700, without links or special files in it.

`open_area` performs the steps that must exclude other runs, and takes no longer than a few renames and a listing;
`complete` does the rest: it removes discarded areas, and copies an area that a former owner may still write to.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import OnProgress, logger
from wherry.errors import (
    StorageError,
    TargetExistsError,
    TargetInUseError,
    UnsupportedError,
    UsageError,
    WherryError,
    storage_errors,
)
from wherry.store.copy import copy_files, copy_written
from wherry.store.folders import (
    DRAFT,
    PREFIX,
    is_staging,
    is_there,
    make_durable_folders,
    names_files_at_once,
    raise_walk_error,
    remove,
    remove_leftover,
    rename_without_replacing,
    staging_stem,
    sync_folder,
    sync_tree,
)
from wherry.store.local_store import LocalStore
from wherry.store.location import Location
from wherry.store.sidecar import sidecar_name
from wherry.target.files import require_separate_names
from wherry.target.journal import Header, Journal, open_journal
from wherry.target.lease import Lease, LeaseFile, lease_of
from wherry.target.signed_log import journal_key, read_log

if TYPE_CHECKING:
    from wherry.store.store import Entry


# The source, its place at the location of a staging, and the source's entry.
CopiedFile: TypeAlias = "tuple[Location, Location, Entry]"
# Failures of a store that its user mends, and then goes on.
_MENDED_OUTSIDE = ("expired", "no-credentials", "refused", "forbidden", "quota", "clock")
_log = logger(__name__)


class Staging(ABC):
    """What one conversion writes of its target until the commit; use it in a `with` statement.

    Leaving the block without a commit removes it, unless the run can be resumed: it was stopped from outside (Ctrl-C, a
    cancelled flow run, an exit), or the storage failed with an error that a retry, or its user, can fix.

    Attributes:
        target: where the checkpoint will appear.
        location: where it is written until then.
        spill: a local folder for temporary files of decoded bytes; never kept for a later run.
        discarded: why what an earlier run left was not resumed; None if there was none.
    """

    location: Location
    spill: Path

    def __init__(self, target: Location, lease: Lease, area: str, *, resume: bool) -> None:
        """Choose the target.

        Args:
            target: what will be committed.
            lease: of the target.
            area: path or URI of what is written until then, for warnings.
            resume: whether a later run of the conversion can go on where this one ends.
        """
        self.target = target
        self.discarded: str | None = None
        self._lease, self._area_uri, self._resume = lease, area, resume
        self._error: BaseException | None = None
        self._committed = False

    def __enter__(self) -> Self:
        with storage_errors(self.target.uri):
            self._begin()
            try:
                self._open()
            except BaseException as error:
                self._leave(error, self._undo_open, own=True)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._committed:
            self._leave(error, self._remove_rest)
        elif self._is_resumable(self._error or error):
            self._leave(error, self._keep)
        else:
            self._leave(error, self._remove)

    @abstractmethod
    def journal(self) -> Journal:
        """The journal of the conversion, begun or continued; it is closed with the block.

        Raises:
            StorageError: the storage failed.
        """

    def require_held(self) -> None:
        """Check that this run may still write.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        self._lease.require_held()

    def failed(self, error: WherryError) -> WherryError:
        """Declare that the target will not be committed, while others share the `with` block.

        Returns:
            The error that the run ends with; a different one if the target was taken over.
        """
        self._error = self._lease.lost() if self._is_lost() else error
        return self._error

    def sync_names(self) -> None:  # noqa: B027  objects have their names with their bytes
        """Make the names of what is written as durable as the journal, where it has names.

        Raises:
            StorageError: the storage failed.
        """

    @abstractmethod
    def copy_files(self, files: Sequence[CopiedFile], memory: int, progress: OnProgress | None) -> int:
        """Copy files as they are, and resume what an earlier run began.

        Args:
            files: source, place at `location`, and the source's entry, each.
            memory: budget in bytes.
            progress: called a few times a second.

        Returns:
            Number of bytes that were already there.

        Raises:
            IncompleteError: a source file was truncated during the copy.
            MismatchError: an object was replaced during the copy.
            UnsupportedError: the file system does not tell two of the files apart.
            TargetExistsError: an object was created at the target meanwhile.
            StorageError: the storage failed.
        """

    def prove_small(self) -> None:  # noqa: B027  a disk is read back as a whole
        """Read back the files that are not read as tensors, unless they are on a disk.

        Raises:
            MismatchError: it differs from what was written.
            StorageError: the storage failed.
        """

    def commit(self, sidecar: bytes | None = None) -> None:
        """Make the target appear.

        Args:
            sidecar: contents of the sidecar of a single file, which is written next to it just before.

        Raises:
            TargetExistsError: the target exists; it was not touched.
            TargetInUseError: another run has taken over the target.
            MismatchError: the store has other bytes than were sent; only where files are copied.
            StorageError: the storage failed.
        """
        try:
            with storage_errors(self.target.uri):
                self._commit(sidecar)
        except (StorageError, TargetExistsError) as error:
            if self._committed:
                _log.warning("%s is committed, but a loss of power may undo it: %s", self.target.uri, error)
            elif self._is_lost():
                raise self._lease.lost() from error
            else:
                raise

    def _begin(self) -> None:
        """Take the lease."""
        self._lease.__enter__()

    @abstractmethod
    def _open(self) -> None:
        """Resume the area of an earlier run of this conversion, and discard those of others; the lease is held."""

    def _undo_open(self) -> None:  # noqa: B027  objects are for the next run
        """Undo an opening that has failed."""

    def _stop(self) -> None:  # noqa: B027  see FileStaging and ObjectStaging
        """Stop the threads and senders that still work, when the block ends."""

    @abstractmethod
    def _commit(self, sidecar: bytes | None) -> None:
        """Make the target appear, and set `_committed`."""

    def _has_progress(self) -> bool:
        """Whether there is anything that a later run can resume."""
        return True

    @abstractmethod
    def _keep(self) -> None:
        """Keep the staged files for a later run."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove the files that this run, and the runs that it continued, have written."""

    def _remove_rest(self) -> None:
        """Remove the remaining files of a run that has committed its target."""
        self._remove()

    def _forget(self) -> None:  # noqa: B027  objects have no folders
        """Remove what the run had made around the target; nothing else is left of it."""

    def _leave(self, error: BaseException | None, act: Callable[[], None], *, own: bool = False) -> None:
        """Keep or remove the staged files, unless they belong to another run by now, and release the lease.

        Args:
            error: what has ended the run, if anything has.
            act: does it.
            own: whether it touches only what has the name of this owner, which no other run uses.
        """
        lost = not self._committed and self._is_lost()
        try:
            if own or not lost:
                act()
        except (
            WherryError,
            OSError,
        ) as failure:  # what ended the run counts, and a target that was committed
            _log.warning(
                "the staging area %s was not removed; `wherry clean` finds it: %s", self._area_uri, failure
            )
        finally:
            self._lease.__exit__(type(error) if error else None, error, None)
        if lost:
            if isinstance(error, Exception) and not isinstance(error, TargetInUseError):
                raise self._lease.lost() from error
        elif not self._committed:
            self._forget()

    def _is_resumable(self, cause: BaseException | None) -> bool:
        """Whether the same conversion can be resumed after the error that ended this run; None if nothing has."""
        if cause is None or not self._resume or not self._has_progress():
            return False
        if isinstance(cause, StorageError) and cause.kind in _MENDED_OUTSIDE:
            return True
        # Else only a stop from outside: KeyboardInterrupt, SystemExit, Prefect's TerminationSignal.
        return not isinstance(cause, Exception) or (isinstance(cause, WherryError) and cause.retryable)

    def _is_lost(self) -> bool:
        try:
            return not self._lease.holds()
        except StorageError:
            return False  # a storage error does not mean that another run took over


JOURNAL, SPILL, SIDECAR, REPLACED = (
    f"{PREFIX}{name}" for name in ("journal", "spill", "sidecar", "replaced")
)
LOG_SUFFIX = ".wherry-log"  # suffix of files in a target that log which of its other bytes are written
_FORMER = ".former"  # an area that is being copied
_HEX = "[0-9a-f]{8}"
_OTHERS = (DRAFT, _FORMER, ".journal", ".spill", ".sidecar")


@dataclass(frozen=True, slots=True)
class FormerArea:
    """A file or folder that an earlier run left for a target.

    Attributes:
        path: its path.
        identity: eight hex digits of the conversion; None if it is not an area.
        token: of its owner; None if the owner released the area.
        copied: whether a run was copying it when it ended.
    """

    path: Path
    identity: str | None = None
    token: str | None = None
    copied: bool = False

    @property
    def is_draft(self) -> bool:
        """Whether the area is an unfinished lease, or a file or folder that is being removed."""
        return self.path.suffix == DRAFT

    def is_abandoned(self, dead: str | None) -> bool:
        """Whether no process can write to it any more.

        Args:
            dead: the token of an owner that is known to have ended.
        """
        return not self.copied and (self.token is None or self.token == dead)


def left_for(parent: Path, name: str) -> Iterator[FormerArea]:
    """Files and folders that earlier runs left for a target, including drafts of leases but not the lease itself.

    Args:
        parent: the target's folder.
        name: the target's name.
    """
    # The last part of a name has no dot before its suffix, so no other target's names are matched.
    pattern = re.compile(rf"{re.escape(staging_stem(name))}\.({_HEX})(?:-({_HEX}))?(\.[a-z]+)?")
    for path in parent.iterdir():
        found = pattern.fullmatch(path.name)
        if found is None:
            continue
        identity, token, suffix = found.groups()
        if suffix in (None, _FORMER):
            yield FormerArea(path, identity, token, copied=suffix is not None)
        elif suffix in _OTHERS:
            yield FormerArea(path)


def distrust_reason(area: Path) -> str | None:
    """Why an area is not trusted to belong to this user; None if it is trusted.

    Raises:
        FileNotFoundError: it no longer exists.
        OSError: the storage failed.
    """
    status, user = area.lstat(), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != user:
        return "it belongs to another user"
    if status.st_mode & 0o077:
        return "other users had access to it"
    for folder, folders, files in os.walk(area, onerror=_unless_removed):
        for name in (*folders, *files):
            try:
                one = os.lstat(os.path.join(folder, name))  # noqa: PTH118  twice as fast as Path, of thousands
            except FileNotFoundError:
                continue  # the former owner resumed and removed it
            if one.st_uid != user:
                return f"{name} in it belongs to another user"
            if not (stat.S_ISDIR(one.st_mode) or (stat.S_ISREG(one.st_mode) and one.st_nlink == 1)):
                return f"{name} in it is a link or a special file"
    return None


def _unless_removed(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed: what is in it was not examined."""
    if not isinstance(error, FileNotFoundError):
        raise error


def take_up(left: FormerArea, area: Path, dead: str | None) -> Path | None:
    """Rename the area of an earlier run to a name of this run, after which its former owner cannot reach it by path.

    Args:
        left: the area of the earlier run; it must be trusted.
        area: the name of this run's area.
        dead: see FormerArea.is_abandoned.

    Returns:
        The path of the former area if its owner may still write to it, so that it must be copied; None if it
        became the new area.

    Raises:
        FileNotFoundError: it no longer exists.
        OSError: the storage failed.
    """
    if left.is_abandoned(dead):
        left.path.rename(area)
        return None
    former = area.with_name(f"{area.name}{_FORMER}")
    left.path.rename(former)
    return former


def set_aside(path: Path) -> Path:
    """Rename an area or file that is to be removed, durably, so that no run resumes what is left of it.

    Raises:
        FileNotFoundError: it no longer exists.
        OSError: the storage failed.
    """
    aside = hide(path)
    # Else a loss of power can undo the rename, but not the removal of what the journal names.
    sync_folder(path.parent)
    return aside


def hide(path: Path) -> Path:
    """Rename an area or file, so that no run resumes it; see `set_aside`, which makes that durable."""
    stem = re.sub(rf"\.{_HEX}(-{_HEX})?(\.[a-z]+)?$", "", path.name)
    return path.rename(path.with_name(f"{stem}.{secrets.token_hex(4)}{DRAFT}"))


def copy_area(former: Path, area: Path) -> None:
    """Copy an area into new files, durably, names included; the journal last, so that a partial copy has none.

    Args:
        former: the area; its files may be written to meanwhile.
        area: a new folder.

    Raises:
        OSError: the storage failed.
    """
    journal = former / JOURNAL
    signed = journal.read_bytes() if journal.exists() else None  # before the data that it describes
    files: list[Path] = []
    for folder, folders, names in os.walk(former, onerror=raise_walk_error):
        here = Path(folder)
        if here == former:
            folders[:] = [name for name in folders if not is_staging(name)]
            names = [name for name in names if not is_staging(name)]  # noqa: PLW2901
        for name in folders:
            (area / here.relative_to(former) / name).mkdir()
        files += [here / name for name in names]
    for file in sorted(files, key=lambda file: not file.name.endswith(LOG_SUFFIX)):
        copy_written(file, area / file.relative_to(former))
    sync_tree(area)  # the names of the data must be durable before the journal is
    if signed is not None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(area / JOURNAL, flags, 0o600)
        with os.fdopen(descriptor, "wb") as written:
            written.write(signed)
            written.flush()
            os.fsync(descriptor)
        sync_folder(area)


@dataclass(slots=True)
class AreaHistory:
    """What happened to the areas of earlier runs when an area was opened.

    Attributes:
        is_new: whether the area was created, not resumed.
        former: an area that must be copied into the new one; None if there is none.
        aside: files and folders that are to be removed.
        discarded: why an earlier area was not resumed; None if there was none.
    """

    is_new: bool = True
    former: Path | None = None
    aside: list[Path] = field(default_factory=list["Path"])
    discarded: str | None = None


def open_area(area: Path, name: str, identity: str | None, lease: Lease) -> AreaHistory:
    """Resume an earlier area under a new name, or create the area; the caller excludes other runs.

    Args:
        area: the path of this run's area, which must not exist.
        name: the target's name.
        identity: the conversion; None if no area may be resumed.
        lease: of the target, held.

    Raises:
        UsageError: the key of the journals is too short.
        OSError: the storage failed.
    """
    opening = AreaHistory()
    same = [left for left in left_for(area.parent, name) if left.identity and left.identity == identity]
    for left in sorted(same, key=lambda left: _progress(left, name, lease), reverse=True):
        with suppress(FileNotFoundError):  # the former owner resumed and removed it
            reason = distrust_reason(left.path)
            if reason is None:
                opening.former = take_up(left, area, lease.dead)
                opening.is_new = opening.former is not None
                break
            opening.discarded = f"the staging area of an interrupted run was not reused: {reason}"
    for left in list(left_for(area.parent, name)):  # anew: a former owner may have renamed its area meanwhile
        if left.path not in (area, opening.former):
            with suppress(FileNotFoundError):  # a run that did not get the lease has removed its draft
                _discard(left, lease, opening)
    if opening.is_new:
        area.mkdir(mode=0o700)  # last: if an earlier step fails, no area needs to be removed
    return opening


def complete(opening: AreaHistory, area: Path) -> None:
    """Remove discarded areas, copy a former area if required, and remove files that are never kept for a later run.

    Raises:
        OSError: the storage failed.
    """
    for path in opening.aside:  # before the copy, which may need the space
        remove_leftover(path)
    if opening.former is not None:
        copy_area(opening.former, area)
        sync_folder(area.parent)  # the name of the copy must be durable before the original is removed
        remove_leftover(set_aside(opening.former))
    for name in (SPILL, SIDECAR, REPLACED):
        remove_leftover(area / name)


def _progress(left: FormerArea, name: str, lease: Lease) -> tuple[int, bool]:
    """The order in which areas are resumed: most recorded moves first, then those that need no copy.

    A journal counts only together with the staged target: a power failure while an area was removed can leave it alone.
    """
    try:
        usable = is_there(left.path / name) and not distrust_reason(left.path)
        lines = read_log(left.path / JOURNAL, journal_key())[0] if usable else []
    except FileNotFoundError:
        return 0, False
    return len(lines), left.is_abandoned(lease.dead)


def _discard(left: FormerArea, lease: Lease, opening: AreaHistory) -> None:
    """Set aside the area of another conversion to this target; holding the lease proves that it is unused."""
    assert isinstance(lease.register, LeaseFile), "areas are on a file system"
    if left.path.lstat().st_uid not in (os.geteuid(), lease.register.uid):
        opening.discarded = f"{left.path.name} belongs to another user and was not removed"
    elif left.is_draft:
        opening.aside.append(left.path)
    else:
        opening.aside.append(set_aside(left.path))
        opening.discarded = (
            opening.discarded
            or "the interrupted run had a different source, plan, option or digest algorithm"
        )


class FileStaging(Staging):
    """The staging area of one conversion to a file system; see Staging.

    Attributes:
        area: the path of the area; its parent folder exists once the block runs.
    """

    def __init__(
        self,
        target: Location,
        identity: str,
        header: Header | None = None,
        *,
        resume: bool = True,
        is_file: bool = False,
    ) -> None:
        """Choose the area.

        Args:
            target: what will be committed.
            identity: eight hex digits of the conversion; the same conversion finds its area again.
            header: what identifies the conversion in its journal, if it has one.
            resume: whether to resume the area of an earlier run.
            is_file: whether the target is a single file; entering raises UnsupportedError where the file system cannot
                make it appear whole and replace nothing.

        Raises:
            UsageError: the target's storage is read-only.
        """
        if not target.store.capabilities.local:
            raise UsageError(
                f"{target.store.protocol}:// is read-only",
                uri=target.uri,
                cure="choose a local folder, gs://, s3:// or az://",
            )
        lease, self._parent = lease_of(target), Path(target.path).parent
        self._released = self._parent / f"{staging_stem(target.name)}.{identity}"
        self.area = Path(f"{self._released}-{lease.token}")
        super().__init__(target, lease, str(self.area), resume=resume)
        self.location = Location(LocalStore(), str(self.area / target.name))
        self.spill = self.area / SPILL
        self._identity, self._header, self._is_file = identity if resume else None, header, is_file
        self._made: list[Path] = []
        self._new, self._inode = False, (0, 0)
        self._journal: Journal | None = None

    def journal(self) -> Journal:
        """See Staging; the staged files are removed if the journal does not say which moves are done."""
        assert self._header is not None, "the conversion has a journal"
        self._journal = open_journal(self.area / JOURNAL, self._header, self.require_held)
        if not self._journal.done:
            with storage_errors(self.target.uri):
                remove(Path(self.location.path))
        return self._journal

    def copy_files(self, files: Sequence[CopiedFile], memory: int, progress: OnProgress | None) -> int:  # noqa: ARG002
        """See Staging; no file is in memory."""
        root = self.location.parent
        require_separate_names(root, (place.path[len(root.path) + 1 :] for _source, place, _entry in files))
        return copy_files(files, progress)

    def sync_names(self) -> None:
        """See Staging: the names in the area, and its own name."""
        with storage_errors(self.target.uri):
            sync_tree(self.area)
            sync_folder(self._parent)

    def _begin(self) -> None:
        try:
            # A failed run may be removing the folders that it created.
            for last in (False, False, True):
                try:
                    for parent in make_durable_folders(self._parent):
                        self._made.append(parent)
                    self._lease.__enter__()
                except FileNotFoundError:
                    if last:
                        raise
                except StorageError:
                    if last or self._parent.exists():
                        raise
                else:
                    return
        except BaseException:
            self._forget()
            raise

    def _open(self) -> None:
        if self._is_file:
            require_file_commit(self._parent, self.target)
        with self._lease.exclusive():  # so that files of a run that has taken over are not touched
            found = open_area(self.area, self.target.name, self._identity, self._lease)
            self._new, self.discarded = found.is_new, found.discarded
        self.require_held()  # in case the storage has no locks
        status = self.area.lstat()
        self._inode = (status.st_dev, status.st_ino)
        complete(found, self.area)
        if not is_there(self.location.path):
            # After a power failure during the commit, the staged file may have neither name.
            remove(self.area / JOURNAL)

    def _undo_open(self) -> None:
        self._remove() if self._new else self._keep()

    def _stop(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _has_progress(self) -> bool:
        try:
            return Path(self.location.path).exists()
        except OSError:
            return True  # an error of the storage does not mean that it is gone

    def _keep(self) -> None:
        """Release the area for a later run; none of its files is open any more."""
        with suppress(OSError):  # the next run removes it
            remove_leftover(self.spill)
        with suppress(TargetInUseError, OSError), self._lease.exclusive():
            self.area.rename(self._released)  # else the next run must copy it, as its name keeps the token

    def _remove(self) -> None:
        """Rename the area so that no run resumes it, then remove it; if that fails, remove it under the lock."""
        try:
            aside = hide(self.area)
        except FileNotFoundError:
            return  # another run took it over
        except OSError:
            with suppress(TargetInUseError), self._lease.exclusive():
                remove_leftover(self.area)
            return
        if not self._committed:  # else a run that finds the area again finds nothing staged in it
            with suppress(OSError):  # a storage that fails keeps no area; see `set_aside`
                sync_folder(self._parent)
        remove_leftover(aside)

    def _forget(self) -> None:
        for parent in reversed(self._made):
            try:
                parent.rmdir()
            except OSError as error:  # one that is not empty stays
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST):
                    raise

    def _commit(self, sidecar: bytes | None) -> None:
        staged, target = Path(self.location.path), Path(self.target.path)
        sync_tree(staged)
        if sidecar is not None:
            LocalStore().put(str(self.area / SIDECAR), sidecar)
        with self._lease.exclusive():
            if not self._owns_area():
                raise StorageError(
                    "the staging area was replaced", uri=str(self.area), cure="run the conversion again"
                )
            try:
                with self._sidecar_put(target) if sidecar is not None else nullcontext():
                    _rename(staged, target)
            except FileExistsError as error:
                raise TargetExistsError(
                    "target already exists; it was created during the conversion",
                    uri=self.target.uri,
                    cure="choose another target",
                ) from error
            self._committed = True
            sync_folder(target.parent)

    @contextmanager
    def _sidecar_put(self, target: Path) -> Generator[None]:
        """Put the sidecar next to the target; if the block fails, restore the previous sidecar."""
        if is_there(target):
            raise FileExistsError(target)
        sidecar, before = target.parent / sidecar_name(target.name), self.area / REPLACED
        ours, staged = self.area / SIDECAR, _inode(Path(self.location.path))
        try:
            with suppress(FileNotFoundError):
                sidecar.rename(before)  # it belonged to a target that no longer exists
            ours.rename(sidecar)
            sync_folder(sidecar.parent)
            yield
        except BaseException:
            # An interruption can come just after the rename.
            committed = staged is not None and _inode(target) == staged
            if not committed and self._owns_area() and self._lease.holds():
                if before.exists():
                    before.replace(sidecar)
                elif not ours.exists():
                    sidecar.unlink(missing_ok=True)
            raise

    def _owns_area(self) -> bool:
        return _inode(self.area) == self._inode


def require_file_commit(folder: Path, target: Location) -> None:
    """Refuse a target of a single file where a commit that is killed leaves an empty file.

    Args:
        folder: on its file system; drafts of a killed process are left there, as of a lease.
        target: the file.

    Raises:
        UnsupportedError: the file system has neither `renameat2` nor hard links.
        OSError: the storage failed.
    """
    first, second = (
        folder / f"{staging_stem(target.name)}.{secrets.token_hex(4)}{DRAFT}" for _draft in range(2)
    )
    if not names_files_at_once(first, second):
        raise UnsupportedError(
            "a single file cannot appear in one step: the file system has neither hard links nor RENAME_NOREPLACE",
            uri=target.uri,
            cure="choose a format that is a folder, another file system, or the store itself (gs://, s3://, az://)",
        )


def _rename(staged: Path, target: Path) -> None:
    """Rename in one step that replaces nothing; an error is ignored if the rename took place, as on a network."""
    # While it is open, its inode is that of no other file.
    descriptor = os.open(staged, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        rename_without_replacing(staged, target)
    except OSError:
        found = os.fstat(descriptor)
        if _inode(target) != (found.st_dev, found.st_ino):
            raise
    finally:
        os.close(descriptor)


def _inode(path: Path) -> tuple[int, int] | None:
    """Identifies a file or folder by device and inode; None if it does not exist."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
