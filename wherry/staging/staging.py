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
    storage_errors,
)
from wherry.staging.area import JOURNAL, REPLACED, SIDECAR, SPILL, set_aside
from wherry.staging.lease import Lease
from wherry.staging.takeover import complete, open_area
from wherry.storage.folders import (
    PREFIX,
    make_durable_folders,
    remove,
    remove_leftover,
    sync_folder,
    sync_tree,
)
from wherry.storage.location import Location
from wherry.storage.sidecar import sidecar_name
from wherry.storage.stores import LocalStore

if TYPE_CHECKING:
    from collections.abc import Generator
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
            raise UsageError(
                f"cannot write to {target.store.protocol}://: the storage is read-only", uri=target.uri
            )
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
        """Remove what is staged, all of it: what would stay would be committed with what is written next.

        Raises:
            StorageError: something could not be removed.
        """
        with storage_errors(self.target.uri):
            remove(Path(self.location.path))

    def sync_names(self) -> None:
        """Make the names in the area and its own durable, so that whoever finds the journal finds the area too.

        Raises:
            StorageError: the storage failed.
        """
        with storage_errors(self.target.uri):
            sync_tree(self._area)
            sync_folder(self._parent)

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
            with storage_errors(self.target.uri):
                self._commit(commit_members, beside)
        except StorageError as error:
            if self._is_lost():
                raise self._lease.lost() from error
            raise
        self._made.clear()

    def _enter_lease(self) -> None:
        # A run that failed may just be removing the folders that it had made.
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
            remove_leftover(set_aside(self._area))
        except FileNotFoundError:
            return  # taken over at this moment
        except OSError:
            with suppress(TargetInUseError), self._lease.exclusive():
                remove_leftover(self._area)

    def _resumable(self, cause: BaseException | None) -> bool:
        """Whether the same conversion can go on with what is in the area."""
        kept = self._local and self._identity is not None  # else no run ever takes the area up
        if cause is None or not kept or not Path(self.location.path).exists():  # once committed it has gone
            return False
        if isinstance(cause, Exception):
            return isinstance(cause, WherryError) and cause.retryable
        return True  # a stop from outside: KeyboardInterrupt, SystemExit, Prefect's TerminationSignal

    def _release(self) -> None:
        """Give the area up for a later run: nothing in it is open any more."""
        remove_leftover(self.spill)
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

    def _commit(self, commit_members: tuple[str, ...], beside: bytes | None) -> None:
        try:
            if self._local:
                self._commit_local(beside)
            else:
                self._commit_objects(commit_members, beside)
        except FileExistsError as error:
            raise TargetExistsError(
                "target already exists; it was created during the conversion",
                uri=self.target.uri,
                cure="choose another target",
            ) from error

    def _commit_local(self, beside: bytes | None) -> None:
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
            sync_folder(target.parent)

    @contextmanager
    def _sidecar_put(self, target: Path) -> Generator[None]:
        """Put the sidecar beside the target; where the block fails, what was there before is put back."""
        if os.path.lexists(target):
            raise FileExistsError(target)
        sidecar, before = target.parent / sidecar_name(target.name), self._area / REPLACED
        ours, staged = self._area / SIDECAR, _inode(Path(self.location.path))
        try:
            with suppress(FileNotFoundError):
                sidecar.rename(before)  # it belonged to a target that is gone
            ours.rename(sidecar)
            sync_folder(sidecar.parent)
            yield
        except BaseException:
            # A stop from outside can come just after the rename.
            committed = staged is not None and _inode(target) == staged
            if not committed and self._owns_area() and self._lease.holds():
                if before.exists():
                    before.replace(sidecar)
                elif not ours.exists():
                    sidecar.unlink(missing_ok=True)
            raise

    def _owns_area(self) -> bool:
        return _inode(self._area) == self._inode

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

    def _make_parents(self) -> None:
        for parent in make_durable_folders(self._parent):
            self._made.append(parent)


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


def _inode(path: Path) -> tuple[int, int] | None:
    """Names a file or folder itself; None where nothing is there."""
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
