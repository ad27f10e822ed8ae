"""Folders that wherry makes, and the names that its staging areas bear.

A staging area is made by the room `staging` alone. A run whose area was taken over finds that its path is gone;
nothing that it still does may make a folder there again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

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
    try:
        if is_staging(folder.name):
            folder.stat()
        else:
            folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        if is_staging(folder.name):
            raise
        make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
