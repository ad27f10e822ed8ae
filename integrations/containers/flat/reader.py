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
from dataclasses import field
from typing import TYPE_CHECKING, TypeAlias

from wherry.core.account import IgnoredEntry
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Companion
from wherry.core.tensorspec import Region, Span, TensorSpec
from wherry.cures import Command, Cure
from wherry.errors import NotFoundError, UnrepresentableError
from wherry.formats.format import Access, Computed, Contents, Extent, Stored
from wherry.store.location import Location
from wherry.store.store import Entry

if TYPE_CHECKING:
    import numpy as np


Place: TypeAlias = tuple[Extent, ...] | bytes
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
    from wherry.mover.read import fill_region, read_span, region_bytes

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


@dataclass(slots=True)
class Surroundings:
    """The files of a checkpoint's folder besides those with its tensors.

    Attributes:
        companions: those that a target gets, by their names in the folder.
        ignored: what is not converted, each with the reason.
    """

    companions: list[Entry] = field(default_factory=list[Entry])
    ignored: list[IgnoredEntry] = field(default_factory=list[IgnoredEntry])

    @property
    def names(self) -> frozenset[str]:
        """The names of the companions."""
        return frozenset(one.name for one in self.companions)

    @property
    def listed(self) -> tuple[Companion, ...]:
        """The companions as a manifest lists them."""
        return tuple(Companion(one.name, one.size) for one in self.companions)


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
    """Reads tensors that are stored raw, or whose bytes are in memory.

    Attributes:
        location: the checkpoint: a folder, or one file.
        places: the extents of each tensor's stored bytes, in order, or its canonical bytes.
        files: every file of the checkpoint, names relative to the location.
        companions: the names among them that hold no tensors.
        packs: whether four-bit floats are two in a byte; in msgpack each takes one.
    """

    location: Location
    places: Mapping[KeyPath, Place]
    files: tuple[Entry, ...]
    companions: frozenset[str] = frozenset()
    packs: bool = True

    def access(self, spec: TensorSpec) -> Access:
        """Stored, but for bytes in memory, and for four-bit floats that are unpacked."""
        place = self.places[spec.path]
        if not isinstance(place, bytes):
            return packed_access(spec, place) if self.packs and spec.dtype == PACKED else Stored(place)

        def fill(_whole: Region, out: memoryview) -> None:
            out[:] = place

        return Computed(fill)


def companion_location(location: Location, name: str, companions: frozenset[str]) -> Location:
    """The location of a companion.

    Raises:
        NotFoundError: the checkpoint has no companion of this name.
    """
    if name not in companions:
        raise NotFoundError(
            f"companion file not found: {name!r}",
            uri=location.uri,
            cure=Cure("run {} on the checkpoint to list its companion files", Command("inspect")),
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
        """Begin a file: the tensors that are added from now on lie in it."""
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
