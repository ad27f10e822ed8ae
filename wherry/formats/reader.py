"""What a Reader or Writer may add: regions that no chunk grid was made for, and where bytes will lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, Span, TensorSpec


@runtime_checkable
class FillingReader(Protocol):
    """What a Reader may add: putting a region into memory of the caller."""

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with the canonical bytes of a region."""
        ...

    def overhead(self, spec: TensorSpec, region: Region) -> int:
        """Bytes that filling holds beside the buffer."""
        ...


@runtime_checkable
class RegionReader(Protocol):
    """What a Reader of chunks may add: saying that any region of a tensor is read without decoding whole chunks."""

    def cheap(self, spec: TensorSpec) -> bool:
        """Whether bytes of it are read as they are asked for."""
        ...

    def region(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with the canonical bytes of a region of such a tensor."""
        ...


@runtime_checkable
class PlacingWriter(Protocol):
    """What a Writer may add that puts canonical bytes into files as they are."""

    def place(self, path: KeyPath, where: Region | Span) -> int | None:
        """Where in its file the first byte will lie; memory with the same offset in a page goes straight to disk.

        None where bytes are encoded on the way.
        """
        ...
