"""Decoded tensors: what is decoded once and read as often as needed, in memory or in temporary files.

**Spill** has temporary files of decoded canonical bytes. A file is created when it is first needed, by all workers
that wait for it together: each takes a cell that no other has begun, and decodes it. It is removed once all of it was
read, or when it is dropped, or when space is needed and no worker reads it. Files that remain after a pass that ends
early are removed with the folder.

**DecodedReader** decodes whole encoded tensors, each once, for views that read arbitrary regions of them. A layout
reads regions of a tensor that do not match its chunk grid; reading them from compressed chunks would decode every chunk
many times. So a tensor is decoded on first use, chunk by chunk and in bounded memory, and hashed meanwhile if needed.
Small tensors that are read once stay in memory, until every element was read or newer ones need the space; others are
written to spill files. Files are removed when space is needed, least recently used first, and when the view is closed.

Chunks that are cut along inner axes hold short runs of the tensor's bytes. Writing each run to its place in the tensor
takes a call for a few kilobytes (17 µs each, 3.6 s of processor time for 1 GB). So such a tensor is stored as the boxes
in which it was decoded, one after another, and a region is read as parts of boxes, which are long if it has many rows.

**Parts** reads regions as arrays, for readers that compute: they take a region, turn it into something else, and need
it no more. Threads that are done give their memory back, so that there is as much of it as regions are made at a time,
however many threads there are. At the end of a pass `drop_free_parts` returns it to the system. Large regions lie in
memory of their own, outside of malloc's, where freed blocks of such sizes leave gaps.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakSet

from wherry import kernels
from wherry.core import dtypes
from wherry.core.digest import LeafHasher, LeafValues
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import (
    Region,
    Span,
    TensorSpec,
    region_shape,
    region_within,
    row_bands,
    shared_region,
)
from wherry.core.threads import StoppedError
from wherry.errors import storage_error
from wherry.formats.format import Access, Block, Computed, Contents, ContentsOver, Extent, Stored
from wherry.mover.move import Way, cells
from wherry.mover.output import as_array
from wherry.mover.pool import map_memory
from wherry.mover.read import (
    RawBytes,
    Read,
    blocks_of_cell,
    fill,
    fill_region,
    place,
    read_array,
    region_bytes,
)
from wherry.store.folders import PREFIX, SPILL_VARIABLE
from wherry.store.local_store import LocalStore
from wherry.store.location import Location
from wherry.store.open_file import reading, writing
from wherry.target.janitor import forget, note

if TYPE_CHECKING:
    import mmap

    import numpy as np


Key: TypeAlias = tuple[KeyPath, int]
# Takes bytes and their offset.
Write: TypeAlias = Callable[[memoryview, int], None]


_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class SharedWork:
    """Work that several workers share.

    Attributes:
        cells: parts that no worker has begun.
        running: number of parts in progress.
        error: why it failed; None if it did not.
    """

    cells: Iterator[Region]
    running: int = 0
    error: BaseException | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def complete(self, make: Callable[[Region], None], stopped: threading.Event) -> None:
        """Make parts that no other worker makes, and wait for the rest.

        Raises:
            StoppedError: `stopped` was set meanwhile.
            BaseException: the error of a part, in this or another worker.
        """
        while (cell := self._take()) is not None:
            try:
                make(cell)
            except BaseException as error:
                with self.changed:
                    self.error = self.error or error
                raise
            finally:
                with self.changed:
                    self.running -= 1
                    self.changed.notify_all()
        with self.changed:
            while self.running and not self.error:
                self.changed.wait(_LOOK_SECONDS)
                if stopped.is_set():
                    raise StoppedError
        if self.error:
            raise self.error

    def _take(self) -> Region | None:
        with self.changed:
            cell = None if self.error else next(self.cells, None)
            self.running += cell is not None
            return cell


@dataclass(slots=True, kw_only=True)
class SpillFile(SharedWork):
    """One file, or an array in memory in its place.

    Attributes:
        span: canonical bytes of the tensor that it holds.
        left: number of bytes that are not read yet.
        path: its path; None in memory.
        array: the decoded tensor in memory.
        users: number of workers that read it now.
        boxes: the boxes that it stores as they were decoded; None if the bytes are ordered as in the tensor.
    """

    span: Span
    left: int
    path: Path | None
    array: np.ndarray | None = None
    users: int = 0
    boxes: tuple[StoredBox, ...] | None = None


class Spill:
    """The files of one source; used from several threads.

    Attributes:
        stopped: ends all writing once it is set.
    """

    def __init__(
        self,
        folder: Path | None = None,
        stopped: threading.Event | None = None,
        most: int | None = None,
        *,
        in_memory: bool = False,
    ) -> None:
        """Create an empty spill; the folder is created with the first file.

        Args:
            folder: for the files; a temporary folder (below `WHERRY_SPILL`, if that is set) by default.
            stopped: ends all writing.
            most: limit of their total size, beyond which unused files are removed, least recently used first.
            in_memory: whether there are arrays instead of files.
        """
        self._in_memory = in_memory
        self.stopped = stopped or threading.Event()
        self._folder = folder
        self._made = False
        self._most = most
        self._numbers = count()
        self._files: OrderedDict[Key, SpillFile] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def using(
        self,
        key: Key,
        span: Span,
        cells: Callable[[], Iterator[Region]],
        decode: Callable[[SpillFile, Region], None],
    ) -> Generator[SpillFile]:
        """A complete file, which is kept while the block runs.

        Args:
            key: the tensor, and the offset in it at which the file begins.
            span: canonical bytes of the tensor that it holds.
            cells: the parts of the file.
            decode: writes one part.

        Raises:
            StoppedError: the spill was stopped.
            WherryError: what `decode` raises.
        """
        with self._lock:
            file = self._files.get(key)
            if file is None:
                self._make_room(span.nbytes)
                path = None if self._in_memory else self._place() / str(next(self._numbers))
                file = self._files[key] = SpillFile(cells(), path=path, span=span, left=span.nbytes)
            self._files.move_to_end(key)
            file.users += 1
        try:
            self._complete(key, file, decode)
            yield file
        finally:
            with self._lock:
                file.users -= 1

    @contextmanager
    def writing(self, file: SpillFile) -> Generator[Write]:
        """A function that writes bytes at an offset of a file, until the spill is stopped."""
        assert file.path is not None
        with writing(file.path) as write:
            yield self.until_stopped(write)

    def until_stopped(self, write: Write) -> Write:
        """Wrap a write function, so that it raises StoppedError once the spill is stopped."""

        def act(data: memoryview, offset: int) -> None:
            self.check()
            write(data, offset)

        return act

    def check(self) -> None:
        """Raise StoppedError if the spill was stopped."""
        if self.stopped.is_set():
            raise StoppedError

    def read(self, key: Key, nbytes: int) -> None:
        """Count bytes of a file that were read for the last time; a file that was read completely is removed."""
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                file.left -= nbytes
                if file.left <= 0:
                    self._remove(key)

    def drop(self, keys: Collection[Key]) -> None:
        """Remove files that are not needed any more; their memory pages are reused."""
        with self._lock:
            for key in keys:
                if key in self._files and not self._files[key].users:
                    self._remove(key)

    def close(self) -> None:
        """Remove all files."""
        with self._lock:
            if self._made and self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                forget(self._folder)
            self._made = False
            self._files.clear()

    def _complete(self, key: Key, file: SpillFile, decode: Callable[[SpillFile, Region], None]) -> None:
        try:
            file.complete(lambda cell: decode(file, cell), self.stopped)
        except BaseException:
            with self._lock:  # so that a later request tries again
                if self._files.get(key) is file:
                    del self._files[key]
            raise

    def _make_room(self, nbytes: int) -> None:
        if self._most is None:
            return
        held = nbytes + sum(file.span.nbytes for file in self._files.values())
        for key in [key for key, file in self._files.items() if not file.users]:
            if held <= self._most:
                return
            held -= self._files[key].span.nbytes
            self._remove(key)

    def _remove(self, key: Key) -> None:
        path = self._files.pop(key).path
        if path is not None:
            path.unlink(missing_ok=True)

    def _place(self) -> Path:
        if not self._made:
            try:
                self._folder = self._folder or Path(
                    tempfile.mkdtemp(prefix=f"{PREFIX}spill-", dir=os.environ.get(SPILL_VARIABLE))
                )
                note(self._folder)
                self._folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise storage_error(error, str(self._folder or os.environ.get(SPILL_VARIABLE))) from error
            self._made = True
        assert self._folder is not None
        return self._folder


_SPILLED = LocalStore()
_SHORT = 256 << 10  # bytes; shorter runs are not written to their place in the tensor
_TOGETHER = 2 << 20  # bytes of a box that are in memory at a time


class StoredBox(NamedTuple):
    """A box of elements and its offset in the file; it may extend beyond the tensor's edge."""

    region: Region
    offset: int


def is_scattered(spec: TensorSpec) -> bool:
    """Whether the chunks of a tensor hold only short runs of its bytes."""
    if spec.chunks is None:
        return False
    axis = len(spec.shape) - 1
    while axis > 0 and spec.chunks[axis] >= spec.shape[axis]:
        axis -= 1
    run = dtypes.canonical_size(spec.dtype, math.prod(spec.chunks[axis:]))
    return axis > 0 and run < _SHORT


def fill_from_boxes(
    spec: TensorSpec, region: Region, boxes: tuple[StoredBox, ...], read: Read, out: memoryview
) -> None:
    """Read a region out of boxes that cover it.

    Args:
        spec: the tensor.
        region: step-1 slices with explicit bounds.
        boxes: disjoint.
        read: fills a buffer from an offset in the file.
        out: receives the region in C order.
    """
    for box in boxes:
        shared = shared_region(region, box.region)
        if shared is None:
            continue
        inside = replace(spec, shape=region_shape(box.region), chunks=None)
        bands = row_bands(replace(spec, shape=region_shape(shared), chunks=None), _TOGETHER)
        for band, _span in bands:
            part = tuple(
                slice(bounds.start + start.start, bounds.stop + start.start)
                for bounds, start in zip(band, shared, strict=True)
            )
            _fill_part(inside, region, box, part, read, out)


def _fill_part(
    inside: TensorSpec, region: Region, box: StoredBox, part: Region, read: Read, out: memoryview
) -> None:
    import numpy as np

    def from_box(offset: int, buffer: memoryview) -> None:
        read(box.offset + offset, buffer)

    wanted = region_within(part, box.region)
    if part == region:
        fill_region(inside, wanted, from_box, out)
        return
    size = dtypes.canonical_size(inside.dtype, 1)
    shape = (*region_shape(part), size)
    held = memoryview(bytearray(math.prod(shape)))
    fill_region(inside, wanted, from_box, held)
    target = np.frombuffer(out, "u1").reshape(*region_shape(region), size)
    target[region_within(part, region)] = np.frombuffer(held, "u1").reshape(shape)


SMALL = 1 << 20  # bytes; decoding a smaller tensor again is cheaper than keeping it
_MOST = 16 << 30  # bytes of files that are not in use
# Bytes for open leaves; beyond, those of tensors that are hashed by regions are put aside.
_MOST_OPEN = 16 << 20
_MOST_IN_MEMORY = 64 << 20  # bytes of tensors that are not read yet


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
        times: int = 1,
        fetches: bool = False,
    ) -> None:
        """Decode nothing yet.

        Args:
            reader: of the source; its owner closes it.
            soon: key paths of small tensors that will be read soon; they are decoded into memory.
            algorithms: with which tensors are hashed while they are decoded; see LeafHasher. By default they are not.
            stopped: ends decoding once it is set.
            times: how often each element is read.
            fetches: whether raw tensors in a remote store are kept like decoded ones, so that they are fetched once.
        """
        self.base = reader
        self._algorithms = algorithms
        self._soon = frozenset(soon)
        self._times, self._fetches = times, fetches
        self._found: dict[KeyPath, Access] = {}
        self._decoded: set[KeyPath] = set()
        self._spill = Spill(stopped=stopped, most=_MOST)
        self.stopped = self._spill.stopped
        self._memory = Spill(stopped=self.stopped, most=_MOST_IN_MEMORY, in_memory=True)
        self._lock = threading.Lock()
        self.hashed: dict[KeyPath, LeafHasher] | None = {} if algorithms else None
        self._gathered: dict[KeyPath, LeafHasher] = {}
        self._aside: dict[KeyPath, LeafValues] = {}
        self._taking: Counter[KeyPath] = Counter()  # threads that hash a region of a tensor
        self._gathering: set[KeyPath] = set()

    def access(self, spec: TensorSpec) -> Access:
        """Large tensors are read by region; small ones are decoded again for each read."""
        known = self._found.get(spec.path)
        if known is not None:
            return known
        access = self.base.access(spec)
        gridded = Way.of(access).gridded
        if gridded and (spec.nbytes <= SMALL or dtypes.opaque(spec.dtype)):
            return access
        if gridded or (self._fetches and _is_fetched(access)):
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
        with self._file(spec) as file:
            assert file.path is not None
            if file.boxes is None:
                whole = Extent(Location(_SPILLED, str(file.path)), 0, spec.nbytes)
                fill_region(spec, region, RawBytes((whole,), spec), buffer)
                return
            with reading(file.path) as read:
                fill_from_boxes(spec, region, file.boxes, read, buffer)

    def look(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """A region of a tensor that is decoded into memory; not a copy, so it must not be changed.

        Raises: what reading it does.
        """
        with self._file(spec) as held:
            assert held.array is not None, "it is decoded"
            array = held.array
            self._memory.read((spec.path, 0), region_bytes(spec, region))
        return array[region]

    def gather(self, paths: Collection[KeyPath]) -> None:
        """Hash tensors while a view reads their regions, where that is possible."""
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
        """Keep the received part of a tensor as values of hashes, which take less memory; the caller has the lock.

        They are joined with those that were put aside before; a complete subtree needs only one value.
        """
        hasher = self._gathered.pop(path)
        if path in self._aside:
            hasher.take(self._aside.pop(path))
        values = hasher.values()
        if values is None:
            self._give_up(path)
        else:
            self._aside[path] = values

    def take_gathered(self, specs: Mapping[KeyPath, TensorSpec]) -> Iterator[tuple[KeyPath, LeafHasher]]:
        """The hashes of tensors that were read region by region, one tensor after the other; each is returned once.

        Args:
            specs: the tensors.
        """
        for path in sorted({*self._gathered, *self._aside}):
            hasher = self._gathered.pop(path, None) or LeafHasher(specs[path], self._algorithms)
            if path in self._aside:
                hasher.take(self._aside.pop(path))
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
        with self._file(spec):
            pass

    def drop(self, paths: Collection[KeyPath]) -> None:
        """Remove tensors that are not needed any more; their memory pages are reused."""
        for one in (self._memory, self._spill):
            one.drop([(path, 0) for path in paths])

    def close(self) -> None:
        """Remove all files; the owner of the source closes it."""
        self._memory.close()
        self._spill.close()

    def _file(self, spec: TensorSpec) -> AbstractContextManager[SpillFile]:
        """A tensor in its file or in memory, where it stays while the block runs."""
        kept = self.keeps(spec)

        def whole() -> Iterator[Region]:  # decoded by one thread, so that its bytes come in order
            return iter([spec.whole])

        def decode(file: SpillFile, _whole: Region) -> None:
            if kept:
                self._decode_into(spec, file)
                return
            with self._spill.writing(file) as write:
                if is_scattered(spec):
                    file.boxes = tuple(_one_by_one(_blocks(self.base, spec), write))
                else:
                    self._in_place(spec, write)

        return (self._memory if kept else self._spill).using(
            (spec.path, 0), Span(0, spec.nbytes), whole, decode
        )

    def _decode_into(self, spec: TensorSpec, held: SpillFile) -> None:
        """Decode into memory, and hash the tensor afterwards if its bytes did not come in order."""
        import numpy as np

        held.array = np.empty(spec.shape, dtypes.numpy_dtype(spec.dtype))
        memory = held.array.reshape(-1).view("u1").data

        def write(data: memoryview, offset: int) -> None:
            memory[offset : offset + len(data)] = data

        if is_scattered(spec):
            array = as_array(memory, spec.dtype, spec.shape)
            for cell in cells(spec.whole, spec.chunks or spec.shape):
                array[cell] = read_array(self.base, spec, cell)
        else:
            self._in_place(spec, self._spill.until_stopped(write))
        hashed_apart = self.hashed is not None and spec.path not in self.hashed
        held.left *= self._times + hashed_apart

    def _in_place(self, spec: TensorSpec, write: Write) -> None:
        """Decode a tensor, write each run of bytes to its place in the tensor, and hash it meanwhile.

        It stays without hashes if its bytes come in another order than its hasher takes.
        """
        hasher = None if self.hashed is None else LeafHasher(spec, self._algorithms)
        position = 0

        def take(data: memoryview, offset: int) -> None:
            nonlocal hasher, position
            write(data, offset)
            if hasher is None:
                return
            if offset == position or hasher.takes_anywhere(len(data)):
                hasher.update(offset, data)
                position = offset + len(data)
            else:
                hasher = None

        for region, pieces in _blocks(self.base, spec):
            place(spec, region, pieces, take)
        if self.hashed is not None and hasher is not None and hasher.done():
            self.hashed[spec.path] = hasher


def _is_fetched(access: Access) -> bool:
    """Whether bytes are raw in a remote store, without checksums, which are compared where bytes are read in order."""
    extents = access.extents or ()
    return any(not extent.location.store.capabilities.local for extent in extents) and not any(
        extent.checksum for extent in extents
    )


def _one_by_one(blocks: Iterable[Block], write: Write) -> Iterator[StoredBox]:
    """Write blocks one after another; yields the offset of each."""
    end = 0
    for region, pieces in blocks:
        start = end
        for piece in pieces:
            write(piece, end)
            end += len(piece)
        yield StoredBox(region, start)


_BAND = 8 << 20


def _blocks(reader: Contents, spec: TensorSpec) -> Iterator[Block]:
    """The boxes in which a tensor is decoded, each as pieces of canonical bytes that are valid until the next."""
    access = reader.access(spec)
    if spec.chunks is not None:
        parts, in_pieces = cells(spec.whole, spec.chunks), None
    else:
        bands = row_bands(spec, _BAND, (1,) * len(spec.shape))
        parts, in_pieces = (region for region, _span in bands), False
    for cell in parts:
        yield from blocks_of_cell(access, spec, cell, in_pieces=in_pieces)


_MAPPED = 1 << 20  # bytes from which memory is mapped
_EVERY: WeakSet[Parts] = WeakSet()


def drop_free_parts() -> None:
    """Return the memory that waits for reuse; for the end of a pass, whose successor reads other tensors."""
    for parts in list(_EVERY):
        parts.drop_free()


class Parts:
    """Reads regions of a reader's tensors; used from several threads."""

    def __init__(self, reader: Contents, specs: Mapping[KeyPath, TensorSpec]) -> None:
        """Read nothing yet.

        Args:
            reader: the reader; one that hashes what is taken of its tensors gets each region with its bytes.
            specs: its tensors.
        """
        self._reader = reader
        self._decoded = reader if isinstance(reader, DecodedReader) else None
        self._specs = specs
        self._own = threading.local()
        self._free: list[bytearray | mmap.mmap] = []
        self._lock = threading.Lock()
        _EVERY.add(self)

    def read(self, path: KeyPath, region: Region) -> np.ndarray:
        """A region of a tensor, valid until this thread reads the next one or releases its memory."""
        import numpy as np

        spec = self._specs[path]
        if self._decoded is not None and self._decoded.keeps(spec):
            return self._decoded.look(spec, region)
        access = self._reader.access(spec)
        shape, dtype = region_shape(region), dtypes.numpy_dtype(spec.dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        # Reused memory: fresh memory costs more than filling it.
        held: Any = getattr(self._own, "buffer", None)
        with self._lock:
            if held is None and self._free:
                held = self._free.pop()
            if held is None or len(held) < nbytes:
                self._free.clear()  # they are as small
                held = None
        self._own.buffer = held = held or (map_memory(nbytes) if nbytes >= _MAPPED else bytearray(nbytes))
        out = memoryview(held)[:nbytes]
        if out:
            fill(access, spec, region, out)
        if self._decoded is not None and access.decoder is None:
            self._decoded.take_region(spec, region, out)
        return np.frombuffer(out, dtype).reshape(shape)

    def release(self) -> None:
        """Give the memory of this thread's last region back: another thread may use it."""
        held: Any = getattr(self._own, "buffer", None)
        if held is not None:
            self._own.buffer = None
            with self._lock:
                self._free.append(held)

    def drop_free(self) -> None:
        """Return the memory that no thread uses."""
        with self._lock:
            self._free.clear()
