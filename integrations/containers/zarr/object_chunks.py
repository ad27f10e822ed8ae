"""Writes the chunks of zarr arrays straight into a store of objects; see `store` for those on a local disk.

- One object for each key: it is sent when its chunk is encoded.
- A database whose chunks have known sizes: its data files are written at offsets, as they are on a disk.
- A database of compressed chunks: they are appended to data files of 1 GiB, each of which is sent in parts. A
  resumed run appends to a new file.

Where a chunk lies is noted in the journal once the store has it: a resumed run does not send it again, even if the move
that it belongs to was not finished. The tree over the chunks and the manifest come last.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from wherry.integrations.containers.ocdbt.read import MANIFEST
from wherry.integrations.containers.ocdbt.write import Reference
from wherry.integrations.containers.zarr.places import DATA, data_file, encoded_database
from wherry.upload import uploaded_file
from wherry.upload.growing_file import without_gaps
from wherry.upload.staged_objects import UploadedFiles, run_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.integrations.containers.zarr.places import ChunkPlaces
    from wherry.storage.location import Location
    from wherry.upload.growing_file import GrowingFile

_PARTS = 128  # of a data file to which chunks are appended
_NUMBERED = re.compile(r"0{16}[0-9a-f]{16}")  # names of data files with chunks; those with trees are digests


class _ObjectStoreChunks(ABC):
    """What the three have in common: they know the places of chunks, and note of which the store has all bytes."""

    def __init__(self, folder: Location) -> None:
        self._folder, self._run = folder, run_of(folder)
        self._known: dict[str, Reference] = {}
        self._fresh: set[str] = set()  # known chunks that are not noted yet
        self._lock = threading.Lock()

    def _resume(self) -> None:
        """Take up the chunks that earlier runs have noted and that are still there; note those of this run."""
        for key, *place in self._run.notes:
            if self._is_there(key, Reference(*place)):
                self._known[key] = Reference(*place)
        self._run.note_with(self._new_notes)

    @abstractmethod
    def _is_there(self, key: str, place: Reference) -> bool:
        """Whether the store has a chunk that an earlier run has noted."""

    def place(self, key: str) -> Reference:
        """See ChunkStore."""
        return self._known[key]

    def stored(self, key: str) -> bool:
        """See ChunkStore."""
        place = self._known[key]
        file = self._run.file_at(self._folder.join(place.file).path)
        return file.holds(place.offset, place.offset + place.length)

    def sync(self) -> None:
        """See ChunkStore; what was sent is durable, and nothing can hurry it."""
        self._run.using.sender.require_sound()

    def close(self) -> None:  # noqa: B027  there is nothing to do in any of them
        """See ChunkStore; the run ends the sending."""

    def _new_notes(self) -> list[list[Any]]:
        with self._lock:
            fresh = list(self._fresh)
        stored = [key for key in fresh if self.stored(key)]
        with self._lock:
            self._fresh -= set(stored)
        return [[key, *self._known[key]] for key in stored]


class ObjectChunks(_ObjectStoreChunks):
    """One object for each key, below a folder; see ChunkStore."""

    def __init__(self, folder: Location) -> None:
        super().__init__(folder)
        self._resume()

    def put(self, key: str, data: memoryview, size: int = 0) -> None:
        """See ChunkStore."""
        pieces = [data, memoryview(bytes(max(size - len(data), 0)))]
        file = self._run.whole(self._folder.join(key).path, pieces)
        with self._lock:
            self._known[key] = Reference(key, 0, file.size)
            self._fresh.add(key)

    def place(self, key: str) -> Reference:
        """See ChunkStore; the length is known once the chunk was put."""
        return self._known.get(key) or Reference(key, 0, 0)

    def finish(self, values: Mapping[str, bytes]) -> None:
        """See ChunkStore."""
        for key, data in values.items():
            self.put(key, memoryview(data))
        self._run.finish()

    def _is_there(self, key: str, place: Reference) -> bool:
        path = self._folder.join(key).path
        before = self._run.before.get(path)
        complete = before is not None and without_gaps(before)[0] == place.length
        if complete:
            self._run.file(path, place.length)
        return complete


class _DatabaseChunks(_ObjectStoreChunks):
    """A database: the tree is put at the end."""

    def finish(self, values: Mapping[str, bytes]) -> None:
        """See ChunkStore; a chunk that was never written is not in the tree."""
        self._run.finish()
        made = encoded_database({**self._known, **values})
        self._folder.join(made.nodes).put(made.tree)
        self._folder.join(MANIFEST).put(made.manifest)


class PlacedChunks(_DatabaseChunks):
    """A database of chunks whose sizes, and so places, are known."""

    def __init__(self, folder: Location, places: ChunkPlaces) -> None:
        """Begin or continue the data files.

        Args:
            folder: of the database.
            places: of the chunks.
        """
        super().__init__(folder)
        self._places = places
        self._files = UploadedFiles(folder, places.ends)
        self._resume()

    def place(self, key: str) -> Reference:
        """See ChunkStore."""
        return self._places[key]

    def put(self, key: str, data: memoryview, size: int = 0) -> None:  # noqa: ARG002  it is known
        """See ChunkStore; zeros follow up to the next chunk, so that the parts become complete."""
        place = self._places[key]
        self._files.write(place.file, place.offset, data)
        end = place.offset + len(data)
        if gap := self._places.stop(key) - end:
            self._files.write(place.file, end, bytes(gap))
        with self._lock:
            self._known[key] = place
            self._fresh.add(key)

    def _is_there(self, key: str, place: Reference) -> bool:
        return self._places.get(key) == place and self._files.holds(
            self._folder.join(place.file).path, place.offset, place.offset + place.length
        )


class AppendedChunks(_DatabaseChunks):
    """A database of chunks that are appended as they come."""

    def __init__(self, folder: Location) -> None:
        """Take up the data files of earlier runs, as far as they go; new chunks come into new files."""
        super().__init__(folder)
        home = f"{folder.join(DATA).path}/"
        paths = sorted(path for path in self._run.before if path.startswith(home))
        begun = [path for path in paths if _NUMBERED.fullmatch(path[len(home) :])]
        grown = {path: self._run.grown(path) for path in begun}
        self._past = {path: file.size for path, file in grown.items() if file is not None}
        self._number = max((int(path[len(home) :], 16) for path in begun), default=-1)
        self._file: GrowingFile | None = None
        self._resume()

    def put(self, key: str, data: memoryview, size: int = 0) -> None:
        """See ChunkStore; a chunk that is there already is not appended again."""
        with self._lock:
            if key in self._known:
                return
            file, offset = self._reserve(max(len(data), size))
            self._known[key] = Reference(data_file(self._number), offset, max(len(data), size))
        file.write(offset, data)
        with self._lock:
            self._fresh.add(key)

    def finish(self, values: Mapping[str, bytes]) -> None:
        """See ChunkStore; data files of earlier runs of which no chunk is known are removed."""
        super().finish(values)
        used = {self._folder.join(place.file).path for place in self._known.values()}
        for path in self._past.keys() - used:
            self._run.drop(path)
        self._past = {}

    def _is_there(self, key: str, place: Reference) -> bool:  # noqa: ARG002  the place says it
        return place.offset + place.length <= self._past.get(self._folder.join(place.file).path, 0)

    def _reserve(self, nbytes: int) -> tuple[GrowingFile, int]:
        """The file that takes a chunk, and the offset there; a full file ends, and another one begins."""
        offset = None if self._file is None else self._file.reserve(nbytes)
        if self._file is None or offset is None:
            if self._file is not None:
                self._file.end()
            self._number += 1
            room = max(_PARTS * uploaded_file.PART_BYTES, nbytes)
            self._file = self._run.growing(self._folder.join(data_file(self._number)).path, room)
            offset = self._file.reserve(nbytes)
        assert offset is not None, "an empty file has room"
        return self._file, offset
