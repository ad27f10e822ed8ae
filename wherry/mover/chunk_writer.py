"""Writes the tensors with grids, a whole chunk at a time, to where the map says: see `ChunkWriter` and `Chunks`.

The stores of chunks lie on a local disk or in a store of objects, and take all chunks or those of a slice. What is put
is durable after a `sync`; in a store of objects, when its bytes are sent. Where encoded chunks lie is known to this
process and noted: in a log on a disk, in the journal for a store of objects. So a resumed run finds those of the runs
before it. The files that describe the chunks are written last.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from wherry.core import dtypes
from wherry.core.tensorspec import region_shape
from wherry.errors import storage_error, storage_errors
from wherry.formats.contents import EncodedChunk, Extent
from wherry.runtime.threads import carrier_count
from wherry.storage.folders import make_folders, sync_folder
from wherry.storage.open_file import open_regular
from wherry.storage.stores import make_folder, sync_folders
from wherry.target.area import LOG_SUFFIX
from wherry.target.file_map import PackedChunks, PlacedChunks, SeparateChunks, content_of
from wherry.target.files import FlatFiles, open_files, require_local, start_after
from wherry.target.grids import ChunkPlace, chunk_bytes
from wherry.target.staged_objects import is_staged, run_of
from wherry.target.uploaded_file import without_gaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region
    from wherry.formats.contents import Block
    from wherry.storage.location import Location
    from wherry.target.file_map import Chunks, File
    from wherry.target.files import Slice
    from wherry.target.uploaded_file import GrowingFile


_LOG = f"chunks{LOG_SUFFIX}"
_ROW = struct.Struct("<4q")  # of the log: number of a chunk, number of its file, offset, bytes


class ChunkStore(ABC):
    """Where the chunks of a target are put."""

    @abstractmethod
    def put(self, number: int, data: memoryview) -> None:
        """Write the stored bytes of a chunk, of a plain one without zeros at its end; thread-safe and repeatable."""

    @abstractmethod
    def place(self, number: int) -> ChunkPlace | None:
        """Where a chunk lies; None of an encoded one that this process and those before it have not put."""

    def stored(self, number: int) -> bool:  # noqa: ARG002  overridden
        """Whether a chunk that was put is durable after a `sync`."""
        return True

    @abstractmethod
    def sync(self) -> None:
        """Make every chunk durable whose `put` has returned."""

    @abstractmethod
    def finish(self, index: Iterable[File]) -> None:
        """Make all chunks durable, then write the files that describe them; idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources."""


def open_chunks(folder: Location, chunks: Chunks, part: Slice | None = None) -> ChunkStore:
    """The store of the chunks of a target.

    Args:
        folder: of the chunks, on a local disk or in the staged objects of a run.
        chunks: the chunks.
        part: the files that are written, with names relative to the folder; all by default.

    Raises:
        UnsupportedError: the folder is neither.
        StorageError: the storage is full or failed.
    """
    assert part is None or chunks.codec.plain, "a slice has files of known sizes"
    make_folder(folder)
    if isinstance(chunks, PlacedChunks):
        return _PlacedChunks(folder, chunks, part)
    if not is_staged(folder):
        require_local(folder)
    if isinstance(chunks, PackedChunks):
        return _PackedObjects(folder, chunks) if is_staged(folder) else _PackedFiles(folder, chunks)
    assert isinstance(chunks, SeparateChunks)
    store = _SeparateObjects if is_staged(folder) else _SeparateFiles
    return store(folder, chunks, part)


def put_in_order(folder: Location, files: Iterable[File]) -> None:
    """Put files without tensors, each when the one before it is durable, then make their names durable.

    Raises:
        StorageError: the storage failed.
    """
    homes: dict[str, Location] = {}
    for file in files:
        place = folder.join(file.name)
        make_folder(place.parent)
        place.put(content_of(file))
        homes[place.parent.path] = place.parent
    sync_folders(homes[path] for path in sorted(homes, reverse=True))


class _PlacedChunks(ChunkStore):
    """Chunks at known places, like tensors in flat files; see ChunkStore."""

    def __init__(self, folder: Location, chunks: PlacedChunks, part: Slice | None) -> None:
        self._folder, self._chunks = folder, chunks
        for home in {
            folder.join(name).parent.path: folder.join(name).parent for name in chunks.sizes
        }.values():
            make_folder(home)
        self._files = open_files(folder, chunks.sizes, part)

    def put(self, number: int, data: memoryview) -> None:
        """See ChunkStore; in a store zeros follow up to the next chunk, so that the parts become complete."""
        file, offset, _nbytes, stop = self._chunks.place(number)
        self._files.write(file, offset, data)
        end = offset + len(data)
        if end < stop and not isinstance(self._files, FlatFiles):  # new files on a disk are zeros
            self._files.write(file, end, bytes(stop - end))

    def place(self, number: int) -> ChunkPlace:
        """See ChunkStore."""
        return self._chunks.place(number)

    def stored(self, number: int) -> bool:
        """See ChunkStore."""
        if isinstance(self._files, FlatFiles):
            return True
        file, offset, nbytes, _stop = self._chunks.place(number)
        return self._files.holds(self._folder.join(file).path, offset, offset + nbytes)

    def sync(self) -> None:
        """See ChunkStore."""
        self._files.sync()

    def finish(self, index: Iterable[File]) -> None:
        """See ChunkStore."""
        self._files.finish()
        put_in_order(self._folder, index)

    def close(self) -> None:
        """See ChunkStore."""
        self._files.close()


class _SeparateFiles(ChunkStore):
    """A file for each chunk, on a local disk; see ChunkStore."""

    def __init__(self, folder: Location, chunks: SeparateChunks, part: Slice | None) -> None:
        self._folder, self._chunks, self._part = Path(folder.path), chunks, part
        self._fresh: set[str] = set()
        self._lock = threading.Lock()
        self._syncing = threading.Lock()

    def put(self, number: int, data: memoryview) -> None:
        """See ChunkStore."""
        name = self._chunks.name(number)
        if self._part is None or name in self._part.files:
            self._put(name, data, self._chunks.size(number))

    def place(self, number: int) -> ChunkPlace:
        """See ChunkStore."""
        if place := self._chunks.known_place(number):
            return place
        name = self._chunks.name(number)
        with storage_errors(str(self._folder)):
            size = (self._folder / name).stat().st_size
        return ChunkPlace(name, 0, size, size)

    def sync(self) -> None:
        """See ChunkStore; new folders become durable too."""
        with self._syncing:  # a second caller returns when the chunks of the first are durable
            with self._lock:
                fresh, self._fresh = self._fresh, set()
            try:
                _sync_files(self._folder, fresh)
            except OSError as error:
                with self._lock:
                    self._fresh |= fresh
                raise storage_error(error, str(self._folder)) from error

    def finish(self, index: Iterable[File]) -> None:
        """See ChunkStore."""
        for file in index:
            self._put(file.name, memoryview(content_of(file)))
        self.sync()

    def close(self) -> None:
        """See ChunkStore; there is nothing to release."""

    def _put(self, name: str, data: memoryview, size: int | None = None) -> None:
        path = self._folder / name
        try:
            make_folders(path.parent)
            _write_file(path, data, size or 0)
        except OSError as error:
            raise storage_error(error, str(path)) from error
        with self._lock:
            self._fresh.add(name)


class _NotedChunks(ChunkStore):
    """What stores of objects have in common: they note which chunks the store has, and where; see ChunkStore."""

    def __init__(self, folder: Location) -> None:
        self._folder, self._run = folder, run_of(folder)
        self._places: dict[int, ChunkPlace] = {}
        self._fresh: set[int] = set()  # chunks that are not noted yet
        self._lock = threading.Lock()

    def _resume(self) -> None:
        """Take up the chunks that earlier runs have noted and that are still there; note those of this run."""
        for number, file, offset, nbytes in self._run.notes:
            place = ChunkPlace(file, offset, nbytes, offset + nbytes)
            if self._is_there(place):
                self._places[number] = place
        self._run.note_with(self._new_notes)

    @abstractmethod
    def _is_there(self, place: ChunkPlace) -> bool:
        """Whether the store has a chunk that an earlier run has noted."""

    def place(self, number: int) -> ChunkPlace | None:
        """See ChunkStore."""
        return self._places.get(number)

    def stored(self, number: int) -> bool:
        """See ChunkStore."""
        return self._is_sent(number)

    def _is_sent(self, number: int) -> bool:
        place = self._places[number]
        file = self._run.file_at(self._folder.join(place.file).path)
        return file.holds(place.offset, place.offset + place.nbytes)

    def sync(self) -> None:
        """See ChunkStore; what was sent is durable, and nothing can hurry it."""
        self._run.using.sender.require_sound()

    def close(self) -> None:
        """See ChunkStore; the run ends the sending."""

    def _note(self, number: int) -> None:
        with self._lock:
            self._fresh.add(number)

    def _new_notes(self) -> list[list[Any]]:
        with self._lock:
            fresh = list(self._fresh)
        sent = [number for number in fresh if self._is_sent(number)]
        with self._lock:
            self._fresh -= set(sent)
        return [[number, *self._places[number][:3]] for number in sent]


class _SeparateObjects(_NotedChunks):
    """An object for each chunk, which is sent when the chunk is encoded; see ChunkStore."""

    def __init__(self, folder: Location, chunks: SeparateChunks, part: Slice | None) -> None:
        super().__init__(folder)
        self._chunks, self._part = chunks, part
        self._resume()

    def put(self, number: int, data: memoryview) -> None:
        """See ChunkStore."""
        name, size = self._chunks.name(number), self._chunks.size(number)
        if self._part is not None and name not in self._part.files:
            return
        pieces = [data] if size is None else [data, memoryview(bytes(size - len(data)))]
        nbytes = self._run.whole(self._folder.join(name).path, pieces).size
        with self._lock:
            self._places[number] = ChunkPlace(name, 0, nbytes, nbytes)
        self._note(number)

    def place(self, number: int) -> ChunkPlace | None:
        """See ChunkStore."""
        return self._chunks.known_place(number) or super().place(number)

    def stored(self, number: int) -> bool:
        """See ChunkStore; chunks of a slice need no record, as a unit is made whole or again."""
        return self._part is not None or self._is_sent(number)

    def finish(self, index: Iterable[File]) -> None:
        """See ChunkStore; they are sent at the same time."""
        for file in index:
            self._run.whole(self._folder.join(file.name).path, [memoryview(content_of(file))])
        self._run.finish()

    def _is_there(self, place: ChunkPlace) -> bool:
        path = self._folder.join(place.file).path
        before = self._run.before.get(path)
        complete = before is not None and without_gaps(before)[0] == place.nbytes
        if complete:
            self._run.file(path, place.nbytes)
        return complete


class _PackedFiles(ChunkStore):
    """Chunks that are appended to data files on a local disk; see ChunkStore.

    The log goes when everything else is there. A run that finds the files of the index without a log leaves them as
    they are.
    """

    def __init__(self, folder: Location, chunks: PackedChunks) -> None:
        """Create the data files, or continue those of the runs before this one."""
        self._folder, self._chunks = folder, chunks
        self._log = Path(folder.path) / _LOG
        with storage_errors(folder.uri):
            self._known = _read_log(self._log)
        self._fresh: dict[int, _PackedPlace] = {}
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        ends = {0: 0}
        for file, offset, nbytes in self._known.values():
            ends[file] = max(ends.get(file, 0), offset + nbytes)
        self._number = self._named = max(ends)
        self._end = ends[self._number]
        make_folder(folder.join(chunks.file(0)).parent)
        # A run before this one may have completed the files, and have been killed later.
        self._complete = (
            not self._known
            and folder.join(chunks.file(0)).exists()
            and all(folder.join(file.name).exists() for file in chunks.index(self._require_place))
        )
        sizes = {} if self._complete else {chunks.file(number): end for number, end in ends.items()}
        self._files = FlatFiles(Path(folder.path), sizes)

    def put(self, number: int, data: memoryview) -> None:
        """See ChunkStore; a chunk that was already appended is not appended again."""
        assert not self._complete, "a run writes all chunks before it completes their files"
        with self._lock:
            if number in self._known:
                return
            place = self._reserve(len(data))
        self._files.write(self._chunks.file(place.file), place.offset, data)
        with self._lock:
            self._fresh[number] = place

    def place(self, number: int) -> ChunkPlace | None:
        """See ChunkStore."""
        with self._lock:
            found = self._known.get(number) or self._fresh.get(number)
        if found is None:
            return None
        file, offset, nbytes = found
        return ChunkPlace(self._chunks.file(file), offset, nbytes, offset + nbytes)

    def sync(self) -> None:
        """See ChunkStore."""
        with self._syncing:
            with self._lock:
                fresh, number = dict(self._fresh), self._number
            self._files.sync()
            with storage_errors(self._folder.uri):
                if number > self._named:  # before the log refers to them
                    sync_folder(Path(self._folder.join(self._chunks.file(number)).parent.path))
                    self._named = number
                new = {chunk: place for chunk, place in fresh.items() if chunk not in self._known}
                if new:
                    _append_to_log(self._log, new)
            with self._lock:
                self._known |= new
                for chunk in fresh:
                    self._fresh.pop(chunk, None)

    def finish(self, index: Iterable[File]) -> None:
        """See ChunkStore."""
        if self._complete:
            return
        self.sync()
        self._files.finish()
        put_in_order(self._folder, index)
        with storage_errors(self._folder.uri):
            self._log.unlink(missing_ok=True)
            sync_folder(self._log.parent)
        self._complete = True

    def close(self) -> None:
        """See ChunkStore."""
        self._files.close()

    def _require_place(self, number: int) -> ChunkPlace:
        place = self.place(number)
        assert place is not None, "names of files do not depend on places"
        return place

    def _reserve(self, nbytes: int) -> _PackedPlace:
        start = start_after(self._end, nbytes)
        if self._end and start + nbytes > self._chunks.file_bytes:
            self._number, start = self._number + 1, 0
            self._files.add(self._chunks.file(self._number), 0)
        self._end = start + nbytes
        self._files.grow(self._chunks.file(self._number), self._end)
        return _PackedPlace(self._number, start, nbytes)


class _PackedObjects(_NotedChunks):
    """Chunks that are appended to data files in a store of objects, each sent in parts; see ChunkStore."""

    def __init__(self, folder: Location, chunks: PackedChunks) -> None:
        """Take up the data files of earlier runs, as far as they go; new chunks come into new files."""
        super().__init__(folder)
        self._chunks = chunks
        home, begun = f"{folder.path}/", dict[str, int]()
        for path in self._run.before:
            number = chunks.number_of(path[len(home) :]) if path.startswith(home) else None
            if number is not None:
                begun[path] = number
        grown = {path: self._run.grown(path) for path in sorted(begun)}
        self._past = {path: file.size for path, file in grown.items() if file is not None}
        self._number = max(begun.values(), default=-1)
        self._file: GrowingFile | None = None
        self._resume()

    def put(self, number: int, data: memoryview) -> None:
        """See ChunkStore; a chunk that is there already is not appended again."""
        with self._lock:
            if number in self._places:
                return
            file, offset = self._reserve(len(data))
            name = self._chunks.file(self._number)
            self._places[number] = ChunkPlace(name, offset, len(data), offset + len(data))
        file.write(offset, data)
        self._note(number)

    def finish(self, index: Iterable[File]) -> None:
        """See ChunkStore; data files of earlier runs of which no chunk is known are removed."""
        self._run.finish()
        put_in_order(self._folder, index)
        used = {self._folder.join(place.file).path for place in self._places.values()}
        for path in self._past.keys() - used:
            self._run.drop(path)
        self._past = {}

    def _is_there(self, place: ChunkPlace) -> bool:
        return place.stop <= self._past.get(self._folder.join(place.file).path, 0)

    def _reserve(self, nbytes: int) -> tuple[GrowingFile, int]:
        """The file that takes a chunk, and the offset there; a full file ends, and another one begins."""
        offset = None if self._file is None else self._file.reserve(nbytes)
        if self._file is None or offset is None:
            if self._file is not None:
                self._file.end()
            self._number += 1
            room = max(self._chunks.file_bytes, nbytes)
            self._file = self._run.growing(self._folder.join(self._chunks.file(self._number)).path, room)
            offset = self._file.reserve(nbytes)
        assert offset is not None, "an empty file has room"
        return self._file, offset


class _PackedPlace(NamedTuple):
    """Where a chunk lies: number of the data file, offset, bytes."""

    file: int
    offset: int
    nbytes: int


def _append_to_log(log: Path, fresh: Mapping[int, _PackedPlace]) -> None:
    """Note where durable chunks lie, durably."""
    with log.open("ab") as file:
        file.write(b"".join([_ROW.pack(number, *place) for number, place in fresh.items()]))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(log.parent)


def _read_log(log: Path) -> dict[int, _PackedPlace]:
    """Where the chunks of an interrupted run lie, by their numbers; an incomplete last row is removed."""
    if not log.exists():
        return {}
    data = log.read_bytes()
    whole = len(data) // _ROW.size * _ROW.size
    os.truncate(log, whole)
    return {number: _PackedPlace(*place) for number, *place in _ROW.iter_unpack(data[:whole])}


def _write_file(path: Path, data: memoryview, size: int) -> None:
    """Write a file, with zeros up to a size."""
    descriptor = open_regular(str(path), flags=os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], done)
        os.ftruncate(descriptor, max(len(data), size))
    finally:
        os.close(descriptor)


def _sync_files(folder: Path, names: Iterable[str]) -> None:
    """Sync files and the folders above them: a new file is durable only when its name is."""
    parents = {folder}
    for name in names:
        path = folder / name
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        parents |= set(path.parents) - set(folder.parents)
    for parent in sorted(parents, reverse=True):
        sync_folder(parent)


class ChunkWriter:
    """Encodes chunks, and puts them where the map says; used from several threads."""

    def __init__(self, target: Location, chunks: Chunks, part: Slice | None = None) -> None:
        """Open their files.

        Args:
            target: a folder in a staging area.
            chunks: its chunks.
            part: what is written of the target; all of it by default.

        Raises:
            UnsupportedError: the target is neither on a local disk nor in the staged objects of a run, or the chunks of
                a unit have no known sizes.
            StorageError: the storage is full or failed.
        """
        self._folder = target.join(chunks.folder) if chunks.folder else target
        self._chunks, self._grids, self._codec = chunks, chunks.grids, chunks.codec
        if is_staged(target) and not self._codec.plain:
            most = max(map(chunk_bytes, self._grids.specs), default=0)
            run_of(target).using.sender.set_aside(carrier_count() * most)
        self._part = part
        self._store = open_chunks(self._folder, chunks, part.within(chunks.folder) if part else None)

    def __contains__(self, path: KeyPath) -> bool:
        """Whether a tensor is written in chunks."""
        return path in self._grids

    @property
    def plain(self) -> bool:
        """Whether chunks are stored as they are, with padding."""
        return self._codec.plain

    def grid(self, path: KeyPath) -> tuple[int, ...] | None:
        """Extents of a tensor's chunk."""
        return self._grids.spec(path).chunks

    def extents(self, path: KeyPath, region: Region) -> tuple[Extent, ...] | None:
        """The byte range of a chunk that is stored as it is; None for an encoded one, or one with padding inside."""
        spec = self._grids.spec(path)
        if not self._codec.unchanged(region, spec):
            return None
        place = self._store.place(self._grids.number(path, region))
        assert place is not None, "plain chunks have known places"
        nbytes = dtypes.canonical_size(spec.dtype, math.prod(region_shape(region)))
        return (Extent(self._folder.join(place.file), place.offset, nbytes),)

    def encoded(self, path: KeyPath, region: Region) -> EncodedChunk | None:
        """An encoded chunk; None for one that is stored as it is, or of which no run knows the place any more."""
        if self._codec.plain:
            return None
        spec, number = self._grids.spec(path), self._grids.number(path, region)
        place = self._store.place(number)
        if place is None:
            return None
        copies = 1 if self._folder.store.capabilities.local else 2  # a client holds the pieces and their sum
        decode = partial(self._codec.decode, region=region, spec=spec, name=self._chunks.name(number))
        return EncodedChunk(
            Extent(self._folder.join(place.file), place.offset, place.nbytes),
            self._codec.decoding(spec),
            copies * place.nbytes + chunk_bytes(spec),
            cast("Callable[[memoryview], Iterator[Block]]", decode),
        )

    def write(self, path: KeyPath, region: Region, data: memoryview) -> None:
        """Write one chunk.

        Raises:
            UsageError: the region is not one whole chunk (shorter at the edge).
            StorageError: the storage failed.
        """
        number, spec = self._grids.number(path, region), self._grids.spec(path)
        if not (self._codec.plain and len(data) == chunk_bytes(spec)):  # else nothing is encoded or padded
            data = self._codec.encode(data, region, spec)
        self._store.put(number, data)

    def stored(self, path: KeyPath, region: Region) -> bool:
        """Whether a chunk that was written is durable after a `sync`."""
        return self._store.stored(self._grids.number(path, region))

    def sync(self) -> None:
        """Make every chunk durable whose `write` has returned."""
        self._store.sync()

    def finish(self) -> None:
        """Make all chunks durable, then write the files that describe them; a slice has none of these."""

        def place(number: int) -> ChunkPlace:
            found = self._store.place(number)
            assert found is not None, f"chunk {self._chunks.name(number)} was not written"
            return found

        self._store.finish(() if self._part else self._chunks.index(place))

    def close(self) -> None:
        """Close the files."""
        self._store.close()
