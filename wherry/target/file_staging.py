"""Staging on a file system: an area next to the target, and a rename that replaces nothing.

The area (see `wherry.target.area`) has a name that begins with a dot and a letter, so that neither Lingua (which
treats any folder that begins with ten digits as a checkpoint) nor Orbax (which lists digits and `<prefix>_<digits>`,
and deletes its own temporary names) ever touches it. Other users cannot access it; files in it have the modes of the
umask, and keep them when they are committed. The commit is a rename that replaces nothing (`wherry.storage.folders`)
and an fsync of the parent. New parent folders are synced into their own parents, and removed if the run fails.

Every owner commits only from its own area, and only while it holds the target's lease: the area of a run that was taken
over no longer exists.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from wherry.core.progress import OnProgress
from wherry.errors import (
    StorageError,
    TargetExistsError,
    TargetInUseError,
    UnsupportedError,
    UsageError,
    storage_errors,
)
from wherry.storage.copy import copy_files
from wherry.storage.folders import (
    DRAFT,
    is_there,
    make_durable_folders,
    names_files_at_once,
    remove,
    remove_leftover,
    rename_without_replacing,
    staging_stem,
    sync_folder,
    sync_tree,
)
from wherry.storage.location import Location
from wherry.storage.sidecar import sidecar_name
from wherry.storage.stores import LocalStore
from wherry.target.area import JOURNAL, REPLACED, SIDECAR, SPILL, complete, hide, open_area
from wherry.target.file_names import require_separate_names
from wherry.target.journal import Header, Journal, open_journal
from wherry.target.lease import lease_of
from wherry.target.staging import CopiedFile, Staging


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
        """See Staging; what is staged is removed if the journal does not say what of it is done."""
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
        try:
            self._publish(sidecar)
        except FileExistsError as error:
            raise TargetExistsError(
                "target already exists; it was created during the conversion",
                uri=self.target.uri,
                cure="choose another target",
            ) from error

    def _publish(self, sidecar: bytes | None) -> None:
        staged, target = Path(self.location.path), Path(self.target.path)
        sync_tree(staged)
        if sidecar is not None:
            LocalStore().put(str(self.area / SIDECAR), sidecar)
        with self._lease.exclusive():
            if not self._owns_area():
                raise StorageError(
                    "the staging area was replaced", uri=str(self.area), cure="run the conversion again"
                )
            with self._sidecar_put(target) if sidecar is not None else nullcontext():
                _rename(staged, target)
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
    """Rename in one step that replaces nothing; an error whose rename took place, as on a network, is none."""
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
