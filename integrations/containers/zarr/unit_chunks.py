"""Writes the chunks of one unit of a target: those that lie in the files that this process makes.

Where each chunk lies follows from the sizes of all chunks, so units need nothing of each other. The metadata of the
arrays, the tree of a database and its manifest belong to no unit: the commit writes them, as a resumed run does. A unit
leaves what that needs: the log of a database on a disk, or notes about chunks in a store of objects.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import storage_errors
from wherry.integrations.containers.flat.files import open_files
from wherry.integrations.containers.flat.selected_files import SelectedFiles
from wherry.integrations.containers.ocdbt.write import Reference
from wherry.integrations.containers.zarr.chunk_log import LOG, append_to_log
from wherry.integrations.containers.zarr.places import DATA
from wherry.storage.stores import make_folder
from wherry.upload.selection import Selection
from wherry.upload.staged_objects import is_staged, run_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.integrations.containers.zarr.chunk_store import ChunkStore
    from wherry.integrations.containers.zarr.places import ChunkPlaces
    from wherry.storage.location import Location


class DatabasePart:
    """Some data files of an OCDBT database of chunks at known places; see ChunkStore."""

    def __init__(self, folder: Location, places: ChunkPlaces) -> None:
        """Create the files.

        Args:
            folder: of the database.
            places: of the chunks.

        Raises:
            StorageError: the storage is full or failed.
        """
        self._folder, self._places = folder, places
        self._written: dict[str, Reference] = {}
        make_folder(folder.join(DATA))
        files = open_files(folder, places.ends)
        assert isinstance(files, SelectedFiles), "the caller has asked `is_selected`"
        self._files = files
        if is_staged(folder):
            run_of(folder).note_with(self._notes)

    def put(self, key: str, data: memoryview, size: int = 0) -> None:  # noqa: ARG002  it is known
        """See ChunkStore; zeros follow up to the next chunk, so that the parts of an object become complete."""
        place = self._places[key]
        self._files.write(place.file, place.offset, data)
        end = place.offset + len(data)
        if gap := self._places.stop(key) - end:
            self._files.write(place.file, end, bytes(gap))
        self._written[key] = place

    def place(self, key: str) -> Reference:
        """See ChunkStore."""
        return self._places[key]

    def stored(self, key: str) -> bool:  # noqa: ARG002  of the protocol
        """See ChunkStore: a unit is made whole or again."""
        return True

    def sync(self) -> None:
        """See ChunkStore."""
        self._files.sync()

    def finish(self, values: Mapping[str, bytes]) -> None:  # noqa: ARG002  the commit writes them
        """Make the files durable, and leave for the commit where their chunks lie."""
        self._files.finish()
        if self._folder.store.capabilities.local:
            with storage_errors(self._folder.uri):
                append_to_log(Path(self._folder.path) / LOG, self._mine())

    def close(self) -> None:
        """See ChunkStore."""
        self._files.close()

    def _mine(self) -> dict[str, Reference]:
        """The chunks in the files of this unit; a move at its edge has others too."""
        return {key: place for key, place in sorted(self._written.items()) if self._files.keeps(place.file)}

    def _notes(self) -> list[list[Any]]:
        return [[key, *place] for key, place in self._mine().items()]


class FilesPart:
    """Some chunks of arrays of which each is a file; see ChunkStore."""

    def __init__(self, sizes: Mapping[str, int], kept: frozenset[str], inner: ChunkStore | None) -> None:
        """Begin.

        Args:
            sizes: key → size of the chunk.
            kept: the chunks that are written here.
            inner: writes them; None if there are none.
        """
        self._sizes, self._kept, self._inner = sizes, kept, inner

    def put(self, key: str, data: memoryview, size: int = 0) -> None:
        """See ChunkStore; a chunk of another unit is left out."""
        if self._inner is not None and key in self._kept:
            self._inner.put(key, data, size)

    def place(self, key: str) -> Reference:
        """See ChunkStore."""
        return Reference(key, 0, self._sizes[key])

    def stored(self, key: str) -> bool:  # noqa: ARG002  of the protocol
        """See ChunkStore: a unit is made whole or again."""
        return True

    def sync(self) -> None:
        """See ChunkStore."""
        if self._inner is not None:
            self._inner.sync()

    def finish(self, values: Mapping[str, bytes]) -> None:  # noqa: ARG002  the commit writes them
        """Make the chunks durable."""
        if self._inner is not None:
            self._inner.finish({})

    def close(self) -> None:
        """See ChunkStore."""
        if self._inner is not None:
            self._inner.close()


def kept_keys(folder: Location, sizes: Mapping[str, int]) -> frozenset[str]:
    """The chunks that are written by this process.

    Args:
        folder: of the arrays, in a store that selects files.
        sizes: key → size of the chunk.
    """
    chosen = folder.store
    assert isinstance(chosen, Selection), "the caller has asked `is_selected`"
    return frozenset(key for key, size in sizes.items() if chosen.takes(folder.join(key).path, size))
