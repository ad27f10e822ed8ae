"""Contents: the interface through which the engine reads the bytes of one opened checkpoint.

It answers one question for each tensor, from metadata alone: how are its bytes read (`access`)?

- `Stored`: byte ranges of files hold them as they are.
- `Chunked`: they lie in chunks of a grid, as they are or encoded.
- `Computed`: a function makes any region of them.

`wherry.mover.read` reads a region by any of these answers. `absent` is the presence check: it names every missing
chunk, from metadata alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

from wherry.formats.model_files import ModelFiles

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.storage.location import Location
    from wherry.store.store import Entry


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

    A writer names the chunks that it wrote, so that they are read back while others are written; the places and the
    decoder's key of the finished target's `Chunked` must be the same.

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


class Stored(NamedTuple):
    """Files hold the canonical bytes of a tensor as they are.

    Attributes:
        extents: their byte ranges, in order.
    """

    extents: tuple[Extent, ...]

    decoder = None


def _no_pieces(_cell: Region) -> Iterator[Block]:
    raise AssertionError("where `memory` gives None, chunks are not decoded in pieces")


@dataclass(frozen=True, slots=True)
class ChunkDecoder:
    """How chunks of a tensor are decoded.

    Attributes:
        fill: fills memory with the canonical bytes of any region that is not empty; takes as much memory again.
        key: everything that decoding depends on besides the stored bytes.
        memory: bytes of memory that decoding one chunk in pieces takes; None if that cannot be done.
        decode: the elements of one chunk, which is a cell of the grid, in pieces.
    """

    fill: Callable[[Region, memoryview], None]
    key: Hashable = None
    memory: Callable[[Region], int | None] = lambda _cell: None
    decode: Callable[[Region], Iterator[Block]] = _no_pieces


@dataclass(frozen=True, slots=True)
class Chunked:
    """A tensor in chunks of a regular grid. If they are encoded, a part of one costs as much as all of it.

    Attributes:
        grid: extents of a chunk.
        decoder: how chunks are decoded; None if they are stored raw.
        place: where the stored bytes of a cell of the grid are, padding included; None if no file has them alone, which
            is so of no raw chunk.
        require: raises an error if a chunk of a region is missing, so that no memory is taken for what is not there.
    """

    extents: ClassVar[None] = None

    grid: tuple[int, ...]
    decoder: ChunkDecoder | None
    place: Callable[[Region], Extent | None] = lambda _cell: None
    require: Callable[[Region], None] = lambda _region: None


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor of which any region is computed, mostly from regions of other tensors.

    Attributes:
        fill: fills memory with the canonical bytes of any region that is not empty.
        memory: bytes of memory that it takes for a region besides.
        gridded: whether the chunk grid of the tensor's spec says how to cut it.
    """

    extents: ClassVar[None] = None
    decoder: ClassVar[None] = None

    fill: Callable[[Region, memoryview], None]
    memory: Callable[[Region], int] = lambda _region: 0
    gridded: bool = False


Access: TypeAlias = Stored | Chunked | Computed


class Contents(ABC):
    """The bytes of one opened checkpoint; used from several threads."""

    __slots__ = ()

    @abstractmethod
    def access(self, spec: TensorSpec) -> Access:
        """How a tensor's bytes are read; the same answer each time."""

    @abstractmethod
    def companion(self, name: str) -> Location:
        """The location of a companion file of the manifest."""

    @abstractmethod
    def members(self) -> Iterable[Entry]:
        """Every file that belongs to the checkpoint."""

    def absent(self) -> Iterable[Absent]:
        """No missing chunks: opening has checked that they exist."""
        return ()

    def shortfall(self) -> str | None:
        """What is missing, as a text; None if that is unknown."""
        return None

    def model_files(self) -> ModelFiles:
        """None: what the checkpoint states of its model is in its companions."""
        return ModelFiles()

    def close(self) -> None:  # noqa: B027  most hold nothing
        """No resources to release."""


class ContentsOver(Contents):
    """Contents on top of other contents.

    Attributes:
        base: has everything that is not overridden; it is closed together with these contents.
    """

    __slots__ = ()

    base: Contents

    def inner(self, spec: TensorSpec) -> tuple[Contents, TensorSpec]:
        """The contents that have a tensor, and the spec of the tensor there: `base`, and the same spec."""
        return self.base, spec

    def access(self, spec: TensorSpec) -> Access:
        """How the tensor is read where it is."""
        contents, stored = self.inner(spec)
        return contents.access(stored)

    def companion(self, name: str) -> Location:
        """The location of a companion file of the base."""
        return self.base.companion(name)

    def members(self) -> Iterable[Entry]:
        """The files of the base."""
        return self.base.members()

    def absent(self) -> Iterable[Absent]:
        """The missing chunks of the base."""
        return self.base.absent()

    def shortfall(self) -> str | None:
        """What the base is missing."""
        return self.base.shortfall()

    def model_files(self) -> ModelFiles:
        """The files that the base states of its model."""
        return self.base.model_files()

    def close(self) -> None:
        """Close the base."""
        self.base.close()
