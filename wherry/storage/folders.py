"""Folders that wherry makes, syncs and removes, and the names that its staging areas bear.

The folder of a staging area is made by `wherry.staging.takeover` alone. A run whose area was taken over finds that
its path is gone; nothing that it still does may make a folder there again.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = ".wherry-"
DRAFT = ".draft"  # ends the name of a file that is not yet complete; a kill may leave it


def is_staging(name: str) -> bool:
    """Whether a file or folder name is that of a staging area."""
    return name.startswith(PREFIX)


def make_folders(folder: Path) -> None:
    """Make a folder and its parents, but never a staging area: one that is gone was taken over.

    Raises:
        FileNotFoundError: the staging area is gone.
        OSError: the storage failed.
    """
    for _made in _new_folders(folder):
        pass


def make_durable_folders(folder: Path) -> Iterator[Path]:
    """Make a folder and its missing parents as `make_folders` does, and make the name of each durable.

    Yields:
        Each folder that is made, the outermost first; the next step syncs its name.

    Raises:
        OSError: the storage failed.
    """
    for new in _new_folders(folder):
        yield new
        sync_folder(new.parent)


def _new_folders(folder: Path) -> Iterator[Path]:
    """Make what is missing of a path; each folder as it is made, the outermost first."""
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
    """Make one folder; False where it is there already."""
    try:
        folder.mkdir()
    except OSError as error:  # some systems refuse before they look whether it is there
        if folder.is_dir():
            return False
        if isinstance(error, FileExistsError):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
        raise
    return True


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


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, a file or a link; nothing where nothing is there.

    Raises:
        OSError: something could not be removed.
    """
    while path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # something in it was removed at the same moment
    path.unlink(missing_ok=True)


def remove_leftover(path: Path) -> None:
    """Remove as `remove` does, but leave of a folder what cannot be removed: `wherry clean` names it.

    Raises:
        OSError: a file could not be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
