"""Staging and commit: a target appears whole, under its final name, in one step, or not at all.

A conversion writes into `.wherry-<name>.<id>` beside the target. The name begins with a dot and a letter, so
that neither Lingua (which takes any folder that begins with ten digits for a checkpoint) nor Orbax (which lists
digits and `<prefix>_<digits>`, and deletes its own temporary names) ever touches it. On a local file system the
commit is `renameat2(RENAME_NOREPLACE)` and an fsync of the parent; where the kernel or file system lacks it, a
hard link (files) or an exclusive `mkdir` that the rename then replaces (folders). Parents that are made are synced
into their own parents. On an object store the staged files are uploaded under their final names and the format's
commit member is put last, create-only, so that readers see nothing before it; nothing is renamed there.

Whatever goes wrong before the commit, nothing is left at the destination, parent folders that were made for it
included. A process that is killed, interrupted or cancelled leaves the staging area and its journal, which `detect`
calls unfinished; the same conversion takes them up again, another one to the same target discards them, and
`wherry clean` removes them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from wherry.errors import TargetExistsError, TargetInUseError, UsageError, WherryError, storage_error
from wherry.lease import DRAFT, Lease
from wherry.location import Location
from wherry.sidecar import sidecar_name
from wherry.store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

PREFIX = ".wherry-"
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNKNOWN_TO_FILE_SYSTEM = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def is_staging(name: str) -> bool:
    """Whether a file or folder name is that of a staging area."""
    return name.startswith(PREFIX)


class Staging:
    """The staging area of one conversion; use it in a `with` statement.

    Leaving the block without a commit removes the area and every parent folder that was made for it, unless the
    run can be taken up again: it was stopped from outside (Ctrl-C, a cancelled flow run, an exit), or the storage
    failed in a way that a retry can cure.

    Attributes:
        target: where the checkpoint will appear.
        location: where it is written until then; always local.
        journal: the file that says which parts of it are done.
        spill: a folder for what must be decoded on the way; never kept for a later run.
        discarded: why what an earlier run left for this target was not taken up; None where nothing was left.
    """

    def __init__(self, target: Location, identity: str) -> None:
        """Choose the area.

        Args:
            target: what will be committed.
            identity: eight hex digits of the conversion; the same conversion finds its area again.

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
        self._stem = f"{PREFIX}{target.name}"
        self.location = Location(LocalStore(), str(self._parent / f"{self._stem}.{identity}"))
        self.journal = Path(f"{self.location.path}.journal")
        self.spill = Path(f"{self.location.path}.spill")
        self._sidecar = Path(f"{self.location.path}.sidecar")
        self._lease = Lease(self._parent / f"{self._stem}.lease", target.uri)

    def __enter__(self) -> Self:
        try:
            self._make_parents(self._parent)
            self._lease.__enter__()
        except BaseException as error:
            self._remove_parents()
            raise storage_error(error, self.target.uri) if isinstance(error, OSError) else error from error
        try:
            self._discard_others()
            _remove(self.spill)
            _remove(self._sidecar)
        except BaseException as error:
            self._lease.__exit__(type(error), error, None)
            if isinstance(error, OSError):
                raise storage_error(error, self.target.uri) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            resumable = self._resumable(self._error or error)
            _remove(self.spill)
            if not resumable:
                self.clear()
                self.journal.unlink(missing_ok=True)
        finally:
            self._lease.__exit__(kind, error, trace)
        if not resumable:
            self._remove_parents()

    def _resumable(self, cause: BaseException | None) -> bool:
        """Whether the same conversion can go on with what is in the area."""
        begun = self._local and Path(self.location.path).exists()  # once committed it has gone
        if cause is None or not begun:
            return False
        if isinstance(cause, Exception):
            return isinstance(cause, WherryError) and cause.retryable
        return True  # a stop from outside: KeyboardInterrupt, SystemExit, Prefect's TerminationSignal

    def sync_names(self) -> None:
        """Make the names in the area and its own durable, so that whoever finds the journal finds the area too.

        Raises:
            StorageError: the storage failed.
        """
        try:
            sync_tree(Path(self.location.path))
            sync_folder(self._parent)
        except OSError as error:
            raise storage_error(error, self.target.uri) from error

    def clear(self) -> None:
        """Remove what is in the area."""
        _remove(Path(self.location.path))

    def _discard_others(self) -> None:
        """Areas of other conversions to this target: the lease says that nobody works on them."""
        pattern = re.compile(re.escape(self._stem) + r"\.[0-9a-f]{8}(\.journal|\.spill|\.sidecar|\.draft)?")
        mine = (self.location.name, self.journal.name, self.spill.name, self._sidecar.name)
        for path in self._parent.iterdir():
            if pattern.fullmatch(path.name) and path.name not in mine:
                _remove(path)
                if path.suffix != DRAFT:
                    self.discarded = "an interrupted run had another source, plan or option"

    def _remove_parents(self) -> None:
        for parent in reversed(self._made):
            _remove_if_empty(parent)
        if not self._local:
            shutil.rmtree(self._parent, ignore_errors=True)

    def failed(self, error: WherryError) -> None:
        """Say before the end that this area will not be committed, where others share the `with` block."""
        self._error = error

    def commit(self, commit_members: tuple[str, ...] = (), beside: bytes | None = None) -> None:
        """Make the staged file or folder appear at the target.

        Args:
            commit_members: the first of these that is there is put last on an object store.
            beside: contents of the sidecar of a single file, written beside it just before.

        Raises:
            TargetExistsError: something is at the target now; it was not touched.
            StorageError: the storage failed.
        """
        try:
            if self.target.store.capabilities.local:
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
            raise storage_error(error, self.target.uri) from error
        self._made.clear()

    def _commit_local(self, beside: bytes | None) -> None:
        staged, target = Path(self.location.path), Path(self.target.path)
        sync_tree(staged)
        if beside is None:
            rename_without_replacing(staged, target)
        else:
            sidecar = target.parent / sidecar_name(target.name)
            before = sidecar.read_bytes() if sidecar.exists() else None
            self._put_sidecar(sidecar, beside)
            try:
                rename_without_replacing(staged, target)
            except BaseException:
                sidecar.unlink() if before is None else self._put_sidecar(sidecar, before)
                raise
        sync_folder(target.parent)

    def _put_sidecar(self, sidecar: Path, data: bytes) -> None:
        """Put a sidecar whole and durably, over an older one; what a kill leaves has a name of the area's."""
        try:
            LocalStore().put(str(self._sidecar), data)
            self._sidecar.replace(sidecar)
            sync_folder(sidecar.parent)
        finally:
            self._sidecar.unlink(missing_ok=True)

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
        for parent in make_folders(folder):
            self._made.append(parent)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def tidy(target: Location) -> None:
    """Remove what a run left that was killed just after its commit; nothing while another run holds the target."""
    folder, stem = Path(target.path).parent, f"{PREFIX}{target.name}."
    if not target.store.capabilities.local or not any(
        path.name.startswith(stem) for path in folder.iterdir()
    ):
        return
    try:
        with Staging(target, "0" * 8):
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
        target.mkdir()
        source.rename(target)
    else:
        os.link(source, target)
        source.unlink()


def make_folders(folder: Path) -> Iterator[Path]:
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
