"""Reader: the interface through which the engine reads the bytes of one opened checkpoint.

For each tensor a reader declares from metadata alone how its bytes can be read (`access`), and supports that way: it
names byte ranges of files (`extents`), fills the caller's memory with any region (`fill`), decodes a cell of the chunk
grid in pieces (`stream`), or returns a region as an array (`read`). `absent` is the presence check: it names every
missing chunk, from metadata alone.

`Reader` implements everything except `read`, `companion` and `members`; a reader overrides what it does better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, cast

from wherry.formats.model_files import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.storage.location import Entry, Location

Kind: TypeAlias = Literal["raw", "regions", "stream", "whole"]


class RangeChecksum(NamedTuple):
    """A checksum that the writer of a file recorded for a byte range of it.

    Attributes:
        offset: of the first byte.
        length: bytes.
        value: the checksum.
        kind: `CRC-32` or `CRC-32C`.
    """

    offset: int
    length: int
    value: int
    kind: Literal["CRC-32", "CRC-32C"] = "CRC-32"


class Extent(NamedTuple):
    """A byte range of a file that holds canonical bytes of a tensor.

    Attributes:
        location: the file, in the store of its checkpoint, which opens it once.
        offset: of its first byte.
        length: bytes.
        crc32: CRC-32 that the writer recorded for exactly these bytes; None if there is none.
        within: another checksum, of a range that includes these bytes, such as a storage that tensors share.
    """

    location: Location
    offset: int
    length: int
    crc32: int | None = None
    within: RangeChecksum | None = None

    @property
    def file(self) -> str:
        """URI of the file."""
        return self.location.uri

    @property
    def checksum(self) -> RangeChecksum | None:
        """The recorded checksum of a range that includes these bytes; None if there is none."""
        return self.within if self.crc32 is None else RangeChecksum(self.offset, self.length, self.crc32)


@dataclass(frozen=True, slots=True)
class Absent:
    """A missing chunk of a tensor."""

    path: KeyPath
    chunk: str
    reason: str


class Block(NamedTuple):
    """A box of a tensor's elements in C order, little endian.

    Attributes:
        region: its position; it may extend beyond the edge of the tensor, where its elements are padding.
        pieces: its bytes; each piece is valid until the next one is requested.
    """

    region: Region
    pieces: Iterator[memoryview]


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk of a tensor that a codec encoded into one byte range of a file.

    A writer names the chunks that it wrote, so that they are read back while others are written; the reader of the
    finished target names those that it would decode, which must be the same.

    Attributes:
        extent: its stored bytes.
        codec: everything that decoding depends on besides these bytes.
        memory: bytes that decoding takes at most, besides the stored bytes.
        decode: turns the stored bytes into the elements of the chunk.
    """

    extent: Extent
    codec: Hashable
    memory: int = field(compare=False)
    decode: Callable[[memoryview], Iterator[Block]] = field(compare=False)


class _AccessFields(NamedTuple):
    kind: Kind
    extents: tuple[Extent, ...]
    gridded: bool
    computes: bool


class Access(_AccessFields):
    """How the bytes of one tensor can be read.

    Attributes:
        kind: `raw`: files hold the bytes unencoded; `regions`: `fill` reads any region; `stream`: `stream` may decode
            a cell of the chunk grid in less memory than the cell takes; `whole`: `read` decodes.
        extents: the location of raw bytes, in order.
        gridded: whether the chunk grid matters: reading a part of a chunk costs as much as reading the chunk. Raw bytes
            are not in chunks.
        computes: whether reading is bound by the CPU rather than by storage.
    """

    __slots__ = ()

    def __new__(
        cls, kind: Kind, extents: tuple[Extent, ...] = (), gridded: bool = True, computes: bool = False
    ) -> Self:
        """State how bytes can be read; see the attributes."""
        return tuple.__new__(cls, (kind, extents, gridded and kind != "raw", computes))

    @property
    def raw(self) -> tuple[Extent, ...] | None:
        """The extents, if the access is raw."""
        return self.extents if self.kind == "raw" else None


class Reader(ABC):
    """Reads one opened checkpoint; used from several threads.

    Defaults: raw bytes if `extents` names them, otherwise `read`; no missing chunks.
    """

    __slots__ = ()

    def access(self, spec: TensorSpec) -> Access:
        """How a tensor's bytes can be read: raw or whole."""
        extents = self.extents(spec)
        return Access("whole") if extents is None else Access("raw", extents, gridded=False)

    @abstractmethod
    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """The elements of a region: a new C-order little-endian array."""

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """Canonical bytes of the whole tensor; must be overridden if `read` does not support a dtype."""
        return self.read(spec, spec.whole).tobytes()

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:  # noqa: ARG002  overridden
        """No extents: bytes must be decoded."""
        return None

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with the canonical bytes of a region, by `read`."""
        buffer[:] = _bytes_of(self.read(spec, region))

    def overhead(self, spec: TensorSpec, region: Region) -> int:  # noqa: ARG002  overridden
        """No memory in addition to the buffer."""
        return 0

    def stream(self, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        """The elements of one cell of the chunk grid, in one piece."""
        yield Block(cell, iter([_bytes_of(self.read(spec, cell))]))

    def held(self, spec: TensorSpec, cell: Region) -> int | None:  # noqa: ARG002  overridden
        """No cell is decoded in pieces."""
        return None

    def encoded(self, spec: TensorSpec) -> tuple[EncodedChunk, ...] | None:  # noqa: ARG002  overridden
        """No encoded chunks are named."""
        return None

    def chunk(self, spec: TensorSpec, cell: Region) -> Extent | None:  # noqa: ARG002  overridden
        """No place of a chunk is known."""
        return None

    def absent(self) -> Iterable[Absent]:
        """No missing chunks: opening has checked that they exist."""
        return ()

    def shortfall(self) -> str | None:
        """Unknown."""
        return None

    @abstractmethod
    def companion(self, name: str) -> Location:
        """The location of a companion file of the manifest."""

    def model_files(self) -> ModelFiles:
        """None: what the checkpoint states of its model is in its companions."""
        return ModelFiles()

    @abstractmethod
    def members(self) -> Iterable[Entry]:
        """Every file that belongs to the checkpoint."""

    def close(self) -> None:  # noqa: B027  most readers hold nothing
        """No resources to release."""


class ReaderOver(Reader):
    """Delegates each tensor to another reader, with the spec that the tensor has in that reader."""

    __slots__ = ()

    @abstractmethod
    def inner(self, spec: TensorSpec) -> tuple[Reader, TensorSpec]:
        """The reader that has a tensor, and the spec of the tensor there."""

    def access(self, spec: TensorSpec) -> Access:
        """The access that the tensor's reader declares."""
        reader, stored = self.inner(spec)
        return reader.access(stored)

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """Read through the tensor's reader."""
        reader, stored = self.inner(spec)
        return reader.read(stored, region)

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """Read through the tensor's reader."""
        reader, stored = self.inner(spec)
        return reader.read_bytes(stored)

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """The extents that the tensor's reader names."""
        reader, stored = self.inner(spec)
        return reader.extents(stored)

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill through the tensor's reader."""
        reader, stored = self.inner(spec)
        reader.fill(stored, region, buffer)

    def stream(self, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        """Stream through the tensor's reader."""
        reader, stored = self.inner(spec)
        return reader.stream(stored, cell)

    def overhead(self, spec: TensorSpec, region: Region) -> int:
        """The overhead of the tensor's reader."""
        reader, stored = self.inner(spec)
        return reader.overhead(stored, region)

    def held(self, spec: TensorSpec, cell: Region) -> int | None:
        """The bytes that the tensor's reader holds."""
        reader, stored = self.inner(spec)
        return reader.held(stored, cell)

    def encoded(self, spec: TensorSpec) -> tuple[EncodedChunk, ...] | None:
        """The chunks that the tensor's reader names."""
        reader, stored = self.inner(spec)
        return reader.encoded(stored)

    def chunk(self, spec: TensorSpec, cell: Region) -> Extent | None:
        """The place of a chunk in the tensor's reader."""
        reader, stored = self.inner(spec)
        return reader.chunk(stored, cell)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(cast("Any", array.reshape(-1).view("u1")))
