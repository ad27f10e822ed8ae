"""Copies an object within its store: by the store itself where it can, else through this machine, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.errors import MismatchError

if TYPE_CHECKING:
    from wherry.storage.uploads import StoredObject
    from wherry.upload.uploaded_file import Sending


def copied_object(using: Sending, source: str, found: StoredObject, path: str) -> StoredObject:
    """Create an object of the bytes of another one.

    Args:
        using: the store, and the id of the run.
        source: path of the other object.
        found: its state.
        path: of the new object.

    Raises:
        FileExistsError: another run has created the object.
        MismatchError: the other object has changed.
        StorageError: the storage failed.
    """
    store = using.store
    try:
        made = store.copy_object(source, found.mark, path, using.run)
    except FileNotFoundError as error:
        raise MismatchError(
            "the object was changed or removed during the conversion",
            uri=f"{using.protocol}://{source}",
            cure="run the conversion again",
        ) from error
    return made
