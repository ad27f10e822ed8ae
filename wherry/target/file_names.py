"""File names of a target that a file system which folds case does not tell apart.

Two such files would become one: the second replaces the first without an error, and nothing is wrong but their bytes.
So they are refused before the first of them is written. Whether a file system folds case is not looked up by its kind,
because some fold it only in some folders: the staging area is looked for by its name in the other case. A file system
that folds case also takes composed and decomposed characters for the same (APFS, and ext4 and F2FS with `casefold`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import UnsupportedError, storage_errors

if TYPE_CHECKING:
    from wherry.storage.location import Location


def require_separate_names(folder: Location, names: Iterable[str]) -> None:
    """Refuse files of a target that are the same file where the file system folds case.

    Args:
        folder: where they will be, in a staging area; it need not exist yet.
        names: relative to it, with `/` between parts. A folder is as different as a file: `A/x` and `a/y` are refused.

    Raises:
        UnsupportedError: two names differ only by case.
        StorageError: the storage failed.
    """
    if not folder.store.capabilities.local:
        return
    with storage_errors(folder.uri):
        if not _folds_case(Path(folder.path)):
            return
    first: dict[str, str] = {}  # folded name → the name
    for name in names:
        end = 0
        while end != len(name):
            end = name.find("/", end + 1)
            end = len(name) if end < 0 else end
            # The same text for all names that such a file system takes for one.
            folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", name[:end]).casefold())
            known = first.setdefault(folded, name[:end])
            if known != name[:end]:
                raise UnsupportedError(
                    f"the file system does not tell {known} and {name[:end]} apart: their names differ only by case",
                    uri=folder.uri,
                    cure="rename a tensor with --rename, or choose a target on a file system that is case-sensitive",
                )


def _folds_case(folder: Path) -> bool:
    """Whether the file system finds names in the other case, around a folder."""
    for path in (folder, *folder.parents):
        swapped = path.name.swapcase()
        if swapped != path.name and path.exists():
            found = path.with_name(swapped)
            return found.exists() and found.samefile(path)
    return False
