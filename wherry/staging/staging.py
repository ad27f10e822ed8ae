"""Staging and commit: a target appears complete, under its final name, in one step, or not at all.

A conversion writes into a staging area beside the target (see `wherry.staging.area`). The name begins with a dot and
a letter, so that neither Lingua (which treats any folder that begins with ten digits as a checkpoint) nor Orbax
(which lists digits and `<prefix>_<digits>`, and deletes its own temporary names) ever touches it. Other users cannot
access the area; files in it have the modes of the umask, and keep them when they are committed. On a local file
system the commit is a rename that replaces nothing (`wherry.storage.renames`) and an fsync of the parent. New parent
folders are synced into their own parents. A store of objects has no renames; see `object_staging` and
`copied_staging`.

Every owner commits only from its own area, and only while it holds the target's lease. If a run was stopped for so long
that another run took over its target, its area no longer exists; it ends with TargetInUseError, and does not touch the
files of the other run.

If anything fails before the commit, nothing is left at the destination, including parent folders that were created for
it. A process that is killed, interrupted or cancelled leaves the staging area, which `detect` calls unfinished; the
same conversion resumes it, another one to the same target discards it, and `wherry clean` removes it. After the rename
the target is there, and what fails then (the sync of the parent, the removal of the area) is only a warning.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from wherry.core.progress import logger
from wherry.errors import (
    StorageError,
    TargetExistsError,
    TargetInUseError,
    UsageError,
    WherryError,
    storage_errors,
)
from wherry.staging.area import JOURNAL, REPLACED, SIDECAR, SPILL, set_aside
from wherry.staging.lease import Lease
from wherry.staging.takeover import complete, open_area
from wherry.storage.folders import (
    make_durable_folders,
    remove,
    remove_leftover,
    staging_stem,
    sync_folder,
    sync_tree,
)
from wherry.storage.location import Location
from wherry.storage.renames import rename_without_replacing
from wherry.storage.sidecar import sidecar_name
from wherry.storage.stores import LocalStore

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType

_log = logger(__name__)


class Staging:
    """The staging area of one conversion; use it in a `with` statement.

    Leaving the block without a commit removes the area and every parent folder that was created for it, unless the
    run can be resumed: it was stopped from outside (Ctrl-C, a cancelled flow run, an exit), or the storage
    failed with an error that a retry can fix.

    Attributes:
        target: where the checkpoint will appear.
        location: where it is written until then; always local. Its parent folder exists once the block runs.
        journal: the file that records which parts of it are done.
        spill: a folder for temporary files of decoded bytes; never kept for a later run.
        discarded: why the area of an earlier run was not resumed; None if there was none.
    """

    def __init__(self, target: Location, identity: str, *, resume: bool = True) -> None:
        """Choose the area.

        Args:
            target: what will be committed.
            identity: eight hex digits of the conversion; the same conversion finds its area again.
            resume: whether to resume the area of an earlier run.

        Raises:
            UsageError: the target's storage is read-only.
        """
        if not target.store.capabilities.local:
            raise UsageError(
                f"{target.store.protocol}:// is read-only",
                uri=target.uri,
                cure="choose a local folder, gs://, s3:// or az://",
            )
        self.target = target
        self.discarded: str | None = None
        self._error: BaseException | None = None
        self._made: list[Path] = []
        self._parent = Path(target.path).parent
        self._identity = identity if resume else None
        self._lease = lease_of(self._parent, target)
        self._released = self._parent / f"{staging_stem(target.name)}.{identity}"
        self._area = Path(f"{self._released}-{self._lease.token}")
        self._new, self._inode, self._committed = False, (0, 0), False
        self.location = Location(LocalStore(), str(self._area / target.name))
        self.journal = self._area / JOURNAL
        self.spill = self._area / SPILL

    def __enter__(self) -> Self:
        with storage_errors(self.target.uri):
            try:
                self._enter_lease()
            except BaseException:
                self._remove_parents()
                raise
            try:
                self._open_area()
            except BaseException as error:
                lost = self._is_lost()
                try:
                    self._remove_area() if self._new else self._release()
                finally:
                    self._lease.__exit__(type(error), error, None)
                if not lost:
                    self._remove_parents()
                elif isinstance(error, OSError):
                    raise self._lease.lost() from error
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._committed:
            self._leave_committed()
            return
        lost, resumable = self._is_lost(), self._resumable(self._error or error)
        try:
            if not lost:  # else the remaining files belong to the other run
                self._release() if resumable else self._remove_area()
        finally:
            self._lease.__exit__(kind, error, trace)
        if lost:
            self._raise_lost(error)
        elif not resumable:
            self._remove_parents()

    def require_held(self) -> None:
        """Check that this run may still write.

        Raises:
            TargetInUseError: another run has taken over the target.
        """
        if self._is_lost():
            raise self._lease.lost()

    def failed(self, error: WherryError) -> WherryError:
        """Declare that this area will not be committed, while other areas share the `with` block.

        Returns:
            The error that the run ends with; a different one if the target was taken over.
        """
        self._error = self._lease.lost() if self._is_lost() else error
        return self._error

    def clear(self) -> None:
        """Remove all staged files, so that they are not committed together with later ones.

        Raises:
            StorageError: a file could not be removed.
        """
        with storage_errors(self.target.uri):
            remove(Path(self.location.path))

    def sync_names(self) -> None:
        """Make the names in the area, and its own name, durable: they must be at least as durable as the journal.

        Raises:
            StorageError: the storage failed.
        """
        with storage_errors(self.target.uri):
            sync_tree(self._area)
            sync_folder(self._parent)

    def commit(self, beside: bytes | None = None) -> None:
        """Make the staged file or folder appear at the target.

        Args:
            beside: contents of the sidecar of a single file, which is written beside it just before.

        Raises:
            TargetExistsError: the target exists; it was not touched.
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        try:
            with storage_errors(self.target.uri):
                self._commit(beside)
        except StorageError as error:
            if self._committed:
                _log.warning("%s is committed, but a loss of power may undo it: %s", self.target.uri, error)
            elif self._is_lost():
                raise self._lease.lost() from error
            else:
                raise

    def _leave_committed(self) -> None:
        """Remove what is left of the run; the target is there, whatever becomes of that."""
        try:
            self._remove_area()
        except OSError as error:
            _log.warning(
                "the staging area %s was not removed; `wherry clean` finds it: %s", self._area, error
            )
        finally:
            self._lease.__exit__(None, None, None)

    def _enter_lease(self) -> None:
        # A failed run may be removing the folders that it created.
        for last in (False, False, True):
            try:
                self._make_parents()
                self._lease.__enter__()
            except FileNotFoundError:
                if last:
                    raise
            except StorageError:
                if last or self._parent.exists():
                    raise
            else:
                return

    def _open_area(self) -> None:
        """Resume the area of an earlier run of this conversion, or create a new one; discard other areas."""
        with self._lease.exclusive():  # so that files of a run that has taken over are not touched
            found = open_area(self._area, self.target.name, self._identity, self._lease)
            self._new, self.discarded = found.is_new, found.discarded
        self.require_held()  # in case the storage has no locks
        status = self._area.lstat()
        self._inode = (status.st_dev, status.st_ino)
        complete(found, self._area)
        if not os.path.lexists(self.location.path):
            remove(
                self.journal
            )  # after a power failure during the commit, the staged file may have neither name

    def _remove_area(self) -> None:
        """Rename the area so that no run resumes it, then remove it; if that fails, remove it under the lock."""
        try:
            remove_leftover(set_aside(self._area))
        except FileNotFoundError:
            return  # another run took it over
        except OSError:
            with suppress(TargetInUseError), self._lease.exclusive():
                remove_leftover(self._area)

    def _resumable(self, cause: BaseException | None) -> bool:
        """Whether the same conversion can resume this area."""
        kept = self._identity is not None  # else no run ever resumes the area
        if cause is None or not kept or not Path(self.location.path).exists():
            return False  # after the commit it no longer exists
        if isinstance(cause, Exception):
            return isinstance(cause, WherryError) and cause.retryable
        return True  # a stop from outside: KeyboardInterrupt, SystemExit, Prefect's TerminationSignal

    def _release(self) -> None:
        """Release the area for a later run; none of its files is open any more."""
        remove_leftover(self.spill)
        with suppress(TargetInUseError, OSError), self._lease.exclusive():
            self._area.rename(self._released)  # else the next run must copy it, as its name keeps the token

    def _is_lost(self) -> bool:
        try:
            return not self._lease.holds()
        except OSError:
            return False  # a storage error does not mean that another run took over

    def _raise_lost(self, error: BaseException | None) -> None:
        """Raise TargetInUseError if the target was taken over, whatever error that caused here."""
        if isinstance(error, Exception) and not isinstance(error, TargetInUseError):
            raise self._lease.lost() from error

    def _remove_parents(self) -> None:
        for parent in reversed(self._made):
            _remove_if_empty(parent)

    def _commit(self, beside: bytes | None) -> None:
        try:
            self._publish(beside)
        except FileExistsError as error:
            raise TargetExistsError(
                "target already exists; it was created during the conversion",
                uri=self.target.uri,
                cure="choose another target",
            ) from error

    def _publish(self, beside: bytes | None) -> None:
        staged, target = Path(self.location.path), Path(self.target.path)
        sync_tree(staged)
        if beside is not None:
            LocalStore().put(str(self._area / SIDECAR), beside)
        with self._lease.exclusive():
            if not self._owns_area():
                raise StorageError(
                    "the staging area was replaced", uri=str(self._area), cure="run the conversion again"
                )
            with self._sidecar_put(target) if beside is not None else nullcontext():
                rename_without_replacing(staged, target)
            self._committed = True
            sync_folder(target.parent)

    @contextmanager
    def _sidecar_put(self, target: Path) -> Generator[None]:
        """Put the sidecar beside the target; if the block fails, restore the previous sidecar."""
        if os.path.lexists(target):
            raise FileExistsError(target)
        sidecar, before = target.parent / sidecar_name(target.name), self._area / REPLACED
        ours, staged = self._area / SIDECAR, _inode(Path(self.location.path))
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
        return _inode(self._area) == self._inode

    def _make_parents(self) -> None:
        for parent in make_durable_folders(self._parent):
            self._made.append(parent)


def lease_of(folder: Path, target: Location) -> Lease:
    """The lease of a target, not taken yet.

    Args:
        folder: the folder of its staging areas.
        target: the target that is written.
    """
    return Lease(folder / f"{staging_stem(target.name)}.lease", target.uri)


def tidy(target: Location) -> None:
    """Remove the files of a run that was killed just after its commit, unless another run holds the target."""
    folder, stem = Path(target.path).parent, f"{staging_stem(target.name)}."
    if not target.store.capabilities.local or not any(
        path.name.startswith(stem) for path in folder.iterdir()
    ):
        return
    try:
        with Staging(target, "0" * 8, resume=False):
            pass  # entering discards areas of other runs, leaving releases the lease
    except TargetInUseError:
        return


def _inode(path: Path) -> tuple[int, int] | None:
    """Identifies a file or folder by device and inode; None if it does not exist."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST):
            raise
