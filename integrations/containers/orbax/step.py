"""Writes a folder around one Orbax item: the item first, then the small files around it, the commit member last."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from wherry.formats.writer import WriterOver
from wherry.storage.stores import make_folder, sync_folders

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from wherry.core.manifest import Manifest
    from wherry.storage.location import Location


class StepWriter(WriterOver, ABC):
    """Writes the tensors through the writer of the item, `_item`, which a subclass creates."""

    def __init__(self, staging: Location, manifest: Manifest) -> None:
        make_folder(staging)
        self._staging = staging
        self._manifest = manifest
        self._started = time.time_ns()
        self._finished = False

    @abstractmethod
    def _around(self) -> Iterator[tuple[str, bytes]]:
        """Names, relative to the folder, and contents of the files around the item, in the order of writing."""

    def finish(self) -> None:
        """Complete the item, then put the files around it."""
        if not self._finished:
            self._item.finish()
            put_files(self._staging, self._around())
            self._finished = True


def put_files(folder: Location, files: Iterable[tuple[str, bytes]]) -> None:
    """Write small files into a folder in this order, then make their names durable.

    Raises:
        StorageError: the storage failed.
    """
    homes = {folder.path: folder}
    for name, data in files:
        place = folder.join(name)
        make_folder(place.parent)
        place.put(data)
        homes[place.parent.path] = place.parent
    sync_folders(homes[path] for path in sorted(homes, reverse=True))
