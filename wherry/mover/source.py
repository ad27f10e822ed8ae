"""Source: reads the bytes of a checkpoint's tensors, part by part, in bounded memory, by any access of their reader.

Raw bytes are read directly from their files. Encoded chunks up to a quarter of the budget are decoded whole.
Larger chunks are decoded piece by piece into spill files of exact canonical bytes, which are then read like raw
bytes. A tensor that is one such chunk needs no file: its bytes come in order, and one worker carries them as they are
decoded. One spill file holds one **band**: the fewest whole chunks that are contiguous in the tensor. It is created
when the first move needs it, by all workers that wait for it together (each decodes one chunk at a time), and is
removed once every byte of it was read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, Span, TensorSpec
from wherry.core.threads import return_freed_memory
from wherry.core.units import show_size
from wherry.cures import Argument, Cure
from wherry.errors import UsageError
from wherry.formats.format import Access, Block, Chunked, Computed, Contents, Extent, Stored
from wherry.mover.checksums import ContainerChecksums
from wherry.mover.decode import Spill, SpillFile, drop_free_parts
from wherry.mover.move import DECODE_FACTOR, SMALL, Move, Way, Ways, cells, common_grid, on_grid
from wherry.mover.pool import Pool
from wherry.mover.read import band_at, blocks_of_cell, file_offset, fill, memory_for, place, read_span
from wherry.store.local_store import locate

_SHARE = 4  # data decoded in memory is at most the budget divided by this,
_LEAST = 8 << 20  # or this many bytes if the budget is very small; see AT_ONCE of the zarr container, too
_MIB = 1 << 20
_RECENT = 64  # tensors that are not raw of which it is kept how they are read: some are large answers
_LARGE = 32 << 20  # bytes of buffers of a pass; after less there is little to return


class Source:
    """Reads parts of a checkpoint's tensors; use it in a `with` statement, which removes its files.

    Nothing is written before a part is read, so a plan may ask how tensors would be read.

    Attributes:
        reader: the checkpoint's reader.
        pool: the buffers, and the memory budget, which includes decoding.
        stopped: ends decoding once it is set.
        recorded: checks the CRCs that the source's containers record.
        straight: whether raw bytes are read with direct I/O, past the page cache, as for a read-back.
    """

    def __init__(
        self,
        reader: Contents,
        pool: Pool,
        folder: Path | None = None,
        *,
        ways: Ways | None = None,
        stopped: threading.Event | None = None,
        straight: bool = False,
    ) -> None:
        """Create the source; nothing is read yet.

        Args:
            reader: the checkpoint's reader.
            pool: the buffers, and the memory budget, which includes decoding.
            folder: for spill files; a temporary folder by default.
            ways: how tensors are read, if a plan has determined that.
            stopped: ends decoding.
            straight: whether raw bytes are read with direct I/O, past the page cache, as for a read-back.
        """
        self.reader = reader
        self.stopped = stopped or threading.Event()
        self.recorded = ContainerChecksums()
        self.pool = pool
        self.straight = straight
        self._limit = max(pool.budget // _SHARE, _LEAST)
        self._spill = Spill(folder, self.stopped)
        self._ways = {} if ways is None else dict(ways.kept)
        self._stored: dict[KeyPath, Stored] = {}  # raw tensors that have several extents
        self._extents: dict[KeyPath, Extent] = {}  # of raw tensors that have one: all that is kept of them
        self._recent: dict[KeyPath, Chunked | Computed] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spill.close()
        drop_free_parts()
        if self.pool.peak >= _LARGE:
            return_freed_memory()

    def access(self, spec: TensorSpec) -> Access:
        """How a tensor's bytes are read; its reader is called once, or again after many other tensors."""
        extent = self._extents.get(spec.path)
        if extent is not None:
            return Stored((extent,))
        access = self._stored.get(spec.path) or self._recent.get(spec.path)
        if access is None:
            access = self.reader.access(spec)
            if not isinstance(access, Stored):
                if len(self._recent) >= _RECENT:
                    self._recent.clear()
                self._recent[spec.path] = access
            elif len(access.extents) == 1:
                self._extents[spec.path] = access.extents[0]
            else:
                self._stored[spec.path] = access
        return access

    def take_extent(self, spec: TensorSpec) -> Extent | None:
        """The only extent of a tensor's raw bytes, None if there are several; of a small one nothing is kept."""
        self.access(spec)
        extent = self._extents.get(spec.path)
        if extent is not None and extent.length <= SMALL:
            del self._extents[spec.path]
        return extent

    def way(self, spec: TensorSpec) -> Way:
        """How a tensor is read within the budget.

        Raises:
            UsageError: its chunks are too large to be decoded whole, and cannot be decoded piece by piece.
        """
        way = self._ways.get(spec.path)
        if way is None:
            access = self.access(spec)
            way = Way.of(access)
            if spec.path in self._extents:
                return way
            band = self._band(spec, way, access)
            flows = band is not None and spec.chunks == spec.shape and self._only_block(spec) is not None
            way = self._ways[spec.path] = replace(way, band=band, flows=flows)
        return way

    @contextmanager
    def part(self, spec: TensorSpec, move: Move, offset: int = 0) -> Generator[memoryview]:
        """The bytes of a move, valid while the block runs.

        Args:
            spec: the tensor.
            move: the part of it.
            offset: in the file to which the bytes will be written; the buffer has the same offset within a page.

        Raises:
            DamagedError: bytes are missing or corrupt.
            StorageError: the storage failed, or a spill file could not be written.
            StoppedError: the source was stopped.
        """
        with ExitStack() as stack:
            if move.box:
                assert move.region is not None
                buffer = self._buffer(spec, move.region, move.span, 0, stack)
                fill(self.access(spec), spec, move.region, buffer)
                yield buffer
                return
            extents = stack.enter_context(self.at(spec, move.span))
            if extents is None:
                yield self._decoded(spec, move, offset, stack)
                return
            if self.straight:
                offset = file_offset(extents, move.span.start)
            buffer = stack.enter_context(self.pool.buffer(move.span.nbytes, place=offset))
            read_span(extents, move.span, buffer, spec, straight=self.straight)
            self.recorded.update(extents, move.span, buffer, spec)
            yield buffer

    @contextmanager
    def flow(self, spec: TensorSpec, spans: list[Span], offset: int = 0) -> Generator[Iterator[memoryview]]:
        """The bytes of spans of a tensor that is decoded in order; each is valid until the next.

        Args:
            spec: the tensor.
            spans: ascending and disjoint.
            offset: in the file to which the bytes will be written; the buffer has the same offset within a page.

        Raises: what `part` does.
        """
        largest = max(span.nbytes for span in spans)
        held = self._held_bytes(spec, self.access(spec), spec.whole) or 0
        first = self._only_block(spec)
        assert first is not None
        with self.pool.buffer(largest, held, offset) as buffer:
            yield spans_of(self._until_stopped(first.pieces), spans, buffer)

    @contextmanager
    def at(self, spec: TensorSpec, span: Span) -> Generator[tuple[Extent, ...] | None]:
        """The extents of a span while the block runs; None if it must be decoded by region.

        Raises: what `part` does.
        """
        way = self.way(spec)
        if way.band is None:
            yield way.extents
            return
        with ExitStack() as stack:
            files: list[SpillFile] = []
            start = span.start
            while start < span.stop:
                region, held = band_at(spec, way.band, start)
                parts, decode = partial(cells, region, spec.chunks or ()), partial(self._spill_cell, spec)
                using = self._spill.using((spec.path, held.start), held, parts, decode)
                files.append(stack.enter_context(using))
                start = held.stop
            places = [locate(str(file.path)) for file in files]
            before = Extent(places[0], 0, files[0].span.start)  # a placeholder for bytes that are not read
            yield (
                before,
                *(Extent(place, 0, file.span.nbytes) for place, file in zip(places, files, strict=True)),
            )
        for file in files:
            nbytes = min(span.stop, file.span.stop) - max(span.start, file.span.start)
            self._spill.read((spec.path, file.span.start), nbytes)

    def _decoded(self, spec: TensorSpec, move: Move, offset: int, stack: ExitStack) -> memoryview:
        """Decode a move into a reused buffer."""
        region, access = spec.whole if move.region is None else move.region, self.access(spec)
        held = _piecewise(access, spec, region)
        if held is None:
            buffer = self._buffer(spec, region, move.span, offset, stack)
            fill(access, spec, region, buffer)
            return buffer
        buffer = stack.enter_context(self.pool.buffer(move.span.nbytes, held, offset))
        first = move.span.start

        def write(data: memoryview, at: int) -> None:
            buffer[at - first : at - first + len(data)] = data

        for cell in cells(region, spec.chunks or ()):
            for block in blocks_of_cell(access, spec, cell, in_pieces=True):
                place(spec, block.region, block.pieces, write)
        return buffer

    def _buffer(
        self, spec: TensorSpec, region: Region, span: Span, offset: int, stack: ExitStack
    ) -> memoryview:
        """A buffer for a region; the memory that filling it takes besides is reserved too."""
        extra = memory_for(self.access(spec), spec, region)
        return stack.enter_context(self.pool.buffer(span.nbytes, extra, offset))

    def _band(self, spec: TensorSpec, way: Way, access: Access) -> tuple[int, ...] | None:
        """Extents of one band, if the tensor must be spilled; None otherwise."""
        if not way.gridded or spec.chunks is None or spec.nbytes == 0 or dtypes.opaque(spec.dtype):
            return None
        cut = common_grid(spec.shape, [spec.chunks])
        if dtypes.canonical_size(spec.dtype, math.prod(cut)) <= self._limit:
            return None
        self._held_bytes(spec, access, next(cells(spec.whole, spec.chunks)))
        return cut

    def _held_bytes(self, spec: TensorSpec, access: Access, cell: Region) -> int | None:
        """Memory for decoding a chunk piece by piece, in bytes; None if it is small enough to be decoded whole."""
        chunk = _chunk_bytes(spec)
        if chunk <= self._limit:
            return None
        held = None if access.decoder is None else access.decoder.memory(cell)
        if held is None or held > self._limit:
            way = "it cannot be decoded in pieces" if held is None else f"its codec needs {show_size(held)}"
            raise UsageError(
                f"a chunk of {show_size(chunk)} exceeds a quarter of the memory budget, and {way}",
                path=spec.name,
                cure=Cure("pass {}", Argument("memory", f"{-(-_SHARE * (held or chunk) // _MIB)}MiB")),
            )
        return held

    def _only_block(self, spec: TensorSpec) -> Block | None:
        """The block of a tensor's only chunk, if it is decoded as one block; nothing is decoded yet."""
        decoder = self.access(spec).decoder
        if decoder is None or decoder.memory(spec.whole) is None:
            return None
        block = next(iter(decoder.decode(spec.whole)), None)
        return block if block is not None and block.region == spec.whole else None

    def _spill_cell(self, spec: TensorSpec, file: SpillFile, cell: Region) -> None:
        access = self.access(spec)
        held = self._held_bytes(spec, access, cell)
        nbytes = DECODE_FACTOR * _chunk_bytes(spec) if held is None else held
        with self.pool.reserved(nbytes), self._spill.writing(file) as write:
            for block in blocks_of_cell(access, spec, cell, in_pieces=held is not None):
                place(spec, block.region, block.pieces, lambda data, at: write(data, at - file.span.start))

    def _until_stopped(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            self._spill.check()
            yield piece


def ways_of(source: Source, specs: Mapping[KeyPath, TensorSpec], paths: Collection[KeyPath]) -> Ways:
    """How tensors of a checkpoint are read within a budget.

    Args:
        source: reads them.
        specs: the tensors of the checkpoint.
        paths: those of them that are read; may have one several times.

    Raises: what `Source.way` does.
    """
    coded = [path for path in paths if source.reader.access(specs[path]).extents is None]
    return Ways(source.reader, specs, paths, {path: source.way(specs[path]) for path in coded})


def _piecewise(access: Access, spec: TensorSpec, region: Region) -> int | None:
    """Memory for decoding a region piece by piece; None unless it consists of whole chunks that all allow that."""
    decoder = access.decoder
    if decoder is None or not spec.chunks or not on_grid(region, spec.chunks, spec.shape):
        return None
    held = [decoder.memory(cell) for cell in cells(region, spec.chunks)]
    known = [nbytes for nbytes in held if nbytes is not None]
    return max(known) if len(known) == len(held) else None


def _chunk_bytes(spec: TensorSpec) -> int:
    return dtypes.canonical_size(spec.dtype, math.prod(spec.chunks or ()))


def spans_of(pieces: Iterator[memoryview], spans: Iterable[Span], buffer: memoryview) -> Iterator[memoryview]:
    """The bytes of each span, in one shared buffer, valid until the next; bytes between spans are skipped.

    The pieces are read to their end, since the decoder checks its data there.

    Args:
        pieces: bytes from offset 0 on.
        spans: ascending and disjoint.
        buffer: holds the largest span.

    Raises:
        ValueError: the pieces end before the last span does.
    """
    rest, position = memoryview(b""), 0

    def take(most: int) -> memoryview:
        nonlocal rest, position
        while not rest:
            following = next(pieces, None)
            if following is None:
                raise ValueError(f"the decoded data is truncated: it ends at byte {position}")
            rest = following
        piece, rest = rest[:most], rest[most:]
        position += len(piece)
        return piece

    for span in spans:
        while position < span.start:
            take(span.start - position)
        part, done = buffer[: span.nbytes], 0
        while done < len(part):
            piece = take(len(part) - done)
            part[done : done + len(piece)] = piece
            done += len(piece)
        yield part
    for _rest in pieces:
        pass
