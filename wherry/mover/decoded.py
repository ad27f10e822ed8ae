"""Decoded: source tensors that do not lie raw, as files of canonical bytes, each decoded once.

A layout takes regions of a tensor that no chunk grid was made for; taking them out of compressed chunks would decode
every chunk again and again. So a tensor is decoded, chunk by chunk and in bounded memory, when it is asked for, and
hashed on the way where that is wanted. Small ones that are wanted once stay in memory (`kept`), others in files.
Where its chunks hold short runs only, the file has them as they were decoded (`boxes`). The files go when the
space for them is needed, least recently used first, and with the view.

Decoding of a whole tensor: its blocks one after another, and its digest where they come in order.
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

from wherry.core import dtypes
from wherry.core.digest import LeafHasher
from wherry.core.tensorspec import row_bands
from wherry.formats.format import Reader, StreamingReader
from wherry.formats.reader import RegionReader
from wherry.mover import boxes as stored_boxes
from wherry.mover.boxes import StoredBox
from wherry.mover.kept import Kept
from wherry.mover.move import cells
from wherry.mover.output import as_array, as_bytes
from wherry.mover.regions import fill_region, place
from wherry.mover.source import FOLDER_VARIABLE
from wherry.runtime.threads import StoppedError
from wherry.storage.direct import reading, writing
from wherry.storage.folders import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.format import Reader


SMALL = 1 << 20  # decoding so much again costs less than keeping it
_MOST = 16 << 30  # bytes of files that nobody reads at the moment


class Decoded:
    """The decoded tensors of one source; used from several threads.

    Attributes:
        stopped: ends decoding once it is set; who decodes for a crew gives it the crew's.
        kept: key paths of small tensors that are wanted once and soon: they are decoded into memory.
        hashed: the leaves of tensors that came in order, if they are to be hashed.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._making: dict[KeyPath, threading.Lock] = {}
        self._files: OrderedDict[KeyPath, int] = OrderedDict()  # bytes of each, least recently used first
        self._users: dict[KeyPath, int] = {}
        self._numbers: dict[KeyPath, int] = {}
        self._boxes: dict[KeyPath, tuple[StoredBox, ...]] = {}
        self._memory = Kept(self._decode_into)
        self.stopped = threading.Event()
        self.kept: set[KeyPath] = set()
        self.hashed: dict[KeyPath, LeafHasher] | None = None

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with the canonical bytes of a region.

        Raises:
            DamagedError: a chunk is missing or contradicts itself.
            StorageError: the file could not be written.
        """
        if spec.path in self.kept:
            buffer[:] = as_bytes(self._memory.take(spec, region).copy(order="C"))
            return
        with self._at(spec) as path, reading(path) as read:
            boxes = self._boxes.get(spec.path)
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

    def array(self, spec: TensorSpec, region: Region) -> np.ndarray | None:
        """A region of a tensor that is kept in memory, without a copy; None of others.

        Raises: what `fill` does.
        """
        return self._memory.take(spec, region) if spec.path in self.kept else None

    def prepare(self, spec: TensorSpec) -> None:
        """Decode a tensor that was not decoded, and if it is to be hashed, not hashed yet.

        Raises: what `fill` does.
        """
        if self.hashed is not None and spec.path in self.hashed:
            return
        if spec.path in self.kept:
            self._memory.prepare(spec)
            return
        with self._at(spec):
            pass

    def drop(self, paths: Collection[KeyPath]) -> None:
        """Remove tensors that nobody will ask for; the pages that held them are used again."""
        self._memory.drop(paths)
        with self._lock:
            for path in paths:
                if path in self._files and not self._users.get(path):
                    self._remove(path)

    def close(self) -> None:
        """Remove all files."""
        with self._lock:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            self._files.clear()

    def _made(self, spec: TensorSpec) -> Path:
        with self._lock:
            path = self._place(spec)
            if spec.path in self._files:
                self._files.move_to_end(spec.path)
                return path
            self._make_room(spec.nbytes)
        with writing(path) as write:
            self._decode(spec, write)
        with self._lock:
            self._files[spec.path] = spec.nbytes
        return path

    def _decode(self, spec: TensorSpec, write: Callable[[memoryview, int], None]) -> None:
        if stored_boxes.scattered(spec):
            self._boxes[spec.path] = tuple(
                _one_by_one(blocks_of(self._reader, spec), self._unless_stopped(write))
            )
        else:
            self._in_place(spec, write)

    def _decode_into(self, spec: TensorSpec, memory: memoryview) -> int:
        """Decode into memory; once more than it is carried, where its bytes did not come in order, it is hashed."""

        def write(data: memoryview, offset: int) -> None:
            memory[offset : offset + len(data)] = data

        if stored_boxes.scattered(spec):
            array = as_array(memory, spec.dtype, spec.shape)
            for cell in cells(spec.whole, spec.chunks or spec.shape):
                array[cell] = self._reader.read(spec, cell)
        else:
            self._in_place(spec, write)
        return 1 if self.hashed is None or spec.path in self.hashed else 2

    def _in_place(self, spec: TensorSpec, write: Callable[[memoryview, int], None]) -> None:
        """Decode a tensor, each run of bytes to where it lies in it, and hash it on the way."""
        inorder = InOrder(spec)

        def take(data: memoryview, offset: int) -> None:
            if self.hashed is not None:
                inorder.take(data, offset)
            write(data, offset)

        for region, pieces in blocks_of(self._reader, spec):
            place(spec, region, pieces, self._unless_stopped(take))
        if self.hashed is not None and inorder.whole is not None:
            self.hashed[spec.path] = inorder.whole

    def _unless_stopped(self, write: Callable[[memoryview, int], None]) -> Callable[[memoryview, int], None]:
        def act(data: memoryview, offset: int) -> None:
            if self.stopped.is_set():
                raise StoppedError
            write(data, offset)

        return act

    def _place(self, spec: TensorSpec) -> Path:
        if self._folder is None:
            self._folder = Path(
                tempfile.mkdtemp(prefix=f"{PREFIX}spill-", dir=os.environ.get(FOLDER_VARIABLE))
            )
        return self._folder / str(self._numbers.setdefault(spec.path, len(self._numbers)))

    def _make_room(self, nbytes: int) -> None:
        idle = [path for path in self._files if not self._users.get(path)]
        held = sum(self._files.values()) + nbytes
        for path in idle:
            if held <= _MOST:
                return
            held -= self._remove(path)

    def _remove(self, path: KeyPath) -> int:
        assert self._folder is not None
        (self._folder / str(self._numbers[path])).unlink(missing_ok=True)
        self._boxes.pop(path, None)
        return self._files.pop(path)


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

    def decodes(self, spec: TensorSpec) -> bool:
        """Whether a tensor is decoded as a whole before regions of it are read."""
        reader = self._reader
        return self.cheap(spec) and not (isinstance(reader, RegionReader) and reader.cheap(spec))

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


_BAND = 8 << 20


def blocks_of(reader: Reader, spec: TensorSpec) -> Iterator[tuple[Region, Iterator[memoryview]]]:
    """The boxes that a tensor is decoded in, each as pieces of canonical bytes that are valid until the next."""
    for cell in _cells(spec):
        if spec.chunks is not None and isinstance(reader, StreamingReader) and reader.held(spec, cell):
            yield from ((block.region, block.pieces) for block in reader.stream(spec, cell))
        else:
            yield cell, iter([as_bytes(reader.read(spec, cell))])


def _cells(spec: TensorSpec) -> Iterator[Region]:
    if spec.chunks is not None:
        return cells(spec.whole, spec.chunks)
    return (region for region, _span in row_bands(spec, _BAND, (1,) * len(spec.shape)))


class InOrder:
    """Hashes a tensor's bytes as long as they come one after another; chunks of inner axes do not."""

    def __init__(self, spec: TensorSpec) -> None:
        self._hasher: LeafHasher | None = LeafHasher(spec)
        self._position = 0

    def take(self, data: memoryview, offset: int) -> None:
        """The bytes at an offset."""
        if self._hasher is not None and offset == self._position:
            self._hasher.update(offset, data)
            self._position += len(data)
        else:
            self._hasher = None

    @property
    def whole(self) -> LeafHasher | None:
        """The hashed leaves, if all bytes came in order."""
        found = self._hasher
        return found if found is not None and self._position == found.spec.nbytes else None
