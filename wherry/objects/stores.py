"""stores: the ObjectStore of a store, and many objects looked up in one."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from wherry.remote import azure
from wherry.runtime import threads
from wherry.storage.fsspec_store import FsspecStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from wherry.objects.uploads import ObjectStore, StoredObject
    from wherry.storage.location import Store


_AT_ONCE = 16  # small requests at the same time


def object_store(store: Store) -> ObjectStore | None:
    """The parts, puts and removals of a store; None if it takes no parts.

    Args:
        store: of a location; one that reads only, and that of local files, has none.
    """
    make = OBJECT_STORES.get(store.protocol)
    return make(store) if make is not None and isinstance(store, FsspecStore) else None


def heads(store: ObjectStore, paths: Iterable[str]) -> Iterator[tuple[str, StoredObject | None]]:
    """The object at each path, None if there is none; some are asked for at the same time.

    Raises:
        StorageError: the storage failed.
    """
    waiting, count = iter(paths), 1
    with threads.executor(_AT_ONCE, "wherry-heads", numbers=False) as pool:
        while some := list(islice(waiting, count)):  # a caller may stop after the first of a million
            yield from zip(some, pool.map(store.head, some), strict=True)
            count = min(2 * count, _AT_ONCE)


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
