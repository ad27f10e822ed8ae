"""Creates, names, syncs and removes folders and files, and defines the names of staging areas.

Only `wherry.target.staging` creates the folder of a staging area. When a run's area was taken over, its path no
longer exists, and that run must never create the folder again.

A name that nothing has is given in one step by `renameat2(RENAME_NOREPLACE)`. Where the kernel or the file system lacks
it, a folder is renamed, which can replace only an empty folder, and a file gets the name by a hard link. A file system
without hard links gets an empty file of that name first, which is created exclusively and then replaced: a process
that is killed between the two leaves the empty file. A caller that must not leave it checks `names_files_at_once`
first.

A small file is replaced in one step, too: a draft next to it is synced and renamed over it, then the folder is synced.
A concurrent reader sees either the old or the new contents. A killed process leaves a draft with a staging name, which
`wherry clean` removes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.digest import sha256_of
from wherry.errors import storage_error
from wherry.store.open_file import write_regular

if TYPE_CHECKING:
    from wherry.store.location import Location


PREFIX = ".wherry-"
SPILL_VARIABLE = "WHERRY_SPILL"  # of the environment: the folder for temporary files of decoded tensors
DRAFT = ".draft"  # suffix of an incomplete file; a killed process can leave one
_MOST_NAME = 255  # bytes of a name in a folder, on the file systems that wherry knows
_ROOM = 48  # bytes that a name which wherry derives from another is longer, at most
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNKNOWN_TO_FILE_SYSTEM = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_OCCUPIED = (errno.ENOTEMPTY, errno.ENOTDIR, errno.EEXIST)
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of a file system without hard links


def short_name(name: str) -> str:
    """A name from which others can be derived: a long one is cut, and ends with digits of its hash.

    Names in stores of objects are not cut: they have no such limit.
    """
    stored = os.fsencode(name)
    if len(stored) <= _MOST_NAME - _ROOM:
        return name
    end = f"~{sha256_of('name', name)[:8]}"
    kept = stored[: _MOST_NAME - _ROOM - len(end)]
    return kept.decode("utf-8", "ignore") + end


def staging_stem(name: str) -> str:
    """The beginning of the names of what runs create next to a local target until it is committed."""
    return f"{PREFIX}{short_name(name)}"


def is_staging(name: str) -> bool:
    """Whether a file or folder name is that of a staging area."""
    return name.startswith(PREFIX)


def make_folders(folder: Path) -> None:
    """Make a folder and its parents, but never a staging area: a missing one was taken over.

    Raises:
        FileNotFoundError: the staging area no longer exists.
        OSError: the storage failed.
    """
    for _made in _new_folders(folder):
        pass


def make_durable_folders(folder: Path) -> Iterator[Path]:
    """Make a folder and its missing parents as `make_folders` does, and make the name of each durable.

    Yields:
        Each new folder, outermost first; its name is synced when the iteration continues.

    Raises:
        OSError: the storage failed.
    """
    for new in _new_folders(folder):
        yield new
        sync_folder(new.parent)


def _new_folders(folder: Path) -> Iterator[Path]:
    """Make the missing folders of a path; yields each new folder, outermost first."""
    try:
        if is_staging(folder.name):
            folder.stat()
            return
        if _makes(folder):
            yield folder
    except FileNotFoundError:
        if is_staging(folder.name):
            raise
        yield from _new_folders(folder.parent)
        if _makes(folder):
            yield folder


def _makes(folder: Path) -> bool:
    """Make one folder; False if it exists."""
    try:
        folder.mkdir()
    except OSError as error:  # some systems refuse before they check whether it exists
        if folder.is_dir():
            return False
        if isinstance(error, FileExistsError):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
        raise
    return True


def sync_tree(path: Path) -> None:
    """Make the names in a folder tree durable; the writers have synced the contents of the files."""
    if path.is_dir():
        for folder, _names, _files in os.walk(path, onerror=raise_walk_error):
            sync_folder(Path(folder))


def raise_walk_error(error: OSError) -> None:
    """Let a walk fail at a folder that cannot be listed: otherwise the entries below it would be left out.

    Raises:
        OSError: always.
    """
    raise error


def sync_folder(folder: Path) -> None:
    """Make the names in one folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_there(path: str | Path) -> bool:
    """Whether a path exists, a link too; `os.path.lexists` says no where the storage failed.

    Raises:
        OSError: the storage failed.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def remove(path: Path) -> None:
    """Remove a folder with its contents, a file or a link; do nothing if it does not exist.

    Raises:
        OSError: something could not be removed.
    """
    while path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # another process removed something in it at the same time
    path.unlink(missing_ok=True)


def remove_leftover(path: Path) -> None:
    """Remove as `remove` does, but tolerate contents of a folder that cannot be removed: `wherry clean` reports them.

    Raises:
        OSError: a file could not be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def rename_without_replacing(source: Path, target: Path) -> None:
    """Rename in one step that fails with FileExistsError where the target exists."""
    if _rename_at_once(source, target):
        return
    if source.is_dir():
        _rename_folder(source, target)
    else:
        _rename_file(source, target)


def names_files_at_once(first: Path, second: Path) -> bool:
    """Whether a file gets a name that nothing has in one step: by `renameat2`, or by a hard link.

    Args:
        first, second: files that do not exist, in one folder; they are made and removed again.

    Raises:
        OSError: the storage failed.
    """
    first.touch(mode=0o600, exist_ok=False)
    try:
        if _rename_at_once(first, second):
            return True
        os.link(first, second)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return False
    finally:
        second.unlink(missing_ok=True)
        first.unlink(missing_ok=True)
    return True


def _rename_at_once(source: Path, target: Path) -> bool:
    """Rename by `renameat2`; False if the kernel or the file system lacks it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    result = libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code not in _UNKNOWN_TO_FILE_SYSTEM:
        raise OSError(code, os.strerror(code), str(target))
    return False


def _rename_folder(source: Path, target: Path) -> None:
    if is_there(target):
        raise FileExistsError(target)
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in _OCCUPIED:
            raise FileExistsError(target) from error
        raise


def _rename_file(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        target.touch(exist_ok=False)
        try:
            source.replace(target)
        except BaseException:
            target.unlink()
            raise
    else:
        source.unlink()


def put_file(place: Location, data: bytes) -> None:
    """Write a small file, replacing an older one; in a local folder atomically and durably.

    Args:
        place: the file; its folder must exist.
        data: its contents.

    Raises:
        StorageError: the storage failed.
    """
    if not place.store.capabilities.local:
        place.put(data)
        return
    try:
        replace_file(Path(place.path), data)
    except OSError as error:
        raise storage_error(error, place.uri) from error


def create_file(place: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Create a small local file, durably; it is complete when it appears.

    Args:
        place: the file; its folder must exist.
        data: its contents.
        mode: permissions of the file, less the umask.

    Raises:
        FileExistsError: it exists.
        OSError: the storage failed.
    """
    draft = place.with_name(f"{staging_stem(place.name)}.{secrets.token_hex(4)}{DRAFT}")
    try:
        write_regular(str(draft), (data,), create_only=True, mode=mode)
        rename_without_replacing(draft, place)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(place.parent)


def replace_file(place: Path, data: bytes, *, mode: int | None = None) -> None:
    """Write a small local file atomically and durably, replacing an older one.

    Args:
        place: the file; its folder must exist.
        data: its contents.
        mode: permissions of the file, regardless of the umask.

    Raises:
        OSError: the storage failed.
    """
    draft = place.with_name(f"{staging_stem(place.name)}.{secrets.token_hex(4)}{DRAFT}")
    try:
        write_regular(str(draft), (data,))
        if mode is not None:
            draft.chmod(mode)
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(place.parent)
