"""Reads tensors of torch archives: raw tensors as from any flat file, views and big-endian tensors through strides.

A strided tensor is read in slabs: the bytes between the first and the last element of a part of it, at most 16 MiB.
Rows that are far apart are read one by one. Files are not memory-mapped: a file that is truncated while it is read
causes an error, not a signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

from wherry.core import dtypes
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, TensorSpec
from wherry.errors import CorruptError, HostileError
from wherry.formats.format import Access, ChunkDecoder, Chunked, Extent, RangeChecksum, Stored
from wherry.integrations.containers.flat.reader import FilesReader
from wherry.store.local_store import LocalStore
from wherry.store.location import Location
from wherry.store.store import Entry

if TYPE_CHECKING:
    import numpy as np


_PIECE = 1 << 20
_SLAB = 16 << 20  # bytes of a file that are held in memory for one part of a tensor
_FREE_BYTES = 1 << 30  # allowance for expanded tensors (stride 0), which are larger than what is stored
_GAP = 256 << 10  # unneeded bytes of a local file that are read to save a read call


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """The position of a tensor in the file of its archive.

    Attributes:
        file: the archive.
        start: offset of its storage in the file.
        length: bytes of the storage.
        offset: its first element, in elements from `start`.
        shape: its extents.
        strides: in elements.
        dtype: our name.
        big_endian: whether the storage is big endian.
        crc: CRC-32 of the storage; 0 if none was recorded.
        decoded: whether `file` is virtual: it decodes bytes that no real file holds in this form.
    """

    file: Location
    start: int
    length: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    big_endian: bool
    crc: int = 0
    decoded: bool = False

    @property
    def raw(self) -> bool:
        """Whether its canonical bytes are stored raw in the file."""
        return not self.big_endian and self.contiguous and not self.decoded

    @property
    def whole(self) -> bool:
        """Whether its elements cover the whole storage."""
        width = dtypes.bits(self.dtype) // 8
        return self.offset == 0 and math.prod(self.shape) * width == self.length and self.contiguous

    @property
    def contiguous(self) -> bool:
        """Whether its elements are stored in C order without gaps."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != expected:
                return math.prod(self.shape) == 0
            expected *= extent
        return True


@dataclass(frozen=True, slots=True)
class StridedReader(FilesReader):
    """Reads tensors of one or several archives.

    Attributes:
        location: the checkpoint: a folder, or one file.
        placed: the position of each tensor.
        files: every file of the checkpoint, names relative to the location.
        companions: the names among them that hold no tensors.
        sound: storages whose CRC was verified.
    """

    location: Location
    placed: Mapping[KeyPath, PlacedTensor]
    files: tuple[Entry, ...]
    companions: frozenset[str] = frozenset()
    sound: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])

    def access(self, spec: TensorSpec) -> Access:
        """Stored with the CRC of its storage, which it may share with other tensors; else one chunk of other order."""
        tensor = self.placed[spec.path]
        if not tensor.raw:
            return Chunked(spec.shape, ChunkDecoder(partial(self._fill, spec)))
        start = tensor.start + tensor.offset * (dtypes.bits(tensor.dtype) // 8)
        if tensor.crc and not tensor.whole:
            storage = RangeChecksum(tensor.start, tensor.length, tensor.crc)
            return Stored((Extent(tensor.file, start, spec.nbytes, within=storage),))
        return Stored((Extent(tensor.file, start, spec.nbytes, tensor.crc or None),))

    def _fill(self, spec: TensorSpec, region: Region, out: memoryview) -> None:
        """Fill a buffer with a region, through strides; at the first read, verify the CRC of its storage."""
        tensor = self.placed[spec.path]
        key = (tensor.file.path, tensor.start)
        if tensor.crc and not tensor.decoded and key not in self.sound:
            crc = 0
            for start in range(tensor.start, tensor.start + tensor.length, _PIECE):
                crc = crc32(tensor.file.read(start, min(start + _PIECE, tensor.start + tensor.length)), crc)
            if crc != tensor.crc:
                raise CorruptError(
                    "checksum mismatch in the storage of the tensor: "
                    f"expected CRC-32 {tensor.crc:#010x}, got {crc:#010x}",
                    uri=tensor.file.uri,
                    path=spec.name,
                    cure="restore the file from a backup or download it again",
                )
            self.sound.add(key)
        _fill_words(tensor, region, spec, out)


def _fill_words(tensor: PlacedTensor, region: Region, spec: TensorSpec, out: memoryview) -> None:
    """A region as little-endian unsigned words, C order; complex numbers are two words on the last axis."""
    import numpy as np

    parts = 2 if tensor.dtype.startswith("complex") else 1
    width = dtypes.bits(tensor.dtype) // 8
    word = np.dtype(f"{'>' if tensor.big_endian else '<'}u{width // parts}")
    shape = tuple(part.stop - part.start for part in region)
    result = np.frombuffer(out, word.newbyteorder("<")).reshape(*shape, parts)
    gap = _GAP if isinstance(tensor.file.store, LocalStore) else _SLAB
    for slab in _parts(region, tensor.strides, _SLAB // width, gap // width):
        inner = tuple(
            slice(part.start - whole.start, part.stop - whole.start)
            for part, whole in zip(slab, region, strict=True)
        )
        _gather(tensor, slab, word, result[inner], spec)


def _parts(region: Region, strides: tuple[int, ...], most: int, gap: int) -> Iterator[Region]:
    """Cut a region along the axis of the widest span.

    Args:
        region: not empty.
        strides: of its tensor, in elements.
        most: the number of elements that a part may span.
        gap: rows that are more than this number of elements apart become separate parts.
    """
    spans = [(part.stop - part.start - 1) * stride for part, stride in zip(region, strides, strict=True)]
    if not any(spans):
        yield region
        return
    axis = spans.index(max(spans))
    row = sum(spans) - spans[axis] + 1
    far = strides[axis] - row > gap
    if row + spans[axis] <= most and not far:
        yield region
        return
    rows = 1 if far else max((most - row) // strides[axis] + 1, 1)
    for start in range(region[axis].start, region[axis].stop, rows):
        part = slice(start, min(start + rows, region[axis].stop))
        yield from _parts((*region[:axis], part, *region[axis + 1 :]), strides, most, gap)


def _gather(
    tensor: PlacedTensor, region: Region, word: np.dtype[Any], out: np.ndarray, spec: TensorSpec
) -> None:
    import numpy as np

    width = dtypes.bits(tensor.dtype) // 8
    steps = list(zip(region, tensor.strides, strict=True))
    first = tensor.offset + sum(part.start * stride for part, stride in steps)
    last = first + sum((part.stop - part.start - 1) * stride for part, stride in steps)
    start, stop = tensor.start + first * width, tensor.start + (last + 1) * width
    data = tensor.file.read(start, stop)
    if len(data) != stop - start:
        raise CorruptError(
            f"the file is truncated: expected {stop - start} bytes at {start}, got {len(data)}",
            uri=tensor.file.uri,
            path=spec.name,
        )
    flat = np.frombuffer(data, word)
    strides = (*(stride * width for stride in tensor.strides), word.itemsize)
    out[...] = np.lib.stride_tricks.as_strided(flat, out.shape, strides, writeable=False)


def require_honest_size(placed: Mapping[KeyPath, PlacedTensor], location: Location) -> None:
    """Refuse small files that claim huge tensors, as strides of 0 allow.

    Raises:
        HostileError: the claimed size is far larger than the file.
    """
    entry = location.stat()
    stored = entry.size if entry else 0
    said = sum(dtypes.canonical_size(tensor.dtype, math.prod(tensor.shape)) for tensor in placed.values())
    if said > 64 * stored + _FREE_BYTES:
        raise HostileError(
            f"a file of {stored} bytes claims {said} bytes of tensors",
            uri=location.uri,
            cure="do not use this file",
        )


def specs_of(placed: Mapping[KeyPath, PlacedTensor]) -> dict[KeyPath, TensorSpec]:
    """The specs of the tensors; the tag `shares` names an earlier tensor that is the same view."""
    first: dict[tuple[object, ...], KeyPath] = {}
    specs: dict[KeyPath, TensorSpec] = {}
    for path, tensor in placed.items():
        view = (tensor.start, tensor.length, tensor.offset, tensor.shape, tensor.strides, tensor.dtype)
        same = first.setdefault(view, path) if tensor.length else path
        tags = None if same == path else {"shares": render(same)}
        specs[path] = TensorSpec(path, tensor.shape, tensor.dtype, tags=tags)
    return specs
