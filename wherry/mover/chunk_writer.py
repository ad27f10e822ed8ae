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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, region_shape
from wherry.core.threads import carrier_count
from wherry.errors import storage_error, storage_errors
from wherry.formats.format import Block, EncodedChunk, Extent
from wherry.store.folders import make_folders, sync_folder
from wherry.store.local_store import make_folder
from wherry.store.location import Location
from wherry.store.open_file import open_regular
from wherry.target.file_map import Chunks, File, PackedChunks, PlacedChunks, SeparateChunks, content_of
from wherry.target.files import FlatFiles, Slice, open_files, put_in_order, require_local, start_after
from wherry.target.grids import ChunkPlace, chunk_bytes
from wherry.target.staged_objects import run_of
from wherry.target.staging import LOG_SUFFIX

if TYPE_CHECKING:
    from wherry.target.uploaded_file import GrowingFile

_LOG = f"chunks{LOG_SUFFIX}"
_ROW = struct.Struct("<4q")  # of the log: number of a chunk, number of its file, offset, bytes


class ChunkWriter(ABC):
    """Encodes chunks, and puts them where the map says; used from several threads."""

    def __init__(self, folder: Location, chunks: Chunks, part: Slice | None = None) -> None:
        """Begin; see `open_chunks`.

        Args:
            folder: of the chunks.
            chunks: the chunks.
            part: the files that are written, with names relative to the folder; all by default.
        """
        self._folder, self._chunks, self._part = folder, chunks, part
        self._grids, self._codec = chunks.grids, chunks.codec
        self._lock = threading.Lock()

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
        place = self._require_place(self._grids.number(path, region))
        nbytes = dtypes.canonical_size(spec.dtype, math.prod(region_shape(region)))
        return (Extent(self._folder.join(place.file), place.offset, nbytes),)

    def encoded(self, path: KeyPath, region: Region) -> EncodedChunk | None:
        """An encoded chunk; None for one that is stored as it is, or of which no run knows the place any more."""
        if self._codec.plain:
            return None
        spec, number = self._grids.spec(path), self._grids.number(path, region)
        place = self.place(number)
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
        self.put(number, data)

    def stored(self, path: KeyPath, region: Region) -> bool:
        """Whether a chunk that was written is durable after a `sync`."""
        return self.holds(self._grids.number(path, region))

    @abstractmethod
    def put(self, number: int, data: memoryview) -> None:
        """Write the stored bytes of a chunk, of a plain one without zeros at its end; thread-safe and repeatable."""

    def place(self, number: int) -> ChunkPlace | None:
        """The place of a chunk; None for an encoded chunk that neither this process nor an earlier one has written."""
        return self._chunks.known_place(number)

    def holds(self, number: int) -> bool:  # noqa: ARG002  overridden
        """Whether a chunk that was put is durable after a `sync`."""
        return True

    @abstractmethod
    def sync(self) -> None:
        """Make every chunk durable whose `put` has returned."""

    def finish(self) -> None:
        """Make all chunks durable, then write the files that describe them; a slice has none of these; idempotent."""
        self._finish(() if self._part else self._chunks.index(self._require_place))

    @abstractmethod
    def _finish(self, index: Iterable[File]) -> None:
        """Make all chunks durable, then write these files."""

    def close(self) -> None:  # noqa: B027  overridden
        """Release the resources; the run of staged objects ends the sending itself."""

    def _require_place(self, number: int) -> ChunkPlace:
        place = self.place(number)
        assert place is not None, f"chunk {self._chunks.name(number)} was not written"
        return place


def open_chunks(target: Location, chunks: Chunks, part: Slice | None = None) -> ChunkWriter:
    """The writer of the chunks of a target.

    Args:
        target: a folder in a staging area, on a local disk or in the staged objects of a run.
        chunks: its chunks.
        part: what is written of the target; all of it by default.

    Raises:
        UnsupportedError: the target is neither on a local disk nor in the staged objects of a run.
        StorageError: the storage is full or failed.
    """
    assert part is None or chunks.codec.plain, "a slice has files of known sizes"
    staged = target.store.capabilities.staged
    if staged and not chunks.codec.plain:
        most = max(map(chunk_bytes, chunks.grids.specs), default=0)
        run_of(target).using.sender.set_aside(carrier_count() * most)
    folder = target.join(chunks.folder) if chunks.folder else target
    part = part.within(chunks.folder) if part else None
    make_folder(folder)
    if isinstance(chunks, PlacedChunks):
        return _PlacedChunks(folder, chunks, part)
    if not staged:
        require_local(folder)
    if isinstance(chunks, PackedChunks):
        return _PackedObjects(folder, chunks) if staged else _PackedFiles(folder, chunks)
    assert isinstance(chunks, SeparateChunks)
    return (_SeparateObjects if staged else _SeparateFiles)(folder, chunks, part)


class _PlacedChunks(ChunkWriter):
    """Chunks at known places, like tensors in flat files."""

    def __init__(self, folder: Location, chunks: PlacedChunks, part: Slice | None) -> None:
        super().__init__(folder, chunks, part)
        homes = {home.path: home for home in (folder.join(name).parent for name in chunks.sizes)}
        for home in homes.values():
            make_folder(home)
        self._files = open_files(folder, chunks.sizes, part)

    def put(self, number: int, data: memoryview) -> None:
        """Put a chunk; in a store, zeros follow up to the next chunk, so that the parts become complete."""
        file, offset, _nbytes, stop = self._require_place(number)
        self._files.write(file, offset, data)
        end = offset + len(data)
        if end < stop and not isinstance(self._files, FlatFiles):  # new files on a disk are zeros
            self._files.write(file, end, bytes(stop - end))

    def holds(self, number: int) -> bool:
        file, offset, nbytes, _stop = self._require_place(number)
        return self._files.has_bytes(self._folder.join(file).path, offset, offset + nbytes)

    def sync(self) -> None:
        self._files.sync()

    def _finish(self, index: Iterable[File]) -> None:
        self._files.finish()
        put_in_order(self._folder, index)

    def close(self) -> None:
        self._files.close()


class _SeparateFiles(ChunkWriter):
    """A file for each chunk, on a local disk."""

    def __init__(self, folder: Location, chunks: SeparateChunks, part: Slice | None) -> None:
        super().__init__(folder, chunks, part)
        self._root = Path(folder.path)
        self._fresh: set[str] = set()
        self._syncing = threading.Lock()

    def put(self, number: int, data: memoryview) -> None:
        name = self._chunks.name(number)
        if self._part is None or name in self._part.files:
            self._put(name, data, self._chunks.size(number))

    def place(self, number: int) -> ChunkPlace:
        if place := super().place(number):
            return place
        name = self._chunks.name(number)
        with storage_errors(str(self._root)):
            size = (self._root / name).stat().st_size
        return ChunkPlace(name, 0, size, size)

    def sync(self) -> None:
        """New folders become durable too."""
        with self._syncing:  # a second caller returns when the chunks of the first are durable
            with self._lock:
                fresh, self._fresh = self._fresh, set()
            try:
                _sync_files(self._root, fresh)
            except OSError as error:
                with self._lock:
                    self._fresh |= fresh
                raise storage_error(error, str(self._root)) from error

    def _finish(self, index: Iterable[File]) -> None:
        for file in index:
            self._put(file.name, memoryview(content_of(file)))
        self.sync()

    def _put(self, name: str, data: memoryview, size: int | None = None) -> None:
        path = self._root / name
        try:
            make_folders(path.parent)
            _write_file(path, data, size or 0)
        except OSError as error:
            raise storage_error(error, str(path)) from error
        with self._lock:
            self._fresh.add(name)


class _NotedChunks(ChunkWriter):
    """Chunks whose places are known when they are put, and noted for later runs when they are durable."""

    def __init__(self, folder: Location, chunks: Chunks, part: Slice | None = None) -> None:
        super().__init__(folder, chunks, part)
        self._places: dict[int, ChunkPlace] = {}
        self._fresh: set[int] = set()  # chunks that are not noted yet

    def place(self, number: int) -> ChunkPlace | None:
        return super().place(number) or self._places.get(number)

    def _know(self, number: int, file: str, offset: int, nbytes: int) -> None:
        with self._lock:
            self._places[number] = ChunkPlace(file, offset, nbytes, offset + nbytes)
            self._fresh.add(number)


class _ObjectChunks(_NotedChunks):
    """Chunks in a store of objects, which are noted in the journal of the run."""

    def __init__(self, folder: Location, chunks: Chunks, part: Slice | None = None) -> None:
        super().__init__(folder, chunks, part)
        self._run = run_of(folder)

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

    def holds(self, number: int) -> bool:
        place = self._places[number]
        file = self._run.file_at(self._folder.join(place.file).path)
        return file.has_bytes(place.offset, place.offset + place.nbytes)

    def sync(self) -> None:
        """What was sent is durable, and nothing can hurry it."""
        self._run.using.sender.require_sound()

    def _new_notes(self) -> list[list[Any]]:
        with self._lock:
            fresh = list(self._fresh)
        sent = [number for number in fresh if _ObjectChunks.holds(self, number)]
        with self._lock:
            self._fresh -= set(sent)
        return [[number, *self._places[number][:3]] for number in sent]


class _SeparateObjects(_ObjectChunks):
    """An object for each chunk, which is sent when the chunk is encoded."""

    def __init__(self, folder: Location, chunks: SeparateChunks, part: Slice | None) -> None:
        super().__init__(folder, chunks, part)
        self._resume()

    def put(self, number: int, data: memoryview) -> None:
        name, size = self._chunks.name(number), self._chunks.size(number)
        if self._part is None or name in self._part.files:
            pieces = [data] if size is None else [data, memoryview(bytes(size - len(data)))]
            self._know(number, name, 0, self._run.whole(self._folder.join(name).path, pieces).size)

    def holds(self, number: int) -> bool:
        """Chunks of a slice need no record, as a unit is made whole or again."""
        return self._part is not None or super().holds(number)

    def _finish(self, index: Iterable[File]) -> None:
        """Finish all objects at the same time."""
        for file in index:
            self._run.whole(self._folder.join(file.name).path, [memoryview(content_of(file))])
        self._run.finish()

    def _is_there(self, place: ChunkPlace) -> bool:
        path = self._folder.join(place.file).path
        from wherry.target.uploaded_file import without_gaps

        before = self._run.before.get(path)
        complete = before is not None and without_gaps(before)[0] == place.nbytes
        if complete:
            self._run.file(path, place.nbytes)
        return complete


class _PackedFiles(_NotedChunks):
    """Chunks that are appended to data files on a local disk.

    The log goes when everything else is there. A run that finds the files of the index without a log leaves them as
    they are.
    """

    def __init__(self, folder: Location, chunks: PackedChunks) -> None:
        """Create the data files, or continue those of the runs before this one."""
        super().__init__(folder, chunks)
        self._packed = chunks
        self._log = Path(folder.path) / _LOG
        self._syncing = threading.Lock()
        ends = {0: 0}
        with storage_errors(folder.uri):
            rows = _read_log(self._log)
        for number, file, offset, nbytes in rows:
            self._places[number] = ChunkPlace(chunks.file(file), offset, nbytes, offset + nbytes)
            ends[file] = max(ends.get(file, 0), offset + nbytes)
        self._number = self._named = max(ends)
        self._end = ends[self._number]
        make_folder(folder.join(chunks.file(0)).parent)
        # A run before this one may have completed the files, and have been killed later.
        self._complete = (
            not rows
            and folder.join(chunks.file(0)).exists()
            and all(folder.join(file.name).exists() for file in chunks.index(self._require_place))
        )
        sizes = {} if self._complete else {chunks.file(number): end for number, end in ends.items()}
        self._files = FlatFiles(Path(folder.path), sizes)

    def put(self, number: int, data: memoryview) -> None:
        """A chunk that was already appended is not appended again."""
        assert not self._complete, "a run writes all chunks before it completes their files"
        with self._lock:
            if number in self._places:
                return
            offset = self._reserve(len(data))
            name = self._packed.file(self._number)
        self._files.write(name, offset, data)
        self._know(number, name, offset, len(data))

    def sync(self) -> None:
        with self._syncing:
            with self._lock:
                fresh, number = list(self._fresh), self._number
            self._files.sync()
            with storage_errors(self._folder.uri):
                if number > self._named:  # before the log refers to them
                    sync_folder(Path(self._folder.join(self._packed.file(number)).parent.path))
                    self._named = number
                if fresh:
                    _append_to_log(self._log, [self._row(chunk) for chunk in fresh])
            with self._lock:
                self._fresh.difference_update(fresh)

    def _row(self, number: int) -> tuple[int, int, int, int]:
        file, offset, nbytes, _stop = self._places[number]
        data_file = self._packed.number_of(file)
        assert data_file is not None, "chunks lie in data files"
        return number, data_file, offset, nbytes

    def _finish(self, index: Iterable[File]) -> None:
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
        self._files.close()

    def _reserve(self, nbytes: int) -> int:
        """The offset for a chunk in the present data file, which is a new one if the former is full."""
        start = start_after(self._end, nbytes)
        if self._end and start + nbytes > self._packed.file_bytes:
            self._number, start = self._number + 1, 0
            self._files.add(self._packed.file(self._number), 0)
        self._end = start + nbytes
        self._files.grow(self._packed.file(self._number), self._end)
        return start


class _PackedObjects(_ObjectChunks):
    """Chunks that are appended to data files in a store of objects, each sent in parts."""

    def __init__(self, folder: Location, chunks: PackedChunks) -> None:
        """Keep the data files of earlier runs, up to their last complete chunk; new chunks go into new files."""
        super().__init__(folder, chunks)
        self._packed = chunks
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
        """A chunk that is there already is not appended again."""
        with self._lock:
            if number in self._places:
                return
            file, offset = self._reserve(len(data))
            name = self._packed.file(self._number)
        file.write(offset, data)
        self._know(number, name, offset, len(data))

    def _finish(self, index: Iterable[File]) -> None:
        """Data files of earlier runs of which no chunk is known are removed."""
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
            room = max(self._packed.file_bytes, nbytes)
            self._file = self._run.growing(self._folder.join(self._packed.file(self._number)).path, room)
            offset = self._file.reserve(nbytes)
        assert offset is not None, "an empty file has room"
        return self._file, offset


def _append_to_log(log: Path, rows: Iterable[tuple[int, int, int, int]]) -> None:
    """Note where durable chunks lie, durably."""
    with log.open("ab") as file:
        file.write(b"".join([_ROW.pack(*row) for row in rows]))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(log.parent)


def _read_log(log: Path) -> list[tuple[int, int, int, int]]:
    """Where the chunks of an interrupted run lie, as rows; an incomplete last row is removed."""
    if not log.exists():
        return []
    data = log.read_bytes()
    whole = len(data) // _ROW.size * _ROW.size
    os.truncate(log, whole)
    return list(_ROW.iter_unpack(data[:whole]))


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
