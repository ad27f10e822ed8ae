"""Gives files and folders names that nothing has, in one step.

`renameat2(RENAME_NOREPLACE)` does it. Where the kernel or the file system lacks it, a folder is renamed, which can
replace only an empty folder, and a file gets the name by a hard link. A file system without hard links gets an empty
file of that name first, which is created exclusively and then replaced: a kill between the two leaves it. Who must not
leave it asks `names_files_at_once` first.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

from wherry.storage.folders import is_there

if TYPE_CHECKING:
    from pathlib import Path

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNKNOWN_TO_FILE_SYSTEM = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_OCCUPIED = (errno.ENOTEMPTY, errno.ENOTDIR, errno.EEXIST)
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of a file system without hard links


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
