"""Atomic, durable writes of small files: a file appears complete, under its final name, in one step.

A draft next to the file is synced and renamed over it, then the folder is synced. A concurrent reader sees either the
old or the new contents. A killed process leaves a draft with a staging name, which `wherry clean` removes.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import storage_error
from wherry.storage.folders import DRAFT, staging_stem, sync_folder
from wherry.storage.stores import LocalStore

if TYPE_CHECKING:
    from wherry.storage.location import Location


def put(place: Location, data: bytes) -> None:
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
        replace(Path(place.path), data)
    except OSError as error:
        raise storage_error(error, place.uri) from error


def replace(place: Path, data: bytes, *, mode: int | None = None) -> None:
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
        LocalStore().put(str(draft), data)
        if mode is not None:
            draft.chmod(mode)
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(place.parent)
