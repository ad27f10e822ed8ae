"""Staging and commit: a target appears whole, under its final name, in one step, or not at all.

A conversion writes into a staging area beside the target (see `wherry.staging.area`). The name begins with a dot and
a letter, so that neither Lingua (which takes any folder that begins with ten digits for a checkpoint) nor Orbax
(which lists digits and `<prefix>_<digits>`, and deletes its own temporary names) ever touches it. The area is closed
to other users; what lies in it has the modes of the umask, and keeps them when it is committed. On a local file
system the commit is `renameat2(RENAME_NOREPLACE)` and an fsync of the parent; where the kernel or file system lacks
it, a hard link (files) or a rename that can replace nothing but an empty folder. Parents that are made are synced
into their own parents. On an object store the staged files are uploaded under their final names and the format's
commit member is put last, create-only, so that readers see nothing before it; nothing is renamed there.

Every owner commits from the name of its own area alone, and only while it holds the target's lease. A run that was
stopped for so long that another took over its target finds its area gone; it ends with TargetInUseError, and touches
nothing of the other run.

Whatever goes wrong before the commit, nothing is left at the destination, parent folders that were made for it
included. A process that is killed, interrupted or cancelled leaves the staging area, which `detect` calls unfinished;
the same conversion takes it up again, another one to the same target discards it, and `wherry clean` removes it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from wherry.errors import (
    StorageError,
    TargetExistsError,
    TargetInUseError,
    UsageError,
    WherryError,
    storage_error,
)
from wherry.staging.area import JOURNAL, REPLACED, SIDECAR, SPILL, remove, set_aside
from wherry.staging.lease import Lease
from wherry.staging.takeover import complete, open_area
from wherry.storage.folders import PREFIX
from wherry.storage.location import Location
from wherry.storage.sidecar import sidecar_name
from wherry.storage.stores import LocalStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import TracebackType

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNKNOWN_TO_FILE_SYSTEM = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_OCCUPIED = (errno.ENOTEMPTY, errno.ENOTDIR, errno.EEXIST)


class Staging:
    """The staging area of one conversion; use it in a `with` statement.

    Leaving the block without a commit removes the area and every parent folder that was made for it, unless the
    run can be taken up again: it was stopped from outside (Ctrl-C, a cancelled flow run, an exit), or the storage
    failed in a way that a retry can cure.

    Attributes:
        target: where the checkpoint will appear.
        location: where it is written until then; always local. The folder around it is there once the block runs.
        journal: the file that says which parts of it are done.
        spill: a folder for what must be decoded on the way; never kept for a later run.
        discarded: why what an earlier run left for this target was not taken up; None where nothing was left.
    """

    def __init__(self, target: Location, identity: str, *, resume: bool = True) -> None:
        """Choose the area.

        Args:
            target: what will be committed.
            identity: eight hex digits of the conversion; the same conversion finds its area again.
            resume: whether what an earlier run of it left is of use.

        Raises:
            UsageError: the target's storage is read-only.
        """
        if not target.store.capabilities.create_only_put:
            raise UsageError(f"{target.store.protocol}:// is read-only here", uri=target.uri)
        self.target = target
        self.discarded: str | None = None
        self._error: BaseException | None = None
        self._made: list[Path] = []
        self._local = target.store.capabilities.local
        self._parent = (
            Path(target.path).parent if self._local else Path(tempfile.mkdtemp(prefix="wherry-upload-"))
        )
        self._identity = identity if resume else None
        self._lease = lease_of(self._parent, target)
        self._released = self._parent / f"{PREFIX}{target.name}.{identity}"
        self._area = Path(f"{self._released}-{self._lease.token}")
        self._new, self._inode = False, (0, 0)
        self.location = Location(LocalStore(), str(self._area / target.name))
        self.journal = self._area / JOURNAL
        self.spill = self._area / SPILL

    def __enter__(self) -> Self:
        try:
            self._enter_lease()
        except BaseException as error:
            self._remove_parents()
            raise storage_error(error, self.target.uri) if isinstance(error, OSError) else error from error
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
            if isinstance(error, OSError):
                raise self._lease.lost() if lost else storage_error(error, self.target.uri) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost, resumable = self._is_lost(), self._resumable(self._error or error)
        try:
            if not lost:  # else what is still there is the other run's to take up
                self._release() if resumable else self._remove_area()
        finally:
            self._lease.__exit__(kind, error, trace)
        if lost:
            self._raise_lost(error)
        elif not resumable:
            self._remove_parents()

    def require_held(self) -> None:
        """Make sure that this run may still write.

        Raises:
            TargetInUseError: another run has taken over the target.
        """
        if self._is_lost():
            raise self._lease.lost()

    def failed(self, error: WherryError) -> WherryError:
        """Say before the end that this area will not be committed, where others share the `with` block.

        Returns:
            The error that the run ends with: another one where the target was taken over.
        """
        self._error = self._lease.lost() if self._is_lost() else error
        return self._error

    def clear(self) -> None:
        """Remove what is staged."""
        remove(Path(self.location.path))

    def sync_names(self) -> None:
        """Make the names in the area and its own durable, so that whoever finds the journal finds the area too.

        Raises:
            StorageError: the storage failed.
        """
        try:
            sync_tree(self._area)
            sync_folder(self._parent)
        except OSError as error:
            raise storage_error(error, self.target.uri) from error

    def commit(self, commit_members: tuple[str, ...] = (), beside: bytes | None = None) -> None:
        """Make the staged file or folder appear at the target.

        Args:
            commit_members: the first of these that is there is put last on an object store.
            beside: contents of the sidecar of a single file, written beside it just before.

        Raises:
            TargetExistsError: something is at the target now; it was not touched.
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        try:
            if self._local:
                self._commit_local(beside)
            else:
                self._commit_objects(commit_members, beside)
        except FileExistsError as error:
            raise TargetExistsError(
                "the target appeared while it was being converted",
                uri=self.target.uri,
                cure="choose another target",
            ) from error
        except OSError as error:
            raise self._lease.lost() if self._is_lost() else storage_error(error, self.target.uri) from error
        self._made.clear()

    def _enter_lease(self) -> None:
        for last in (False, False, True):
            self._make_parents(self._parent)
            try:
                self._lease.__enter__()
            except StorageError:
                if last or self._parent.exists():
                    raise
                continue  # a run that failed has removed the folders that it had made
            return

    def _open_area(self) -> None:
        """Take up what an earlier run of this conversion left, or make a new area; discard the rest."""
        with self._lease.exclusive():  # so that nothing of a run that has taken over is touched
            found = open_area(self._area, self.target.name, self._identity, self._lease)
        self._new, self.discarded = found.is_new, found.discarded
        self.require_held()  # where the storage has no locks
        status = self._area.lstat()
        self._inode = (status.st_dev, status.st_ino)
        complete(found, self._area)
        if not os.path.lexists(self.location.path):
            remove(
                self.journal
            )  # a loss of power during the commit can leave neither name of what was staged

    def _remove_area(self) -> None:
        """Remove the area under a name that no run takes up; where it cannot be renamed, while none can take over."""
        try:
            remove(set_aside(self._area))
        except FileNotFoundError:
            return  # taken over at this moment
        except OSError:
            with suppress(TargetInUseError), self._lease.exclusive():
                remove(self._area)

    def _resumable(self, cause: BaseException | None) -> bool:
        """Whether the same conversion can go on with what is in the area."""
        begun = self._local and Path(self.location.path).exists()  # once committed it has gone
        if cause is None or not begun:
            return False
        if isinstance(cause, Exception):
            return isinstance(cause, WherryError) and cause.retryable
        return True  # a stop from outside: KeyboardInterrupt, SystemExit, Prefect's TerminationSignal

    def _release(self) -> None:
        """Give the area up for a later run: nothing in it is open any more."""
        remove(self.spill)
        with suppress(TargetInUseError, OSError), self._lease.exclusive():
            self._area.rename(self._released)  # else its name keeps the token, and the next run copies it

    def _is_lost(self) -> bool:
        try:
            return not self._lease.holds()
        except OSError:
            return False  # storage that fails says nothing of other runs

    def _raise_lost(self, error: BaseException | None) -> None:
        """End an owner whose target was taken over as such, whatever it stumbled over."""
        if isinstance(error, Exception) and not isinstance(error, TargetInUseError):
            raise self._lease.lost() from error

    def _remove_parents(self) -> None:
        for parent in reversed(self._made):
            _remove_if_empty(parent)
        if not self._local:
            shutil.rmtree(self._parent, ignore_errors=True)

    def _commit_local(self, beside: bytes | None) -> None:
        staged, target = Path(self.location.path), Path(self.target.path)
        sync_tree(staged)
        if beside is not None:
            LocalStore().put(str(self._area / SIDECAR), beside)
        with self._lease.exclusive():
            if not self._owns_area():
                raise StorageError("the staging area was replaced", uri=str(self._area), cure="run it again")
            with self._sidecar_put(target) if beside is not None else nullcontext():
                rename_without_replacing(staged, target)
            sync_folder(target.parent)

    @contextmanager
    def _sidecar_put(self, target: Path) -> Generator[None]:
        """Put the sidecar beside the target; where the block fails, what was there before is put back."""
        if os.path.lexists(target):
            raise FileExistsError(target)
        sidecar, before = target.parent / sidecar_name(target.name), self._area / REPLACED
        with suppress(FileNotFoundError):
            sidecar.rename(before)  # it belonged to a target that is gone
        (self._area / SIDECAR).rename(sidecar)
        sync_folder(sidecar.parent)
        try:
            yield
        except BaseException:
            if self._owns_area() and self._lease.holds():
                before.replace(sidecar) if before.exists() else sidecar.unlink()
            raise

    def _owns_area(self) -> bool:
        try:
            found = self._area.lstat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._inode

    def _commit_objects(self, commit_members: tuple[str, ...], beside: bytes | None) -> None:
        store, target = self.target.store, self.target
        if target.exists():
            raise FileExistsError(target.uri)
        if beside is not None:
            store.put(target.parent.join(sidecar_name(target.name)).path, beside)
        staged = Path(self.location.path)
        names = [""] if staged.is_file() else [entry.name for entry in self.location.walk()]
        marker = next((name for name in commit_members if name in names), "")
        for name in sorted(names, key=lambda name: (name == marker, name)):
            last = name in ("", marker)
            destination = target.join(name).path if name else target.path
            store.put(
                destination, (staged / name).read_bytes() if name else staged.read_bytes(), create_only=last
            )

    def _make_parents(self, folder: Path) -> None:
        for parent in make_durable_folders(folder):
            self._made.append(parent)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def lease_of(folder: Path, target: Location) -> Lease:
    """The lease of a target, not taken yet.

    Args:
        folder: where its staging areas lie.
        target: what is written.
    """
    return Lease(folder / f"{PREFIX}{target.name}.lease", target.uri)


def tidy(target: Location) -> None:
    """Remove what a run left that was killed just after its commit; nothing while another run holds the target."""
    folder, stem = Path(target.path).parent, f"{PREFIX}{target.name}."
    if not target.store.capabilities.local or not any(
        path.name.startswith(stem) for path in folder.iterdir()
    ):
        return
    try:
        with Staging(target, "0" * 8, resume=False):
            pass  # entering discards what others left, leaving frees the lease
    except TargetInUseError:
        return


def rename_without_replacing(source: Path, target: Path) -> None:
    """Rename in one step that fails with FileExistsError where the target exists."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        result = libc.renameat2(
            _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE
        )
        if result == 0:
            return
        code = ctypes.get_errno()
        if code not in _UNKNOWN_TO_FILE_SYSTEM:
            raise OSError(code, os.strerror(code), str(target))
    if source.is_dir():
        if os.path.lexists(target):
            raise FileExistsError(target)
        try:
            source.rename(target)  # a folder can replace nothing but an empty folder
        except OSError as error:
            if error.errno in _OCCUPIED:
                raise FileExistsError(target) from error
            raise
    else:
        os.link(source, target)
        source.unlink()


def make_durable_folders(folder: Path) -> Iterator[Path]:
    """Make a folder and its missing parents, and make the name of each durable.

    Yields:
        Each folder that is made, the outermost first; the next step syncs its name.

    Raises:
        OSError: the storage failed.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
        yield parent
        sync_folder(parent.parent)


def sync_tree(path: Path) -> None:
    """Make the names in a folder tree durable; the writers have synced the contents of the files."""
    if path.is_dir():
        for folder, _names, _files in os.walk(path):
            sync_folder(Path(folder))


def sync_folder(folder: Path) -> None:
    """Make the names in one folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST):
            raise
