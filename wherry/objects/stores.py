"""stores: the ObjectStore of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.remote import azure
from wherry.storage.fsspec_store import FsspecStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wherry.objects.uploads import ObjectStore
    from wherry.storage.location import Store


def object_store(store: Store) -> ObjectStore | None:
    """The parts, puts and removals of a store; None if it takes no parts.

    Args:
        store: of a location; one that reads only, and that of local files, has none.
    """
    make = OBJECT_STORES.get(store.protocol)
    return make(store) if make is not None and isinstance(store, FsspecStore) else None


def _memory(store: FsspecStore) -> ObjectStore:
    from wherry.objects.memory import MemoryObjects

    return MemoryObjects(store)


def _amazon(store: FsspecStore) -> ObjectStore:
    from wherry.objects.amazon import AmazonObjects

    return AmazonObjects(store)


def _google(store: FsspecStore) -> ObjectStore:
    from wherry.objects.google import GoogleObjects

    return GoogleObjects(store)


def _azure(store: FsspecStore) -> ObjectStore:
    from wherry.objects.azure import AzureObjects

    return AzureObjects(store)


OBJECT_STORES: Mapping[str, Callable[[FsspecStore], ObjectStore]] = {
    "memory": _memory,
    "s3": _amazon,
    "gs": _google,
    "gcs": _google,
    **dict.fromkeys(azure.PROTOCOLS, _azure),
}
