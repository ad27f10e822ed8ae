"""Decodes whole encoded source tensors, each once, for views that read arbitrary regions of them.

A layout reads regions of a tensor that do not match its chunk grid; reading them from compressed chunks would decode
every chunk many times. So a tensor is decoded on first use, chunk by chunk and in bounded memory, and hashed meanwhile
if requested. Small tensors that are read once stay in memory, until every element was read or newer ones need the
space; others are written to spill files. If the chunks hold only short runs, the file stores them as they were decoded
(`boxes`). Files are removed when space is needed, least recently used first, and when the view is closed.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from wherry import kernels
from wherry.core import dtypes
from wherry.core.digest import LeafHasher
from wherry.core.tensorspec import Span, region_shape, row_bands
from wherry.formats.contents import Computed, ContentsOver, Stored
from wherry.mover import boxes as stored_boxes
from wherry.mover.boxes import StoredBox
from wherry.mover.move import Way, cells
from wherry.mover.output import as_array
from wherry.mover.read import blocks_of_cell, read_array
from wherry.mover.regions import fill_region, place
from wherry.mover.spill import SharedWork, Spill
from wherry.storage.direct import reading

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Iterator, Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.leaf_values import LeafValues
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.contents import Access, Contents
    from wherry.mover.spill import SpillFile, Write


SMALL = 1 << 20  # bytes; decoding a smaller tensor again is cheaper than keeping it
_MOST = 16 << 30  # bytes of files that are not in use
_MOST_OPEN = (
    48 << 20
)  # bytes for open leaves; beyond, those of tensors that are hashed by regions are put aside
_MOST_IN_MEMORY = 64 << 20  # bytes of tensors that are not read yet


@dataclass(slots=True, kw_only=True)
class _HeldTensor(SharedWork):
    """A tensor in memory, and the number of its elements that are not read yet."""

    array: np.ndarray
    left: int = 0


class DecodedReader(ContentsOver):
    """A source of which any region of every large tensor can be read; used from several threads.

    Attributes:
        stopped: ends decoding once it is set.
        hashed: the leaves of tensors that were hashed while they were decoded, if hashing is enabled.
    """

    def __init__(
        self,
        reader: Contents,
        *,
        soon: Collection[KeyPath] = (),
        algorithms: tuple[str, ...] = (),
        stopped: threading.Event | None = None,
    ) -> None:
        """Decode nothing yet.

        Args:
            reader: of the source; its owner closes it.
            soon: key paths of small tensors that will be read once and soon; they are decoded into memory.
            algorithms: with which tensors are hashed while they are decoded; see LeafHasher. By default they are not.
            stopped: ends decoding once it is set.
        """
        self.base = reader
        self._algorithms = algorithms
        self._soon = frozenset(soon)
        self._found: dict[KeyPath, Access] = {}
        self._decoded: set[KeyPath] = set()
        self._spill = Spill(stopped=stopped, most=_MOST)
        self.stopped = self._spill.stopped
        self._memory: OrderedDict[KeyPath, _HeldTensor] = OrderedDict()
        self._lock = threading.Lock()
        self.hashed: dict[KeyPath, LeafHasher] | None = {} if algorithms else None
        self._gathered: dict[KeyPath, LeafHasher] = {}
        self._aside: dict[KeyPath, list[LeafValues]] = {}
        self._taking: Counter[KeyPath] = Counter()  # threads that hash a region of a tensor
        self._gathering: set[KeyPath] = set()

    def access(self, spec: TensorSpec) -> Access:
        """Large tensors are read by region; small ones are decoded again for each read."""
        known = self._found.get(spec.path)
        if known is not None:
            return known
        access = self.base.access(spec)
        if Way.of(access).gridded:
            if spec.nbytes <= SMALL or dtypes.opaque(spec.dtype):
                return access
            access = Computed(partial(self._fill, spec))
            self._decoded.add(spec.path)
        self._found[spec.path] = access
        return access

    def decodes(self, spec: TensorSpec) -> bool:
        """Whether a tensor is decoded as a whole before regions of it are read."""
        self.access(spec)
        return spec.path in self._decoded

    def keeps(self, spec: TensorSpec) -> bool:
        """Whether it is decoded into memory."""
        return spec.path in self._soon and self.decodes(spec)

    def _fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with a region of a tensor that is decoded as a whole.

        Raises:
            DamagedError: a chunk is missing or corrupt.
            StorageError: the file could not be written.
            StoppedError: decoding was stopped.
        """
        if self.keeps(spec):
            as_array(buffer, spec.dtype, region_shape(region))[...] = self.look(spec, region)
            return
        with self._file(spec) as file, reading(file.path) as read:
            if file.boxes is None:
                fill_region(spec, region, read, buffer)
            else:
                stored_boxes.fill(spec, region, file.boxes, read, buffer)

    def look(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """A region of a tensor that is decoded into memory; not a copy, so it must not be changed.

        Raises: what reading it does.
        """
        held = self._in_memory(spec)
        with self._lock:
            held.left -= math.prod(region_shape(region))
            if held.left <= 0:
                self._memory.pop(spec.path, None)
        return held.array[region]

    def gather(self, paths: Collection[KeyPath]) -> None:
        """Hash tensors of which a view takes regions while it does, where that can be done."""
        self._gathering = set(paths)

    def take_region(self, spec: TensorSpec, region: Region, data: memoryview) -> None:
        """Hash a region that was read for a view, where its tensor is stored as it is.

        Leaves that a container's checksum covers are read in order, so that it is compared too.
        """
        with self._lock:
            if spec.path not in self._gathering:
                return
            hasher = self._gathered.setdefault(spec.path, LeafHasher(spec, self._algorithms))
            self._taking[spec.path] += 1
        access = self.access(spec)
        if isinstance(access, Stored):
            as_stored = not any(one.checksum for one in access.extents)
        else:
            as_stored = not self.decodes(spec)
        counts = as_stored and hasher.update_box(region, data)
        with self._lock:
            self._taking[spec.path] -= 1
            if not counts:
                self._give_up(spec.path)
            elif kernels.open_bytes() > _MOST_OPEN:
                for path in [path for path in self._gathered if not self._taking[path]]:
                    self._put_aside(path)

    def _give_up(self, path: KeyPath) -> None:
        """Leave a tensor to be read again in order; the caller has the lock."""
        self._gathering.discard(path)
        self._gathered.pop(path, None)
        self._aside.pop(path, None)

    def _put_aside(self, path: KeyPath) -> None:
        """Keep what has come of a tensor as values, which take less memory; the caller has the lock."""
        values = self._gathered[path].values()
        if values is None:
            self._give_up(path)
        else:
            self._aside.setdefault(path, []).append(values)
            del self._gathered[path]

    def take_gathered(self, specs: Mapping[KeyPath, TensorSpec]) -> Iterator[tuple[KeyPath, LeafHasher]]:
        """What was hashed of tensors region by region, one tensor after the other; each is given once.

        Args:
            specs: the tensors.
        """
        for path in sorted({*self._gathered, *self._aside}):
            hasher = self._gathered.pop(path, None) or LeafHasher(specs[path], self._algorithms)
            for values in self._aside.pop(path, ()):
                hasher.take(values)
            yield path, hasher

    def gathers(self, path: KeyPath) -> bool:
        """Whether the regions of a tensor are hashed while they are taken."""
        return path in self._gathering

    def prepare(self, spec: TensorSpec) -> None:
        """Decode a tensor that is not decoded yet, or not hashed yet if it must be.

        Raises: what reading it does.
        """
        if self.hashed is not None and spec.path in self.hashed:
            return
        if self.keeps(spec):
            self._in_memory(spec)
            return
        with self._file(spec):
            pass

    def drop(self, paths: Collection[KeyPath]) -> None:
        """Remove tensors that are not needed any more; their memory pages are reused."""
        with self._lock:
            for path in paths:
                self._memory.pop(path, None)
        self._spill.drop([(path, 0) for path in paths])

    def close(self) -> None:
        """Remove all files; the owner of the source closes it."""
        self._spill.close()

    @contextmanager
    def _file(self, spec: TensorSpec) -> Generator[SpillFile]:
        """The file of a tensor, which stays while the block runs."""

        def whole() -> Iterator[Region]:  # decoded by one thread, so that its bytes come in order
            return iter([spec.whole])

        def decode(file: SpillFile, _whole: Region) -> None:
            with self._spill.writing(file) as write:
                if stored_boxes.is_scattered(spec):
                    file.boxes = tuple(_one_by_one(blocks_of(self.base, spec), write))
                else:
                    self._in_place(spec, write)

        with self._spill.using((spec.path, 0), Span(0, spec.nbytes), whole, decode) as file:
            yield file

    def _in_memory(self, spec: TensorSpec) -> _HeldTensor:
        import numpy as np

        with self._lock:
            held = self._memory.get(spec.path)
            if held is None:
                array = np.empty(spec.shape, dtypes.numpy_dtype(spec.dtype))
                held = self._memory[spec.path] = _HeldTensor(iter([spec.whole]), array=array)
        try:
            held.complete(lambda _whole: self._decode_into(spec, held), self.stopped)
        except BaseException:
            with self._lock:
                self._memory.pop(spec.path, None)
            raise
        with self._lock:
            nbytes = sum(one.array.nbytes for one in self._memory.values())
            while nbytes > _MOST_IN_MEMORY and len(self._memory) > 1:
                nbytes -= self._memory.popitem(last=False)[1].array.nbytes
        return held

    def _decode_into(self, spec: TensorSpec, held: _HeldTensor) -> None:
        """Decode into memory, and hash the tensor afterwards if its bytes did not come in order."""
        memory = held.array.reshape(-1).view("u1").data

        def write(data: memoryview, offset: int) -> None:
            memory[offset : offset + len(data)] = data

        if stored_boxes.is_scattered(spec):
            array = as_array(memory, spec.dtype, spec.shape)
            for cell in cells(spec.whole, spec.chunks or spec.shape):
                array[cell] = read_array(self.base, spec, cell)
        else:
            self._in_place(spec, self._spill.until_stopped(write))
        held.left += spec.size * (1 if self.hashed is None or spec.path in self.hashed else 2)

    def _in_place(self, spec: TensorSpec, write: Write) -> None:
        """Decode a tensor, write each run of bytes to its place in the tensor, and hash it meanwhile."""
        decoded = DecodedHash(spec, self._algorithms)

        def take(data: memoryview, offset: int) -> None:
            write(data, offset)
            if self.hashed is not None:
                decoded.take(data, offset)

        for region, pieces in blocks_of(self.base, spec):
            place(spec, region, pieces, take)
        if self.hashed is not None and decoded.whole is not None:
            self.hashed[spec.path] = decoded.whole


def _one_by_one(blocks: Iterable[tuple[Region, Iterator[memoryview]]], write: Write) -> Iterator[StoredBox]:
    """Write blocks one after another; yields the offset of each."""
    end = 0
    for region, pieces in blocks:
        start = end
        for piece in pieces:
            write(piece, end)
            end += len(piece)
        yield StoredBox(region, start)


_BAND = 8 << 20


def blocks_of(reader: Contents, spec: TensorSpec) -> Iterator[tuple[Region, Iterator[memoryview]]]:
    """The boxes in which a tensor is decoded, each as pieces of canonical bytes that are valid until the next."""
    access = reader.access(spec)
    if spec.chunks is not None:
        parts, in_pieces = cells(spec.whole, spec.chunks), None
    else:
        bands = row_bands(spec, _BAND, (1,) * len(spec.shape))
        parts, in_pieces = (region for region, _span in bands), False
    for cell in parts:
        blocks = blocks_of_cell(access, spec, cell, in_pieces=in_pieces)
        yield from ((block.region, block.pieces) for block in blocks)


class DecodedHash:
    """Hashes a tensor's bytes while they come one after another, or in any order where that can be done."""

    def __init__(self, spec: TensorSpec, algorithms: tuple[str, ...]) -> None:
        self._hasher: LeafHasher | None = LeafHasher(spec, algorithms)
        self._position = 0

    def take(self, data: memoryview, offset: int) -> None:
        """Add the bytes at an offset."""
        if self._hasher is None:
            return
        if offset == self._position or self._hasher.takes_anywhere(len(data)):
            self._hasher.update(offset, data)
            self._position = offset + len(data)
        else:
            self._hasher = None

    @property
    def whole(self) -> LeafHasher | None:
        """The hasher with all leaves, or None if bytes came in another order than it takes."""
        found = self._hasher
        return found if found is not None and found.done() else None
