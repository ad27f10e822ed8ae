"""Spill: the bytes of a source by span, in bounded memory, also where its chunks are too large to decode whole.

Where bytes lie raw, they are read from where they lie. Encoded chunks up to a quarter of the budget are left to the
reader, which decodes them whole. Beyond that, chunks are decoded piece by piece into spill files of exact canonical
bytes, which are then read like any raw bytes. A tensor that is one such chunk needs no file: its bytes come in order,
and one worker carries them as they come. One spill file holds one **band**: the fewest whole chunks that are
contiguous in the tensor. It is made when the first move needs it, by all workers that wait for it together (each
decodes one chunk at a time), and is removed once every byte of it was read; what a pass that ends early leaves is
removed with the folder.

Flowing: bytes that come one after another, cut into the spans that moves want.

Band: one spill file, made by all workers that wait for it together.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Self

from wherry.core import dtypes
from wherry.core.units import show_size
from wherry.errors import UsageError, storage_error
from wherry.formats.format import Block, Extent, Reader, StreamingReader
from wherry.formats.reader import FillingReader, RegionReader
from wherry.mover.move import cells, common_grid, on_grid
from wherry.mover.output import as_bytes
from wherry.mover.regions import band_at, fill_region, place, raw_bytes
from wherry.runtime.threads import StoppedError
from wherry.storage.direct import writing
from wherry.storage.folders import PREFIX
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from types import TracebackType

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, Span, TensorSpec
    from wherry.mover.pool import Pool


FOLDER_VARIABLE = "WHERRY_SPILL"
_SHARE = 4  # what is decoded in memory is at most the budget divided by this,
_LEAST = 4 << 20  # or this where the budget is very small
_DECODE_FACTOR = 2  # a chunk that is decoded whole is held once by the codec and once as an array
_MIB = 1 << 20


class Spill:
    """Gives spans of a source's tensors; use it in a `with` statement, which removes its files.

    Nothing is written before a span is asked for, so a plan may ask what would be spilled.

    Attributes:
        reader: the source.
    """

    def __init__(self, reader: Reader, pool: Pool, folder: Path | None = None) -> None:
        """Look at a source.

        Args:
            reader: the source.
            pool: the budget, which decoding counts against.
            folder: where spill files lie; a temporary folder (below `WHERRY_SPILL`, where that is set) by default.
        """
        self.reader = reader
        self._pool = pool
        self._limit = max(pool.budget // _SHARE, _LEAST)
        self._folder = folder
        self._made = False
        self._extents: dict[KeyPath, tuple[Extent, ...] | None] = {}
        self._cuts: dict[KeyPath, tuple[int, ...] | None] = {}
        self._bands: dict[tuple[KeyPath, int], Band] = {}
        self._numbers = count()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def by_span(self, spec: TensorSpec) -> bool:
        """Whether any span of a tensor can be had, raw or from a spill file; else only regions can."""
        return self._raw(spec) is not None or self.spills(spec)

    def by_region(self, spec: TensorSpec) -> bool:
        """Whether any region of a tensor can be had without decoding much more."""
        return self._raw(spec) is not None or isinstance(self.reader, FillingReader) or self.free(spec)

    def free(self, spec: TensorSpec) -> bool:
        """Whether its chunks need not be regarded: they lie raw, and any part of them is read alone."""
        return isinstance(self.reader, RegionReader) and self.reader.cheap(spec)

    def overhead(self, spec: TensorSpec, region: Region) -> int:
        """Bytes that `fill` or `box` will hold beside their buffer."""
        reader = self.reader
        return reader.overhead(spec, region) if isinstance(reader, FillingReader) else 0

    def box(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with a region that is not one run of the tensor's bytes."""
        raw = self._raw(spec)
        if raw is not None:
            fill_region(spec, region, raw_bytes(raw, spec), buffer)
        elif isinstance(self.reader, FillingReader):
            self.reader.fill(spec, region, buffer)
        else:
            buffer[:] = as_bytes(self.reader.read(spec, region))

    def spills(self, spec: TensorSpec) -> bool:
        """Whether a tensor goes through spill files.

        Raises:
            UsageError: its chunks are too large to be decoded whole, and cannot be decoded piece by piece.
        """
        if spec.path not in self._cuts:
            self._cuts[spec.path] = self._cut(spec) if self._raw(spec) is None else None
        return self._cuts[spec.path] is not None

    def flows(self, spec: TensorSpec) -> bool:
        """Whether a tensor whose chunks are too large to be decoded whole comes in order: it is one such chunk."""
        return self.spills(spec) and spec.chunks == spec.shape and only_block(self.reader, spec) is not None

    def flow(self, spec: TensorSpec, stopped: threading.Event) -> Iterator[memoryview]:
        """The bytes of a tensor that flows, in pieces, each valid until the next.

        Raises: what `at` does.
        """
        first = only_block(self.reader, spec)
        assert first is not None
        return until(stopped, first.pieces)

    def flow_held(self, spec: TensorSpec) -> int:
        """Bytes that `flow` holds at a time."""
        return self._held(spec, spec.whole) or 0

    @contextmanager
    def at(
        self, spec: TensorSpec, span: Span, stopped: threading.Event
    ) -> Generator[tuple[Extent, ...] | None]:
        """Where a span's bytes lie while the block runs; None where they must be decoded by region.

        Raises:
            DamagedError: a chunk is missing or contradicts itself.
            StorageError: the spill file could not be written.
            StoppedError: `stopped` was set meanwhile.
        """
        if not self.spills(spec):
            yield self._raw(spec)
            return
        bands = list(self._overlapping(spec, span))
        for band in bands:
            self._complete(spec, band, stopped)
        places = [locate(str(band.path)) for band in bands]
        before = Extent(places[0], 0, bands[0].span.start)  # what lies there is not asked for
        yield (
            before,
            *(Extent(place, 0, band.span.nbytes) for place, band in zip(places, bands, strict=True)),
        )
        for band in bands:
            self._read(spec, band, min(span.stop, band.span.stop) - max(span.start, band.span.start))

    def fill(self, spec: TensorSpec, region: Region, span: Span, buffer: memoryview) -> bool:
        """Decode whole chunks piece by piece straight into a buffer; False where the reader must decode them.

        Args:
            spec: the tensor.
            region: what is wanted.
            span: the canonical bytes that it covers.
            buffer: takes them.

        Raises:
            DamagedError: a chunk is missing or contradicts itself.
        """
        reader, chunks = self.reader, spec.chunks
        if isinstance(reader, FillingReader):
            reader.fill(spec, region, buffer)
            return True
        if isinstance(reader, RegionReader) and reader.cheap(spec):
            reader.region(spec, region, buffer)
            return True
        if not chunks or not on_grid(region, chunks, spec.shape):
            return False
        if not isinstance(reader, StreamingReader):
            return False
        parts = list(cells(region, chunks))
        if any(reader.held(spec, cell) is None for cell in parts):
            return False

        def write(data: memoryview, at: int) -> None:
            buffer[at - span.start : at - span.start + len(data)] = data

        for cell in parts:
            for block in reader.stream(spec, cell):
                place(spec, block.region, block.pieces, write)
        return True

    def _raw(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        with self._lock:
            if spec.path not in self._extents:
                self._extents[spec.path] = self.reader.extents(spec)
            return self._extents[spec.path]

    def _cut(self, spec: TensorSpec) -> tuple[int, ...] | None:
        """Extents of one band, where the tensor must be spilled."""
        if spec.chunks is None or spec.nbytes == 0 or dtypes.opaque(spec.dtype) or self.free(spec):
            return None
        cut = common_grid(spec.shape, [spec.chunks])
        if dtypes.canonical_size(spec.dtype, math.prod(cut)) <= self._limit:
            return None
        self._held(spec, next(cells(spec.whole, spec.chunks)))
        return cut

    def _held(self, spec: TensorSpec, cell: Region) -> int | None:
        """Bytes that decoding a chunk piece by piece holds; None where it is small enough to be decoded whole."""
        chunk = _chunk_bytes(spec)
        if chunk <= self._limit:
            return None
        held = self.reader.held(spec, cell) if isinstance(self.reader, StreamingReader) else None
        if held is None or held > self._limit:
            way = "it cannot be decoded in pieces" if held is None else f"its codec holds {show_size(held)}"
            raise UsageError(
                f"a chunk of {show_size(chunk)} does not fit a quarter of the memory budget, and {way}",
                path=spec.name,
                cure=f"give it --memory {-(-_SHARE * (held or chunk) // _MIB)}MiB",
            )
        return held

    def _overlapping(self, spec: TensorSpec, span: Span) -> Iterator[Band]:
        start = span.start
        while start < span.stop:
            band = self._band(spec, start)
            yield band
            start = band.span.stop

    def _band(self, spec: TensorSpec, at: int) -> Band:
        """The band that holds the byte at an offset."""
        cut = self._cuts[spec.path]
        assert cut is not None
        assert spec.chunks is not None
        region, span = band_at(spec, cut, at)
        with self._lock:
            key = (spec.path, span.start)
            if key not in self._bands:
                path = self._place() / str(next(self._numbers))
                self._bands[key] = Band(path, span, cells(region, spec.chunks), span.nbytes)
            return self._bands[key]

    def _place(self) -> Path:
        if not self._made:
            try:
                self._folder = self._folder or Path(
                    tempfile.mkdtemp(prefix=f"{PREFIX}spill-", dir=os.environ.get(FOLDER_VARIABLE))
                )
                self._folder.mkdir(exist_ok=True)
            except OSError as error:
                raise storage_error(error, str(self._folder or os.environ.get(FOLDER_VARIABLE))) from error
            self._made = True
        assert self._folder is not None
        return self._folder

    def _complete(self, spec: TensorSpec, band: Band, stopped: threading.Event) -> None:
        while (cell := band.take()) is not None:
            try:
                self._decode(spec, band, cell, stopped)
            except BaseException as error:
                band.done(error)
                raise
            band.done(None)
        band.wait(stopped)

    def _decode(self, spec: TensorSpec, band: Band, cell: Region, stopped: threading.Event) -> None:
        held = self._held(spec, cell)
        nbytes = _DECODE_FACTOR * _chunk_bytes(spec) if held is None else held
        with self._pool.reserved(nbytes), writing(band.path) as write:
            for block in self._blocks(spec, cell, streamed=held is not None):
                pieces = until(stopped, block.pieces)
                place(spec, block.region, pieces, lambda data, at: write(data, at - band.span.start))

    def _blocks(self, spec: TensorSpec, cell: Region, *, streamed: bool) -> Iterator[Block]:
        if streamed and isinstance(self.reader, StreamingReader):
            return self.reader.stream(spec, cell)
        return iter([Block(cell, iter([as_bytes(self.reader.read(spec, cell))]))])

    def _read(self, spec: TensorSpec, band: Band, nbytes: int) -> None:
        with self._lock:
            band.left -= nbytes
            if band.left == 0:
                del self._bands[spec.path, band.span.start]
                band.path.unlink()


def _chunk_bytes(spec: TensorSpec) -> int:
    return dtypes.canonical_size(spec.dtype, math.prod(spec.chunks or ()))


def only_block(reader: Reader, spec: TensorSpec) -> Block | None:
    """The block that a tensor's only chunk is decoded in, if it comes as one; nothing is decoded yet."""
    if not isinstance(reader, StreamingReader):
        return None
    block = next(iter(reader.stream(spec, spec.whole)), None)
    return block if block is not None and block.region == spec.whole else None


def until(stopped: threading.Event, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same pieces, until a pass is stopped.

    Raises:
        StoppedError: it was.
    """
    for piece in pieces:
        if stopped.is_set():
            raise StoppedError
        yield piece


def spans_of(pieces: Iterator[memoryview], spans: Iterable[Span], buffer: memoryview) -> Iterator[memoryview]:
    """The bytes of each span, in the one buffer, valid until the next; what lies between them is passed over.

    The pieces are taken to their end, since whoever decodes them looks there whether all was well.

    Args:
        pieces: bytes from offset 0 on.
        spans: ascending and disjoint.
        buffer: holds the largest span.

    Raises:
        ValueError: the pieces end before the last span does.
    """
    flow = _Flow(pieces)
    for span in spans:
        flow.skip(span.start)
        part = buffer[: span.nbytes]
        flow.fill(part)
        yield part
    for _rest in pieces:
        pass


class _Flow:
    """Where in the pieces one is."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        self._position = 0

    def skip(self, position: int) -> None:
        while self._position < position:
            self._take(position - self._position)

    def fill(self, part: memoryview) -> None:
        done = 0
        while done < len(part):
            piece = self._take(len(part) - done)
            part[done : done + len(piece)] = piece
            done += len(piece)

    def _take(self, most: int) -> memoryview:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                raise ValueError(f"the bytes end at {self._position}")
            self._rest = piece
        piece, self._rest = self._rest[:most], self._rest[most:]
        self._position += len(piece)
        return piece


@dataclass(slots=True)
class Band:
    """One spill file.

    Attributes:
        path: where it is.
        span: canonical bytes of the tensor that it holds.
        cells: chunks that nobody has begun to decode.
        left: bytes that no move has read.
        running: chunks that are being decoded.
        error: why it could not be made.
    """

    path: Path
    span: Span
    cells: Iterator[Region]
    left: int
    running: int = 0
    error: BaseException | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self) -> Region | None:
        """A chunk to decode; None where none is left or the band has failed."""
        with self.changed:
            cell = None if self.error else next(self.cells, None)
            self.running += cell is not None
            return cell

    def done(self, error: BaseException | None) -> None:
        """A chunk that was taken is decoded, or failed."""
        with self.changed:
            self.running -= 1
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, stopped: threading.Event) -> None:
        """Until all of it is there; raises what went wrong."""
        with self.changed:
            while self.running and not self.error:
                self.changed.wait(0.2)
                if stopped.is_set():
                    raise StoppedError
        if self.error:
            raise self.error
