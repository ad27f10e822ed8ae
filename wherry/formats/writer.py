"""Writer: how the engine puts the bytes of one checkpoint into a staging location that does not carry the final name.

`BaseWriter` has everything but `write` and `finish`; a writer overrides what it does otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, Span

    PlaceFunction: TypeAlias = Callable[[KeyPath, Region | Span], int | None]


class Writer(Protocol):
    """Writes one checkpoint into a staging location."""

    def grid(self, path: KeyPath) -> tuple[int, ...] | None:
        """Extents of the natural region of a tensor; None where any span can be written."""
        ...

    def place(self, path: KeyPath, where: Region | Span) -> int | None:
        """Where in its file the first byte will lie; memory with the same offset in a page goes straight to disk.

        None where bytes are encoded on the way.
        """

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write canonical bytes at a region (gridded tensors, whole natural regions) or span (the others)."""

    def sync(self) -> None:
        """Make durable what was written so far: contents, names, and the folders that hold the names.

        Several threads may call it at once; no call returns before everything that was written before it is durable,
        also where another call is already at work on it.
        """

    def finish(self) -> None:
        """Complete the container; idempotent."""

    def close(self) -> None:
        """Release what is held, finished or not."""


class BaseWriter:
    """What many writers have in common: any span is taken, and bytes are encoded on the way."""

    __slots__ = ()

    def grid(self, path: KeyPath) -> tuple[int, ...] | None:  # noqa: ARG002  of the protocol
        """Any span can be written."""
        return None

    def place(self, path: KeyPath, where: Region | Span) -> int | None:  # noqa: ARG002  of the protocol
        """Bytes are encoded on the way."""
        return None


class WriterOver(BaseWriter):
    """Writes its tensors by another writer, whose container is a part of its own."""

    _item: Writer

    def grid(self, path: KeyPath) -> tuple[int, ...] | None:
        """As the other writer says."""
        return self._item.grid(path)

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write by the other writer, which raises what it raises."""
        self._item.write(path, where, data)

    def sync(self) -> None:
        """Make durable what the other writer has."""
        self._item.sync()

    def close(self) -> None:
        """Close the other writer."""
        self._item.close()


def place_of(writer: Any) -> PlaceFunction:
    """`place` of a writer; a plug-in's writer may have been written when there was none."""
    return getattr(writer, "place", BaseWriter().place)
