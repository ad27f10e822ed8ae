"""Creates, syncs and removes folders, and defines the names of staging areas.

Only `wherry.target.area` creates the folder of a staging area. When a run's area was taken over, its path no
longer exists, and that run must never create the folder again.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.digest import sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = ".wherry-"
DRAFT = ".draft"  # suffix of an incomplete file; a killed process can leave one


_MOST_NAME = 255  # bytes of a name in a folder, on the file systems that wherry knows
_ROOM = 48  # bytes that a name which wherry derives from another is longer, at most


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
    """Let a walk fail at a folder that cannot be listed: without this, what is below it is left out.

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
