"""Reads tensors of torch archives: raw ones like any flat file, views and big-endian ones through strides.

A strided tensor of a local file is read through a memory map, so that only the pages that a region touches are
read; elsewhere the bytes between its first and last element are fetched.
"""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wherry import dtypes
from wherry.errors import CorruptError, storage_error
from wherry.format import Extent
from wherry.integrations.containers.flat_reader import companion_location
from wherry.integrations.containers.raw import read_region, read_stored

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from wherry.format import Absent
    from wherry.integrations.containers.torch_zip import PlacedTensor
    from wherry.keypath import KeyPath
    from wherry.location import Entry, Location
    from wherry.tensorspec import Region, TensorSpec


@dataclass(frozen=True, slots=True)
class TorchReader:
    """Reads tensors of one or several archives.

    Attributes:
        location: the checkpoint: a folder, or one file.
        placed: where each tensor lies.
        files: every file of the checkpoint, names relative to the location.
        companions: the names among them that hold no tensors.
    """

    location: Location
    placed: Mapping[KeyPath, PlacedTensor]
    files: tuple[Entry, ...]
    companions: frozenset[str] = frozenset()

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """See Reader."""
        extents = self.extents(spec)
        if extents is not None:
            return read_region(spec, region, extents)
        words = _words(self.placed[spec.path], region, spec)
        return words.view(dtypes.numpy_dtype(spec.dtype)).reshape(words.shape[:-1])

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """See Reader."""
        extents = self.extents(spec)
        if extents is not None:
            return read_stored(spec, extents)
        return _words(self.placed[spec.path], spec.whole, spec).tobytes()

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """See Reader."""
        tensor = self.placed[spec.path]
        if not tensor.raw:
            return None
        width = dtypes.bits(tensor.dtype) // 8
        return (Extent(tensor.file.uri, tensor.start + tensor.offset * width, spec.nbytes),)

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


def _words(tensor: PlacedTensor, region: Region, spec: TensorSpec) -> np.ndarray:
    """A region as little-endian unsigned words, C order; complex numbers are two words on the last axis."""
    parts = 2 if tensor.dtype.startswith("complex") else 1
    width = dtypes.bits(tensor.dtype) // 8
    word = np.dtype(f"{'>' if tensor.big_endian else '<'}u{width // parts}")
    shape = tuple(part.stop - part.start for part in region)
    if 0 in shape:
        return np.empty((*shape, parts), word.newbyteorder("<"))
    steps = list(zip(region, tensor.strides, strict=True))
    first = tensor.offset + sum(part.start * stride for part, stride in steps)
    last = first + sum((part.stop - part.start - 1) * stride for part, stride in steps)
    with _bytes(tensor, first * width, (last + 1) * width, spec) as stored:
        flat = np.frombuffer(stored, word)
        strides = (*(stride * width for stride in tensor.strides), word.itemsize)
        view = np.lib.stride_tricks.as_strided(flat, (*shape, parts), strides, writeable=False)
        result = view.astype(word.newbyteorder("<"), order="C", copy=True)
        del flat, view
    return result


@contextmanager
def _bytes(tensor: PlacedTensor, start: int, stop: int, spec: TensorSpec) -> Generator[Any]:
    """Bytes of a tensor's storage, mapped where that is possible."""
    file = tensor.file
    begin, end = tensor.start + start, tensor.start + stop
    if not file.store.capabilities.local:
        data = file.read(begin, end)
        if len(data) != stop - start:
            raise CorruptError("the file ends before this tensor does", uri=file.uri, path=spec.name)
        yield data
        return
    page = begin - begin % mmap.ALLOCATIONGRANULARITY
    try:
        with open(file.path, "rb") as opened:  # noqa: PTH123  as in store.LocalStore.read
            mapped = mmap.mmap(opened.fileno(), end - page, access=mmap.ACCESS_READ, offset=page)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise storage_error(error, file.uri) from error
        raise CorruptError("the file ends before this tensor does", uri=file.uri, path=spec.name) from error
    with mapped, memoryview(mapped) as whole, whole[begin - page :] as part:
        yield part
