"""Small files that outlive a loss of power: each appears whole, under its final name, in one step.

A draft beside the file is synced, renamed over it, and the folder is synced. Whoever reads the file meanwhile sees
either the old contents or the new ones. What a kill leaves has a staging name, and `wherry clean` removes it.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import storage_error
from wherry.storage.folders import DRAFT, PREFIX, sync_folder
from wherry.storage.stores import LocalStore

if TYPE_CHECKING:
    from wherry.storage.location import Location


def put(place: Location, data: bytes) -> None:
    """Put a small file, over an older one; in a local folder in one step and durably.

    Args:
        place: the file; its folder is there.
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
    """Put a small local file in one step, over an older one, durably.

    Args:
        place: the file; its folder is there.
        data: its contents.
        mode: who may read it, whatever the umask says.

    Raises:
        OSError: the storage failed.
    """
    draft = place.with_name(f"{PREFIX}{place.name}.{secrets.token_hex(4)}{DRAFT}")
    try:
        LocalStore().put(str(draft), data)
        if mode is not None:
            draft.chmod(mode)
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(place.parent)
