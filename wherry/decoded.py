"""Decoded: source tensors that do not lie raw, as files of canonical bytes, each decoded once.

A layout takes regions of a tensor that no chunk grid was made for; taking them out of compressed chunks would decode
every chunk again and again. So a tensor is decoded, chunk by chunk and in bounded memory, when the source is digested
(its bytes are hashed on their way into the file) or when the first region of it is asked for. Where its chunks hold
short runs only, the file has them as they were decoded (`stored_boxes`). The files go when the space for them is
needed, least recently used first, and with the view.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from wherry import dtypes, stored_boxes, threads
from wherry.band import StoppedError
from wherry.digest import LeafHasher
from wherry.errors import storage_error
from wherry.format import Extent, Reader, StreamingReader
from wherry.move import cells
from wherry.mover import read_span
from wherry.output import as_bytes
from wherry.placing import place
from wherry.raw_region import fill_region
from wherry.regions import RegionReader
from wherry.spill import FOLDER_VARIABLE
from wherry.staging import PREFIX
from wherry.stored_boxes import StoredBox
from wherry.tensorspec import Span, row_bands

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from wherry.keypath import KeyPath
    from wherry.tensorspec import Region, TensorSpec

SMALL = 1 << 20  # decoding so much again costs less than keeping it
_BAND = 8 << 20
_MOST = 16 << 30  # bytes of files that nobody reads at the moment


class Decoded:
    """The decoded tensors of one source; used from several threads."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._making: dict[KeyPath, threading.Lock] = {}
        self._files: OrderedDict[KeyPath, int] = OrderedDict()  # bytes of each, least recently used first
        self._users: dict[KeyPath, int] = {}
        self._boxes: dict[KeyPath, tuple[StoredBox, ...]] = {}
        self._stopped = threading.Event()

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with the canonical bytes of a region.

        Raises:
            DamagedError: a chunk is missing or contradicts itself.
            StorageError: the file could not be written.
        """
        with self._at(spec) as path:
            boxes = self._boxes.get(spec.path)
            size = spec.nbytes if boxes is None else path.stat().st_size
            extents = (Extent(str(path), 0, size),)

            def read(at: int, part: memoryview) -> None:
                read_span(extents, Span(at, at + len(part)), part, spec)

            if boxes is None:
                fill_region(spec, region, read, buffer)
            else:
                stored_boxes.fill(spec, region, boxes, read, buffer)

    @contextmanager
    def _at(self, spec: TensorSpec) -> Generator[Path]:
        """The file of a tensor, which stays while the block runs."""
        with self._lock:
            self._users[spec.path] = self._users.get(spec.path, 0) + 1
            making = self._making.setdefault(spec.path, threading.Lock())
        try:
            with making:
                path = self._made(spec)
            yield path
        finally:
            with self._lock:
                self._users[spec.path] -= 1

    def digests(
        self, specs: Iterable[TensorSpec], took: Callable[[int, str], None]
    ) -> dict[KeyPath, LeafHasher]:
        """Decode tensors, each by one thread and the largest first; see DigestingReader.

        Raises: what `fill` does.
        """

        def one(spec: TensorSpec) -> LeafHasher | None:
            hasher = self._digest(spec)
            if hasher is not None:
                took(spec.nbytes, spec.name)
            return hasher

        order = sorted(specs, key=lambda spec: -spec.nbytes)
        with threads.executor(threads.worker_count()) as executor:
            try:
                found = list(executor.map(one, order))
            except BaseException:
                self._stopped.set()
                executor.shutdown(cancel_futures=True)
                raise
        return {hasher.spec.path: hasher for hasher in found if hasher is not None}

    def _digest(self, spec: TensorSpec) -> LeafHasher | None:
        """The hashed leaves of a tensor that was decoded now, in order; None else."""
        inorder = _InOrder(spec)
        with self._lock:
            making = self._making.setdefault(spec.path, threading.Lock())
        with making:
            self._made(spec, inorder)
        return inorder.hasher if inorder.hasher and inorder.position == spec.nbytes else None

    def close(self) -> None:
        """Remove all files."""
        with self._lock:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            self._files.clear()

    def _made(self, spec: TensorSpec, inorder: _InOrder | None = None) -> Path:
        with self._lock:
            path = self._place(spec)
            if spec.path in self._files:
                self._files.move_to_end(spec.path)
                return path
            self._make_room(spec.nbytes)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                self._decode(spec, descriptor, inorder)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise storage_error(error, str(path)) from error
        with self._lock:
            self._files[spec.path] = spec.nbytes
        return path

    def _decode(self, spec: TensorSpec, descriptor: int, inorder: _InOrder | None) -> None:
        scattered = stored_boxes.scattered(spec)

        def write(data: memoryview, offset: int) -> None:
            if self._stopped.is_set():
                raise StoppedError
            if inorder is not None and not scattered:
                inorder.take(data, offset)
            while data:
                done = os.pwrite(descriptor, data, offset)
                data, offset = data[done:], offset + done

        blocks = (block for cell in self._cells(spec) for block in self._blocks(spec, cell))
        if scattered:
            self._boxes[spec.path] = tuple(_one_by_one(blocks, write))
            return
        for region, pieces in blocks:
            place(spec, region, pieces, write)

    def _cells(self, spec: TensorSpec) -> Iterator[Region]:
        if spec.chunks is not None:
            return cells(spec.whole, spec.chunks)
        return (region for region, _span in row_bands(spec, _BAND, (1,) * len(spec.shape)))

    def _blocks(self, spec: TensorSpec, cell: Region) -> Iterator[tuple[Region, Iterator[memoryview]]]:
        reader = self._reader
        if spec.chunks is not None and isinstance(reader, StreamingReader) and reader.held(spec, cell):
            yield from ((block.region, block.pieces) for block in reader.stream(spec, cell))
        else:
            yield cell, iter([as_bytes(reader.read(spec, cell))])

    def _place(self, spec: TensorSpec) -> Path:
        if self._folder is None:
            self._folder = Path(
                tempfile.mkdtemp(prefix=f"{PREFIX}spill-", dir=os.environ.get(FOLDER_VARIABLE))
            )
        number = list(self._making).index(spec.path)
        return self._folder / str(number)

    def _make_room(self, nbytes: int) -> None:
        idle = [path for path in self._files if not self._users.get(path)]
        held = sum(self._files.values()) + nbytes
        for path in idle:
            if held <= _MOST:
                return
            held -= self._files.pop(path)
            assert self._folder is not None
            (self._folder / str(list(self._making).index(path))).unlink(missing_ok=True)


class _InOrder:
    """Hashes a tensor's bytes as long as they come one after another; chunks of inner axes do not."""

    def __init__(self, spec: TensorSpec) -> None:
        self.hasher: LeafHasher | None = LeafHasher(spec)
        self.position = 0

    def take(self, data: memoryview, offset: int) -> None:
        """The bytes at an offset."""
        if self.hasher is not None and offset == self.position:
            self.hasher.update(offset, data)
            self.position += len(data)
        else:
            self.hasher = None


class CanonicalReader:
    """A source's reader through which every tensor can be had by region; see Reader and RegionReader."""

    def __init__(self, reader: Reader, decoded: Decoded) -> None:
        self._reader = reader
        self._decoded = decoded
        self.read = reader.read
        self.read_bytes = reader.read_bytes
        self.extents = reader.extents
        self.absent = reader.absent
        self.companion = reader.companion
        self.members = reader.members

    def cheap(self, spec: TensorSpec) -> bool:
        """See RegionReader: what does not lie raw and is too large to be decoded twice."""
        large = spec.nbytes > SMALL and not dtypes.opaque(spec.dtype)
        return large and self._reader.extents(spec) is None

    def digests(
        self, specs: Iterable[TensorSpec], took: Callable[[int, str], None]
    ) -> dict[KeyPath, LeafHasher]:
        """See DigestingReader."""
        wanted = [spec for spec in specs if self.cheap(spec)]
        reader = self._reader
        if isinstance(reader, RegionReader):
            wanted = [spec for spec in wanted if not reader.cheap(spec)]
        return self._decoded.digests(wanted, took)

    def region(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """See RegionReader."""
        reader = self._reader
        if isinstance(reader, RegionReader) and reader.cheap(spec):
            reader.region(spec, region, buffer)
            return
        self._decoded.fill(spec, region, buffer)

    def close(self) -> None:
        """See Reader; both are closed by who made them."""


def _one_by_one(
    blocks: Iterable[tuple[Region, Iterator[memoryview]]], write: Callable[[memoryview, int], None]
) -> Iterator[StoredBox]:
    """Write blocks one behind the other; where each begins."""
    end = 0
    for region, pieces in blocks:
        start = end
        for piece in pieces:
            write(piece, end)
            end += len(piece)
        yield StoredBox(region, start)
