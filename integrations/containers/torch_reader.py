"""Reads tensors of torch archives: raw ones like any flat file, views and big-endian ones through strides.

A strided tensor of a local file is read through memory maps of a few MiB, one after the other, so that only the pages
that a region touches are read and few are held; elsewhere the bytes between first and last element are fetched.
"""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

from wherry.core import dtypes
from wherry.errors import CorruptError
from wherry.formats.format import Extent
from wherry.integrations.containers.flat_reader import companion_location
from wherry.integrations.containers.inert_source import mapped_file
from wherry.integrations.containers.raw import read_region, read_stored
from wherry.storage.stores import LocalStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.format import Absent
    from wherry.integrations.containers.torch_zip import PlacedTensor
    from wherry.storage.location import Entry, Location

_PIECE = 1 << 20
_SLAB = 16 << 20


@dataclass(frozen=True, slots=True)
class TorchReader:
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
        """See Reader."""
        extents = self.extents(spec)
        if extents is not None:
            return read_region(spec, region, extents)
        self._require_crc(self.placed[spec.path], spec)
        words = _words(self.placed[spec.path], region, spec)
        return words.view(dtypes.numpy_dtype(spec.dtype)).reshape(words.shape[:-1])

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """See Reader."""
        extents = self.extents(spec)
        if extents is not None:
            return read_stored(spec, extents)
        self._require_crc(self.placed[spec.path], spec)
        return _words(self.placed[spec.path], spec.whole, spec).tobytes()

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """See Reader."""
        tensor = self.placed[spec.path]
        if not tensor.raw:
            return None
        width = dtypes.bits(tensor.dtype) // 8
        crc = tensor.crc if tensor.crc and tensor.whole else None
        return (Extent(tensor.file, tensor.start + tensor.offset * width, spec.nbytes, crc),)

    def absent(self) -> Iterable[Absent]:
        """See Reader; opening has found every storage whole."""
        return ()

    def companion(self, name: str) -> Location:
        """See Reader."""
        return companion_location(self.location, name, self.companions)

    def members(self) -> Iterable[Entry]:
        """See Reader."""
        return self.files

    def close(self) -> None:
        """See Reader; nothing is held."""

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
    for inner, slab in _slabs(region, tensor.strides, width):
        _gather(tensor, slab, word, result[inner], spec)
    return result


def _slabs(region: Region, strides: tuple[int, ...], width: int) -> Iterator[tuple[Region, Region]]:
    """Cut a region along its widest stride, so that each part spans little of the file; first within the region."""
    wide = [stride if part.stop - part.start > 1 else 0 for part, stride in zip(region, strides, strict=True)]
    if not any(wide):
        yield tuple(slice(0, part.stop - part.start) for part in region), region
        return
    axis = wide.index(max(wide))
    rows = max(_SLAB // (wide[axis] * width), 1)
    for start in range(region[axis].start, region[axis].stop, rows):
        part = slice(start, min(start + rows, region[axis].stop))
        slab = (*region[:axis], part, *region[axis + 1 :])
        inner = (slice(0, each.stop - each.start) for each in region)
        at = slice(part.start - region[axis].start, part.stop - region[axis].start)
        yield tuple(at if index == axis else each for index, each in enumerate(inner)), slab


def _gather(
    tensor: PlacedTensor, region: Region, word: np.dtype[Any], out: np.ndarray, spec: TensorSpec
) -> None:
    import numpy as np

    width = dtypes.bits(tensor.dtype) // 8
    steps = list(zip(region, tensor.strides, strict=True))
    first = tensor.offset + sum(part.start * stride for part, stride in steps)
    last = first + sum((part.stop - part.start - 1) * stride for part, stride in steps)
    with _bytes(tensor, first * width, (last + 1) * width, spec) as stored:
        flat = np.frombuffer(stored, word)
        strides = (*(stride * width for stride in tensor.strides), word.itemsize)
        view = np.lib.stride_tricks.as_strided(flat, out.shape, strides, writeable=False)
        out[...] = view
        del flat, view


@contextmanager
def _bytes(tensor: PlacedTensor, start: int, stop: int, spec: TensorSpec) -> Generator[Any]:
    """Bytes of a tensor's storage, mapped where that is possible."""
    file = tensor.file
    begin, end = tensor.start + start, tensor.start + stop
    if not isinstance(file.store, LocalStore):
        data = file.read(begin, end)
        if len(data) != stop - start:
            raise CorruptError("the file ends before this tensor does", uri=file.uri, path=spec.name)
        yield data
        return
    page = begin - begin % mmap.ALLOCATIONGRANULARITY
    try:
        mapped = mapped_file(file, end - page, page)
    except CorruptError as error:
        raise CorruptError("the file ends before this tensor does", uri=file.uri, path=spec.name) from error
    with mapped, memoryview(mapped) as whole, whole[begin - page :] as part:
        yield part
