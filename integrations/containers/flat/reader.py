"""Reads checkpoints whose tensors are stored raw in files: safetensors files and Hugging Face folders.

Opening a checkpoint checks that every byte exists, so no tensor is absent afterwards. A region is read with as few
bytes as possible. No file descriptor is kept open between calls.

Four-bit floats, the one type that flat containers pack.

There are two per byte on disk, the even element in the low nibble (the order of the
safetensors specification and of torch's float4_e2m1fn_x2), one byte per element in canonical form.

Places: where the bytes of tensors lie that have one byte range each, as columns of numbers.

A large checkpoint has a hundred thousand such tensors, and the `Extent` of one is built only on request.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, Span, TensorSpec
from wherry.errors import NotFoundError, UnrepresentableError
from wherry.formats.contents import Access, Computed, Contents, Extent, Stored
from wherry.mover.read import fill_region, read_span, region_bytes
from wherry.storage.location import Location
from wherry.store.store import Entry

if TYPE_CHECKING:
    import numpy as np


PACKED = "float4_e2m1fn"
_NIBBLE = 0x0F


def stored_size(spec: TensorSpec) -> int:
    """Size in bytes of a tensor in its file; a trailing half byte counts as a byte."""
    return (spec.size + 1) // 2 if spec.dtype == PACKED else spec.nbytes


def packed_access(spec: TensorSpec, extents: tuple[Extent, ...]) -> Computed:
    """How a tensor of packed elements is read.

    Args:
        spec: the tensor.
        extents: the extents of its stored bytes, in order.
    """

    def read(first: int, buffer: memoryview) -> None:
        # An element is a byte in memory and half a byte on disk.
        stop = first + len(buffer)
        stored = bytearray((stop + 1) // 2 - first // 2)
        read_span(extents, Span(first // 2, (stop + 1) // 2), memoryview(stored), spec)
        buffer[:] = unpack_nibbles(stored)[first % 2 : first % 2 + len(buffer)].data

    def fill(region: Region, out: memoryview) -> None:
        fill_region(spec, region, read, out)

    return Computed(fill, lambda region: 2 * region_bytes(spec, region))


def unpack_nibbles(stored: bytes | bytearray | memoryview) -> np.ndarray:
    """The two elements of each byte, low nibble first, as one uint8 per element."""
    import numpy as np

    packed = np.frombuffer(stored, "u1")
    return np.stack((packed & _NIBBLE, packed >> 4), axis=-1).reshape(-1)


def pack_nibbles(elements: memoryview, path: str) -> memoryview:
    """The inverse of `unpack_nibbles`.

    Raises:
        UnrepresentableError: the number of elements is odd, or an element has more than four bits.
    """
    import numpy as np

    whole = np.frombuffer(elements, "u1")
    if whole.size % 2:
        raise UnrepresentableError(
            f"cannot pack an odd number of four-bit elements into whole bytes: {whole.size}", path=path
        )
    if whole.size and int(whole.max()) > _NIBBLE:
        raise UnrepresentableError(
            f"element out of range for a four-bit type: {int(whole.max())} exceeds {_NIBBLE}", path=path
        )
    return (whole[0::2] | (whole[1::2] << 4)).data


class FilesReader(Contents):
    """A reader of the files of one folder, which opening found complete; no descriptor is kept open between calls.

    Attributes:
        location: the checkpoint: a folder, or one file.
        files: every file of the checkpoint, names relative to the location.
        companions: the names among them that hold no tensors.
    """

    __slots__ = ()

    location: Location
    files: tuple[Entry, ...]
    companions: frozenset[str] = frozenset()

    def companion(self, name: str) -> Location:
        """The location of a companion, which is next to the files."""
        return companion_location(self.location, name, self.companions)

    def members(self) -> Iterable[Entry]:
        """The files."""
        return self.files


@dataclass(frozen=True, slots=True)
class FlatReader(FilesReader):
    """Reads tensors that are stored raw.

    Attributes:
        location: the checkpoint: a folder, or one file.
        places: the extents of each tensor's stored bytes, in order.
        files: every file of the checkpoint, names relative to the location.
        companions: the names among them that hold no tensors.
    """

    location: Location
    places: Mapping[KeyPath, tuple[Extent, ...]]
    files: tuple[Entry, ...]
    companions: frozenset[str] = frozenset()

    def access(self, spec: TensorSpec) -> Access:
        """Stored, but for four-bit floats, which are unpacked."""
        places = self.places[spec.path]
        return packed_access(spec, places) if spec.dtype == PACKED else Stored(places)


def companion_location(location: Location, name: str, companions: frozenset[str]) -> Location:
    """The location of a companion.

    Raises:
        NotFoundError: the checkpoint has no companion of this name.
    """
    if name not in companions:
        raise NotFoundError(
            f"companion file not found: {name!r}",
            uri=location.uri,
            cure="run `wherry inspect` on the checkpoint to list its companion files",
        )
    return location.member(name)


class Places(Mapping["KeyPath", "tuple[Extent, ...]"]):
    """Key path → the only extent of the tensor."""

    __slots__ = ("_files", "_firsts", "_lengths", "_rows", "_starts")

    def __init__(self) -> None:
        self._rows: dict[KeyPath, int] = {}
        self._starts, self._lengths = array("Q"), array("Q")
        self._files: list[Location] = []
        self._firsts: list[int] = []  # number of the first row of each file

    def begin(self, file: Location) -> None:
        """The following tensors lie in this file."""
        self._files.append(file)
        self._firsts.append(len(self._starts))

    def add(self, path: KeyPath, start: int, length: int) -> None:
        """Add a tensor of the present file.

        Args:
            path: its key path.
            start: the offset of its first byte.
            length: bytes.
        """
        self._rows[path] = len(self._starts)
        self._starts.append(start)
        self._lengths.append(length)

    def __getitem__(self, path: KeyPath) -> tuple[Extent, ...]:
        row = self._rows[path]
        file = self._files[bisect_right(self._firsts, row) - 1]
        return (Extent(file, self._starts[row], self._lengths[row]),)

    def __iter__(self) -> Iterator[KeyPath]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
