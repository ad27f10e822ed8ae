"""packages: what is installed next to wherry, read from the folders of metadata that installers write.

`importlib.metadata` tells the same of any installation, but it takes longer to import, and to parse what it finds, than
a small conversion takes. So it is imported only where an answer is not in folders, or where plug-ins are to be loaded.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder


def has_entry_points(group: str) -> bool:
    """Whether a package may have entry points of this group: certainly if one has, and never if none has.

    Args:
        group: name of the group.
    """
    folders = _metadata_folders()
    return folders is None or any(
        group.encode() in _contents(f"{folder}/entry_points.txt") for folder in folders
    )


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed.

    Args:
        package: its normalized name, with underscores.
    """
    for folder in _metadata_folders() or ():
        name = folder.rpartition("/")[2].lower()
        if name.startswith((f"{package}-", f"{package}.")):
            for line in _contents(f"{folder}/METADATA").splitlines():
                if line.startswith(b"Version:"):
                    return line.partition(b":")[2].decode().strip()
            break
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _metadata_folders() -> list[str] | None:
    """The folders of metadata in the order in which they are searched; None if packages may also be elsewhere."""
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return None
    found: list[str] = []
    for place in dict.fromkeys(sys.path):
        try:
            with os.scandir(place or ".") as entries:
                names = [entry.name for entry in entries]
        except NotADirectoryError:
            return None  # an archive
        except OSError:
            continue
        found += [
            f"{place or '.'}/{name}" for name in names if name.lower().endswith((".dist-info", "egg-info"))
        ]
    return found


def _contents(file: str) -> bytes:
    """The bytes of a file; none if it does not exist."""
    try:
        with open(file, "rb") as opened:  # noqa: PTH123  Path.open costs a third more per call, of hundreds
            return opened.read()
    except OSError:
        return b""
