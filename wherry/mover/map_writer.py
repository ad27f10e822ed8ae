"""MapWriter: the writer of the formats whose `layout` says what each byte of their files is.

What is between two tensors of a file is a *frame*. One that states no checksum is written with the first or last
byte of a tensor next to it; one that states a checksum, once that is known. So the frame of a small tensor is written
in one run with it, and a part of an upload is complete soon after its tensors. `finish` writes the frames that are
left, then the files without tensors. Bytes whose checksum is needed, and that this process has not written, are read
from the staged file.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from struct import pack_into
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from wherry.core.keypath import KeyPath, render
from wherry.core.tensorspec import Region, Span, TensorSpec
from wherry.errors import UsageError, WherryError
from wherry.formats.format import EncodedChunk, Extent
from wherry.mover.checksums import PieceCrc
from wherry.store.content import combine
from wherry.store.local_store import make_folder
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Late, Literal, Scene, Segments, names_in
from wherry.target.file_ranges import lengths_of
from wherry.target.files import (
    SMALL,
    FlatFiles,
    Slice,
    SlicedFiles,
    open_files,
    put_in_order,
    require_separate_names,
    write_runs,
)

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest
    from wherry.formats.format import Format, Options
    from wherry.target.journal import Checks

_Rows = list[tuple[str, int, "bytes | bytearray | memoryview"]]


def writer_of(
    row: Format,
    target: Location,
    manifest: Manifest,
    options: Options,
    companion: Callable[[str], Location] | None = None,
    part: Slice | None = None,
) -> MapWriter:
    """The writer of a format for a target in a staging area.

    Args:
        row: the format.
        target: where the checkpoint is staged.
        manifest: as the format's `prepare` has returned it.
        options: checked.
        companion: where the source has a companion of the manifest, which some layouts have to parse.
        part: what is written of the target; all of it by default.

    Raises:
        UnrepresentableError: the format cannot hold one of the tensors.
        UnsupportedError: the target is neither on a local disk nor in the staged objects of a run, or its file system
            does not tell two of the files apart.
        StorageError: the storage is full or failed.
    """
    file_map = map_of(row, target, manifest, options, companion)
    with _at(target):
        companions = (f"{row.companion_folder}{one.name}" for one in manifest.companions)
        require_separate_names(target, chain(names_in(file_map), () if row.single_file else companions))
        return MapWriter(target, file_map, part)


def map_of(
    row: Format,
    target: Location,
    manifest: Manifest,
    options: Options,
    companion: Callable[[str], Location] | None = None,
) -> FileMap:
    """The map of a target, whose files state this time.

    Args:
        row: the format.
        target: where the checkpoint is staged, or will be; its name may decide what files state.
        manifest: as the format's `prepare` has returned it.
        options: checked.
        companion: where the source has a companion of the manifest, which some layouts have to parse.

    Raises:
        UnrepresentableError: the format cannot hold one of the tensors.
    """
    assert row.layout is not None, f"format {row.name} cannot be written"
    names = frozenset(companion.name for companion in manifest.companions)

    def find_companion(name: str) -> Location | None:
        return companion(name) if companion is not None and name in names else None

    with _at(target):
        return row.layout(manifest, options, Scene(find_companion, target.name, time.time_ns()))


@contextmanager
def _at(target: Location) -> Generator[None]:
    """Give an error of a layout, which knows no locations, that of the target."""
    try:
        yield
    except WherryError as error:
        error.uri = error.uri or target.uri
        raise


class _FileState:
    """The state of one file that holds tensors, by the numbers of its segments.

    Attributes:
        name: of the file.
        body: its segments.
        crcs: the CRC-32 of each tensor's segment, where `known` says so.
        pieces: those of pieces of segments of which not every byte is known.
        framed: whether a frame that begins with a segment is written.
        stored: whether a segment was stored in one write by an earlier run, and so with the frames around it.
    """

    def __init__(self, name: str, body: Segments, *, checksums: bool) -> None:
        count = len(body)
        self.name, self.body = name, body
        self.crcs, self.known = array("I", bytes(4 * count if checksums else 0)), bytearray(count)
        self.pieces: dict[int, PieceCrc] = {}
        self.framed, self.stored = bytearray(count + 1), bytearray(count)
        self._lock = threading.Lock()

    def know(self, number: int, crc: int) -> None:
        """Keep the CRC-32 of a segment."""
        self.crcs[number] = crc
        self.known[number] = 1

    def is_whole(self, number: int, start: int, stop: int) -> bool:
        """Whether bytes of the file are all of a segment."""
        return start == self.body.offsets[number] and stop == self.body.offsets[number + 1]

    def piece(self, number: int) -> PieceCrc:
        """The CRCs of the pieces of a segment."""
        with self._lock:
            found = self.pieces.get(number)
            if found is None:
                found = self.pieces[number] = PieceCrc(self.body.bounds(number).nbytes)
            return found


class MapWriter:
    """Writes the files of a map, in any order, from several threads; the same bytes may be written again."""

    def __init__(self, target: Location, file_map: FileMap, part: Slice | None = None) -> None:
        """Create the files that hold tensors.

        Args:
            target: a file or folder in a staging area.
            file_map: its files.
            part: what is written of them; all by default. The files without tensors are in no slice.

        Raises:
            UnsupportedError: the target is neither on a local disk nor in the staged objects of a run.
            StorageError: the storage is full or failed.
        """
        self._map, self._part = file_map, part
        is_file = any(file.name == "." for file in file_map.files)
        self._folder = target.parent if is_file else target
        # Of the files that hold tensors; the others follow them.
        self._states = [
            _FileState(target.name if is_file else file.name, file.body, checksums=file_map.checksums)
            for file in file_map.files
            if isinstance(file.body, Segments)
        ]
        self._locations = [self._folder.join(state.name) for state in self._states]
        if not is_file:
            folders = [place.parent for place in self._locations]
            for folder in {folder.path: folder for folder in (target, *folders)}.values():
                make_folder(folder)
        own = replace(part, files=frozenset([target.name])) if part and is_file else part
        self._files = open_files(self._folder, {state.name: state.body.nbytes for state in self._states}, own)
        self._chunks = None
        if file_map.chunks:
            from wherry.mover.chunk_writer import open_chunks

            self._chunks = open_chunks(target, file_map.chunks, part)

    def grid(self, path: KeyPath) -> tuple[int, ...] | None:
        """The chunk extents of a tensor that is written on a grid; None for one of which any span can be written."""
        return self._chunks.grid(path) if self._chunks and path in self._chunks else None

    def place(self, path: KeyPath, where: Region | Span) -> int | None:
        """The offset of a span in its file; 0 for a tensor without elements, an encoded tensor, and a plain chunk.

        Memory at the same offset within a page can be written with direct I/O. None for an encoded chunk.
        """
        if self._chunks and path in self._chunks:
            return 0 if self._chunks.plain else None
        if not isinstance(where, Span) or path in self._map.codecs:
            return 0
        places = self._map.places(path, where)
        return places[0].start if places else 0

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """The byte ranges of a span, each with its CRC-32 if it is all of a segment and that is known; of a chunk."""
        if self._chunks and path in self._chunks:
            return None if isinstance(where, Span) else self._chunks.extents(path, where)
        if not isinstance(where, Span) or path in self._map.codecs:
            return None
        found: list[Extent] = []
        for file, number, start, stop in self._map.places(path, where):
            state = self._states[file]
            is_known = state.known[number] and state.is_whole(number, start, stop)
            crc = state.crcs[number] if is_known else None
            found.append(Extent(self._locations[file], start, stop - start, crc))
        return tuple(found)

    def lengths(self, spec: TensorSpec) -> Sequence[int]:
        """Bytes of each byte range of a tensor; none of one that is encoded or written on a grid."""
        return lengths_of(self._map, spec)

    def encoded(self, path: KeyPath, where: Region) -> EncodedChunk | None:
        """An encoded chunk that was written."""
        return self._chunks.encoded(path, where) if self._chunks and path in self._chunks else None

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write a span, or a chunk.

        Raises:
            UsageError: `where` is not a span or chunk of this tensor, or does not agree with the data.
            StorageError: the storage failed.
        """
        if self._chunks and path in self._chunks:
            if isinstance(where, Span):
                raise UsageError("the tensor is written in chunks, not in spans", path=render(path))
            self._chunks.write(path, where, data)
            return
        self.write_all(((path, where, data),))

    def write_all(self, parts: Iterable[tuple[KeyPath, Region | Span, memoryview]]) -> None:
        """Write spans of several tensors; small ones that follow one another in a file, at once with their frames."""
        rows: _Rows = []
        for path, where, given in parts:
            if not isinstance(where, Span) or where.stop - where.start != len(given):
                raise UsageError(f"{where} is not a span of {len(given)} bytes", path=render(path))
            data = given
            if codec := self._map.codecs.get(path):
                if where.start % codec.block:
                    raise UsageError(
                        f"the span must begin at a multiple of {codec.block}, not {where.start}",
                        path=render(path),
                    )
                data = codec.encode(given)
            places = self._map.places(path, where)
            if sum([stop - start for _file, _number, start, stop in places]) != len(data):
                raise UsageError(f"span {where} is not inside the tensor", path=render(path))
            done = 0
            for file, number, start, stop in places:
                size = stop - start
                piece = data if size == len(data) else data[done : done + size]
                done += size
                state = self._states[file]
                if size < SMALL:  # noted, as are the frames that are known by it
                    rows.append((state.name, start, piece))
                else:
                    self._files.write(state.name, start, piece)
                is_known = self._know(state, number, start, piece) if self._map.checksums else True
                self._add_frames(state, number, start, stop, rows, is_known=is_known)
        write_runs(self._files, rows)

    def _know(self, state: _FileState, number: int, start: int, data: memoryview) -> bool:
        """Take the CRC-32 of bytes that are written, perhaps again and with other contents.

        Returns:
            Whether that of the segment is known.
        """
        is_whole = state.is_whole(number, start, start + len(data))
        if state.known[number]:
            if not is_whole and not self.is_durable_by_sync():
                return True  # the rest could not be read, and bytes that are sent do not change
            state.known[number] = 0
            for first in (state.body.frame_start(number), number + 1):
                state.framed[first] = 0
        if is_whole:
            state.know(number, crc32(data))
            return True
        state.piece(number).update(start - state.body.offsets[number], data)
        return self._crc_of(state, number) is not None

    def _add_frames(
        self, state: _FileState, number: int, start: int, stop: int, rows: _Rows, *, is_known: bool
    ) -> None:
        """Note the frames around a segment that are known by bytes of it.

        Args:
            state, number: of the segment.
            start, stop: of the bytes, in the file.
            rows: gets the frames.
            is_known: whether all of the segment is known.
        """
        body, framed = state.body, state.framed
        first, after = body.frame_start(number), number + 1
        if first < number and not framed[first] and (is_known or start == body.offsets[number]):
            self._add_frame(state, first, number, rows)
        if not framed[after] and (is_known or stop == body.offsets[after]):
            self._add_frame(state, after, body.frame_stop(number), rows)

    def _add_frame(self, state: _FileState, first: int, stop: int, rows: _Rows) -> None:
        """Note the frame of some segments if all that it states is known."""
        if first == stop:
            return
        data = self._frame_bytes(state, first, stop)
        if data is not None:
            rows.append((state.name, state.body.offsets[first], data))
            state.framed[first] = 1

    def _frame_bytes(
        self, state: _FileState, first: int, stop: int, *, read: bool = False
    ) -> bytes | bytearray | None:
        """The bytes of a frame; None if it states a checksum that is not known and not read."""
        found: list[bytes | bytearray] = []
        for number in range(first, stop):
            segment = state.body[number]
            if isinstance(segment, Literal):
                found.append(segment.data)
                continue
            assert isinstance(segment, Late), "frames hold no tensors"
            data = bytearray(segment.data)
            for at, begin, end in segment.checksums:
                if end - begin == 1 and state.known[number + begin]:  # as where tensors are many and small
                    pack_into("<I", data, at, state.crcs[number + begin])
                    continue
                crc = self._crc(state, number + begin, number + end, read=read)
                if crc is None:
                    return None
                pack_into("<I", data, at, crc)
            found.append(data)
        data = b"".join(found) if len(found) > 1 else found[0]
        size = state.body.offsets[stop] - state.body.offsets[first]
        assert len(data) == size, "a frame has the size that the map states"
        return data

    def _crc(self, state: _FileState, first: int, stop: int, *, read: bool) -> int | None:
        """The CRC-32 of segments; None if it is not known and not read."""
        total = self._crc_of(state, first, read=read)
        for number in range(first + 1, stop):
            value = self._crc_of(state, number, read=read)
            if total is None or value is None:
                return None
            total = combine(total, value, state.body.bounds(number).nbytes)
        return total

    def _crc_of(self, state: _FileState, number: int, *, read: bool = False) -> int | None:
        """The CRC-32 of a segment; bytes that this process has not written are read from the staged file."""
        if state.known[number]:
            return state.crcs[number]
        if not state.body.tensors[number]:
            segment = state.body[number]
            assert isinstance(segment, Literal), "a checksum is one of tensors and literals"
            return crc32(segment.data)
        if not read and (number not in state.pieces or state.pieces[number].left):
            return None
        base = state.body.offsets[number]
        piece = state.piece(number)
        state.know(
            number, piece.value(lambda start, stop: self._files.read(state.name, base + start, base + stop))
        )
        return state.crcs[number]

    def stored(self, path: KeyPath, where: Region | Span) -> bool:
        """Whether bytes that were written are durable after a `sync`; in a store, when their parts are sent."""
        if self._chunks and path in self._chunks:
            return not isinstance(where, Span) and self._chunks.stored(path, where)
        if isinstance(self._files, FlatFiles):  # also of encoded spans, which have no extents
            return True
        extents = self.extents(path, where)
        return extents is not None and all(
            self._files.has_bytes(extent.location.path, extent.offset, extent.offset + extent.length)
            for extent in extents
        )

    def is_durable_by_sync(self) -> bool:
        """Whether these are files on a local disk, whose bytes can be read again for their checksums."""
        return isinstance(self._files, FlatFiles)

    def checks(self, path: KeyPath, where: Span) -> Checks:
        """The CRCs of the pieces of a span, if they are needed and cannot be read again."""
        found: list[tuple[int, int, int]] = []
        if not self._map.checksums or self.is_durable_by_sync():
            return found
        done = where.start
        for file, number, start, stop in self._map.places(path, where):
            state = self._states[file]
            if state.known[number] and state.is_whole(number, start, stop):
                found.append((done, done + stop - start, state.crcs[number]))
            else:
                base = state.body.offsets[number]
                moved = done - (start - base)
                known = state.piece(number).known(start - base, stop - base)
                found += [(first + moved, last + moved, value) for first, last, value in known]
            done += stop - start
        return found

    def restore(self, path: KeyPath, where: Span, checks: Checks) -> None:
        """Take bytes that an earlier run has stored; frames that are known by their CRCs are written again."""
        if not self._map.checksums:
            return
        rows: _Rows = []
        done = where.start
        for file, number, start, stop in self._map.places(path, where):
            state, size = self._states[file], stop - start
            if checks:
                moved = start - state.body.offsets[number] - done
                own = [check for check in checks if done <= check[0] and check[1] <= done + size]
                state.piece(number).take((first + moved, last + moved, value) for first, last, value in own)
                is_known = self._crc_of(state, number) is not None
                self._add_frames(state, number, start, stop, rows, is_known=is_known)
            elif size < SMALL and size == where.nbytes and state.is_whole(number, start, stop):
                state.stored[number] = 1
            done += size
        write_runs(self._files, rows)

    def sync(self) -> None:
        """Make everything durable whose `write` has returned: contents, names, and the folders that hold the names.

        Several threads may call it. No call returns before that, even if another one is already syncing it.
        """
        self._files.sync()
        if self._chunks:
            self._chunks.sync()

    def finish(self) -> None:
        """Write the frames that are left, make the files durable, then put those without tensors, in their order.

        It may be called again.
        """
        for state in self._states:
            if isinstance(self._files, SlicedFiles) and not self._files.keeps(state.name):
                continue
            for first, stop in state.body.frames():
                if not state.framed[first] and not self._was_stored(state, first, stop):
                    data = self._frame_bytes(state, first, stop, read=True)
                    assert data is not None, "bytes that are read have a checksum"
                    self._files.write(state.name, state.body.offsets[first], data)
                    state.framed[first] = 1
        self._files.finish()
        if self._chunks:
            self._chunks.finish()
        if self._part is None:
            put_in_order(self._folder, self._map.files[len(self._states) :])

    def _was_stored(self, state: _FileState, first: int, stop: int) -> bool:
        """Whether an earlier run has written a frame with the only tensor whose checksum it states."""
        near = {n for n in (first - 1, stop) if 0 <= n < len(state.body) and state.stored[n]}
        if not near:
            return False
        late = ((n, segment) for n in range(first, stop) if isinstance(segment := state.body[n], Late))
        needed = {
            n + at
            for n, segment in late
            for checksum in segment.checksums
            for at in range(checksum.first, checksum.stop)
        }
        return needed <= near

    def close(self) -> None:
        """Close the files."""
        self._files.close()
        if self._chunks:
            self._chunks.close()
