"""Reads tensors of torch archives: raw ones like any flat file, views and big-endian ones through strides.

A strided tensor is read in slabs: the bytes between the first and the last element of a part of it, some MiB at most.
Rows that lie far apart are read one by one. Nothing is mapped: a file that is cut meanwhile is an error, and no signal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

from wherry.core import dtypes
from wherry.errors import CorruptError
from wherry.formats.reader import Extent
from wherry.integrations.containers.flat_reader import FilesReader
from wherry.integrations.containers.raw import read_region, read_stored
from wherry.storage.stores import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.integrations.containers.torch_zip import PlacedTensor
    from wherry.storage.location import Entry, Location

_PIECE = 1 << 20
_SLAB = 16 << 20  # bytes of a file that are held for one part of a tensor
_GAP = 256 << 10  # bytes of a local file that are not read for the sake of one read less


@dataclass(frozen=True, slots=True)
class TorchReader(FilesReader):
    """Reads tensors of one or several archives.

    Attributes:
        location: the checkpoint: a folder, or one file.
        placed: where each tensor lies.
        files: every file of the checkpoint, names relative to the location.
        companions: the names among them that hold no tensors.
        sound: storages whose CRC was compared.
    """

    location: Location
    placed: Mapping[KeyPath, PlacedTensor]
    files: tuple[Entry, ...]
    companions: frozenset[str] = frozenset()
    sound: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """The elements of a region, raw or through strides."""
        extents = self.extents(spec)
        if extents is not None:
            return read_region(spec, region, extents)
        self._require_crc(self.placed[spec.path], spec)
        words = _words(self.placed[spec.path], region, spec)
        return words.view(dtypes.numpy_dtype(spec.dtype)).reshape(words.shape[:-1])

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """Canonical bytes, raw or through strides."""
        extents = self.extents(spec)
        if extents is not None:
            return read_stored(spec, extents)
        self._require_crc(self.placed[spec.path], spec)
        return _words(self.placed[spec.path], spec.whole, spec).tobytes()

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """The one range of a raw tensor, with the CRC of its storage where it is all of it."""
        tensor = self.placed[spec.path]
        if not tensor.raw:
            return None
        width = dtypes.bits(tensor.dtype) // 8
        crc = tensor.crc if tensor.crc and tensor.whole else None
        return (Extent(tensor.file, tensor.start + tensor.offset * width, spec.nbytes, crc),)

    def _require_crc(self, tensor: PlacedTensor, spec: TensorSpec) -> None:
        """Compare the CRC of the storage of a tensor that no extent names, the first time that it is read."""
        key = (tensor.file.path, tensor.start)
        if not tensor.crc or tensor.decoded or key in self.sound:
            return
        crc = 0
        for start in range(tensor.start, tensor.start + tensor.length, _PIECE):
            crc = crc32(tensor.file.read(start, min(start + _PIECE, tensor.start + tensor.length)), crc)
        if crc != tensor.crc:
            raise CorruptError(
                "its storage does not have its checksum",
                uri=tensor.file.uri,
                path=spec.name,
                cure="restore the file",
            )
        self.sound.add(key)


def _words(tensor: PlacedTensor, region: Region, spec: TensorSpec) -> np.ndarray:
    """A region as little-endian unsigned words, C order; complex numbers are two words on the last axis."""
    import numpy as np

    parts = 2 if tensor.dtype.startswith("complex") else 1
    width = dtypes.bits(tensor.dtype) // 8
    word = np.dtype(f"{'>' if tensor.big_endian else '<'}u{width // parts}")
    shape = tuple(part.stop - part.start for part in region)
    if 0 in shape:
        return np.empty((*shape, parts), word.newbyteorder("<"))
    result = np.empty((*shape, parts), word.newbyteorder("<"))
    for inner, slab in _slabs(tensor, region, width):
        _gather(tensor, slab, word, result[inner], spec)
    return result


def _slabs(tensor: PlacedTensor, region: Region, width: int) -> Iterator[tuple[Region, Region]]:
    """Cut a region into parts that span little of the file; each first within the region, then within the tensor."""
    gap = _GAP if isinstance(tensor.file.store, LocalStore) else _SLAB
    for slab in _parts(region, tensor.strides, _SLAB // width, gap // width):
        yield (
            tuple(
                slice(part.start - whole.start, part.stop - whole.start)
                for part, whole in zip(slab, region, strict=True)
            ),
            slab,
        )


def _parts(region: Region, strides: tuple[int, ...], most: int, gap: int) -> Iterator[Region]:
    """Cut a region along the axis of the widest span.

    Args:
        region: not empty.
        strides: of its tensor, in elements.
        most: elements that a part may span.
        gap: elements between two rows from which on each is a part of its own.
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
    flat = np.frombuffer(_bytes(tensor, first * width, (last + 1) * width, spec), word)
    strides = (*(stride * width for stride in tensor.strides), word.itemsize)
    out[...] = np.lib.stride_tricks.as_strided(flat, out.shape, strides, writeable=False)


def _bytes(tensor: PlacedTensor, start: int, stop: int, spec: TensorSpec) -> bytes:
    """Bytes of a tensor's storage."""
    data = tensor.file.read(tensor.start + start, tensor.start + stop)
    if len(data) != stop - start:
        raise CorruptError("the file ends before this tensor does", uri=tensor.file.uri, path=spec.name)
    return data
