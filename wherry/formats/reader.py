"""Reader: how the engine gets at the bytes of one opened checkpoint.

A reader says once per tensor how its bytes can be had (`access`), from metadata alone, and does what it said: it names
byte ranges of files (`extents`), fills memory of the caller with any region (`fill`), decodes a cell of the chunk grid
piece by piece (`stream`), or gives a region as an array (`read`). `absent` is the presence check: it names every
expected chunk that is not there, from metadata alone.

`BaseReader` has everything but `read`, `companion` and `members`; a reader overrides what it does better. A plug-in's
reader that has no `access` is given one by `with_access`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.storage.location import Entry, Location

Kind: TypeAlias = Literal["raw", "regions", "stream", "whole"]


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range of a file that holds canonical bytes of a tensor.

    Attributes:
        location: the file, in the store of its checkpoint, which opens it once.
        offset: of its first byte.
        length: bytes.
        crc32: CRC-32 of these bytes as their writer recorded it; None where there is none for exactly them.
    """

    location: Location
    offset: int
    length: int
    crc32: int | None = None

    @property
    def file(self) -> str:
        """URI of the file."""
        return self.location.uri


@dataclass(frozen=True, slots=True)
class Absent:
    """An expected piece of a tensor that is not there."""

    path: KeyPath
    chunk: str
    reason: str


class Block(NamedTuple):
    """A box of a tensor's elements in C order, little endian.

    Attributes:
        region: where it lies; may reach beyond the tensor's edge, and what lies there is padding.
        pieces: its bytes; each piece is valid until the next is asked for.
    """

    region: Region
    pieces: Iterator[memoryview]


@dataclass(frozen=True, slots=True)
class Access:
    """How the bytes of one tensor can be had.

    Attributes:
        kind: `raw`: they lie in files as they are; `regions`: `fill` gives any region; `stream`: `stream` may decode
            a cell of the chunk grid in less memory than the cell takes; `whole`: `read` decodes.
        extents: where raw bytes lie, in order.
        gridded: whether the chunk grid must be regarded: a part of a chunk costs as much as the chunk.
        computes: whether getting bytes takes a core all the time, rather than waiting for storage.
    """

    kind: Kind
    extents: tuple[Extent, ...] = ()
    gridded: bool = True
    computes: bool = False

    def __post_init__(self) -> None:
        if self.kind == "raw":
            object.__setattr__(self, "gridded", False)  # bytes as they lie are in no chunks

    @property
    def raw(self) -> tuple[Extent, ...] | None:
        """Where the bytes lie, if they lie raw."""
        return self.extents if self.kind == "raw" else None


class Reader(Protocol):
    """Reads one opened checkpoint; used from several threads."""

    def access(self, spec: TensorSpec) -> Access:
        """How a tensor's bytes can be had; reads no more than metadata."""
        ...

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """The elements of a region: a new C-order little-endian array."""
        ...

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """Canonical bytes of the whole tensor, for dtypes that numpy cannot hold."""
        ...

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """Where canonical bytes lie raw, in order; None where they must be decoded."""
        ...

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with the canonical bytes of a region."""

    def overhead(self, spec: TensorSpec, region: Region) -> int:
        """Bytes that filling holds beside the buffer."""
        ...

    def stream(self, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        """The elements of one cell of the chunk grid, decoded piece by piece."""
        ...

    def held(self, spec: TensorSpec, cell: Region) -> int | None:
        """Bytes that `stream` holds at a time for one cell of the chunk grid; None where it cannot decode it."""

    def absent(self) -> Iterable[Absent]:
        """Expected chunks that are not there, from metadata alone."""
        ...

    def shortfall(self) -> str | None:
        """How much is there of how much, and whose share, in one phrase; None where nobody can tell."""

    def companion(self, name: str) -> Location:
        """Where a companion file of the manifest lies."""
        ...

    def members(self) -> Iterable[Entry]:
        """Every file that belongs to the checkpoint, for the fingerprint; names relative to its URI."""
        ...

    def close(self) -> None:
        """Release what is held."""


class BaseReader(ABC):
    """What most readers have in common: raw bytes where `extents` names them, else `read`; nothing is ever absent."""

    __slots__ = ()

    def access(self, spec: TensorSpec) -> Access:
        """How a tensor's bytes can be had: raw or whole."""
        extents = self.extents(spec)
        return Access("whole") if extents is None else Access("raw", extents, gridded=False)

    @abstractmethod
    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """The elements of a region: a new C-order little-endian array."""

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """Canonical bytes of the whole tensor; to be overridden where `read` cannot hold a dtype."""
        return self.read(spec, spec.whole).tobytes()

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:  # noqa: ARG002  of the protocol
        """Where canonical bytes lie raw: nowhere."""
        return None

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with the canonical bytes of a region, by `read`."""
        buffer[:] = _bytes_of(self.read(spec, region))

    def overhead(self, spec: TensorSpec, region: Region) -> int:  # noqa: ARG002  of the protocol
        """Nothing is held beside the buffer."""
        return 0

    def stream(self, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        """The elements of one cell of the chunk grid, in one piece."""
        yield Block(cell, iter([_bytes_of(self.read(spec, cell))]))

    def held(self, spec: TensorSpec, cell: Region) -> int | None:  # noqa: ARG002  of the protocol
        """No cell is decoded piece by piece."""
        return None

    def absent(self) -> Iterable[Absent]:
        """Opening has found everything."""
        return ()

    def shortfall(self) -> str | None:
        """Nobody can tell."""
        return None

    @abstractmethod
    def companion(self, name: str) -> Location:
        """Where a companion file of the manifest lies."""

    @abstractmethod
    def members(self) -> Iterable[Entry]:
        """Every file that belongs to the checkpoint."""

    def close(self) -> None:  # noqa: B027  most readers hold nothing
        """Nothing is held."""


class ReaderOver(BaseReader):
    """Reads by means of other readers: for each tensor, one of them under the spec by which that one knows it."""

    __slots__ = ()

    @abstractmethod
    def inner(self, spec: TensorSpec) -> tuple[Reader, TensorSpec]:
        """The reader that has a tensor, and the tensor as it is there."""

    def access(self, spec: TensorSpec) -> Access:
        """As the tensor's reader says."""
        reader, stored = self.inner(spec)
        return reader.access(stored)

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """By the tensor's reader."""
        reader, stored = self.inner(spec)
        return reader.read(stored, region)

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """By the tensor's reader."""
        reader, stored = self.inner(spec)
        return reader.read_bytes(stored)

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """As the tensor's reader says."""
        reader, stored = self.inner(spec)
        return reader.extents(stored)

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """By the tensor's reader."""
        reader, stored = self.inner(spec)
        reader.fill(stored, region, buffer)

    def stream(self, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        """By the tensor's reader."""
        reader, stored = self.inner(spec)
        return reader.stream(stored, cell)

    def overhead(self, spec: TensorSpec, region: Region) -> int:
        """As the tensor's reader says."""
        reader, stored = self.inner(spec)
        return reader.overhead(stored, region)

    def held(self, spec: TensorSpec, cell: Region) -> int | None:
        """As the tensor's reader says."""
        reader, stored = self.inner(spec)
        return reader.held(stored, cell)


def with_access(reader: Any) -> Reader:
    """A reader that says how its bytes can be had; one that does not is asked which of the former additions it has.

    Readers of plug-ins may have been written when `access` was not there: with nothing but `read`, `read_bytes`,
    `extents`, `absent`, `companion`, `members` and `close`, or with `held` and `stream`, `cheap` and `region`, `fill`
    and `overhead`, or `shortfall` besides.
    """
    return reader if _has(reader, "access") else cast("Reader", _PlainReader(reader))


def _has(reader: Any, name: str) -> bool:
    """Whether a reader has a method of its own: one that names the protocol as its base inherits empty ones."""
    empty = getattr(Reader, name, reader)
    return hasattr(reader, name) and getattr(type(reader), name, None) is not empty


class _PlainReader:
    """A reader of a plug-in, with what it lacks; everything that it has is its own."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        if _has(self._plain, name):
            return getattr(self._plain, name)
        return getattr(BaseReader, name).__get__(self)

    def access(self, spec: TensorSpec) -> Access:
        """What the methods of the plug-in's reader amount to."""
        plain, fills = self._plain, _has(self._plain, "fill")
        extents = plain.extents(spec)
        if extents is not None:
            return Access("raw", extents, gridded=False, computes=fills)
        any_part = _has(plain, "cheap") and plain.cheap(spec)
        if any_part or fills:
            return Access("regions", gridded=not any_part, computes=fills)
        return Access("stream" if _has(plain, "stream") else "whole")

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with a region, as the plug-in's reader does it."""
        plain = self._plain
        if _has(plain, "fill"):
            plain.fill(spec, region, buffer)
        elif _has(plain, "cheap") and plain.cheap(spec):
            plain.region(spec, region, buffer)
        else:
            buffer[:] = _bytes_of(plain.read(spec, region))


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(cast("Any", array.reshape(-1).view("u1")))


def __getattr__(name: str) -> Any:
    """Names of earlier releases, for plug-ins."""
    from wherry.formats.former import former

    return former(__name__, name)
