"""Writer: the interface through which the engine writes one checkpoint into a staging location.

`Writer` implements everything except `write`, `sync`, `finish` and `close`, for writers that accept any span and encode
bytes before they write them; a writer overrides what it does differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, Span, TensorSpec
    from wherry.formats.contents import EncodedChunk, Extent

    # Start, stop and checksum of pieces of a tensor.
    Checks: TypeAlias = Sequence[tuple[int, int, int]]


class Writer(ABC):
    """Writes one checkpoint into a staging location."""

    __slots__ = ()

    def grid(self, path: KeyPath) -> tuple[int, ...] | None:  # noqa: ARG002  overridden
        """Extents of the natural region of a tensor; None where any span can be written."""
        return None

    def place(self, path: KeyPath, where: Region | Span) -> int | None:  # noqa: ARG002  overridden
        """The offset of the first byte in its file; memory at the same offset within a page can use direct I/O.

        None if the bytes are encoded before they are written.
        """
        return None

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:  # noqa: ARG002  overridden
        """The byte ranges of staged files that hold canonical bytes which `write` gets, in order.

        None if the bytes are encoded before they are written.
        """
        return None

    def lengths(self, spec: TensorSpec) -> Sequence[int]:  # noqa: ARG002  overridden
        """Bytes of each byte range of a tensor; none of one that is encoded or written on a grid."""
        return ()

    def encoded(self, path: KeyPath, where: Region) -> EncodedChunk | None:  # noqa: ARG002  overridden
        """A chunk that `write` got and encoded into one byte range of a staged file; None for other chunks."""
        return None

    @abstractmethod
    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write canonical bytes at a region (gridded tensors, whole natural regions) or span (the others)."""

    def write_all(self, parts: Sequence[tuple[KeyPath, Span, memoryview]]) -> None:
        """Write spans of several tensors that are not gridded, as `write` does with each."""
        for path, where, data in parts:
            self.write(path, where, data)

    def stored(self, path: KeyPath, where: Region | Span) -> bool:  # noqa: ARG002  overridden
        """Whether bytes that `write` got are durable after a `sync`; in a store of objects, a part has to be sent."""
        return True

    def is_durable_by_sync(self) -> bool:
        """Whether a `sync` makes everything durable and no checksums are needed, so that no part is asked for."""
        return False

    def checks(self, path: KeyPath, where: Span) -> Checks:  # noqa: ARG002  overridden
        """Checksums of stored bytes that `finish` needs, and that cannot be computed again from a store."""
        return ()

    def restore(self, path: KeyPath, where: Span, checks: Checks) -> None:  # noqa: B027  most need nothing
        """Take up bytes that an earlier run has stored, with their checksums; they are not written again."""

    @abstractmethod
    def sync(self) -> None:
        """Make everything written so far durable: contents, names, and the folders that hold the names.

        Several threads may call it at once. No call returns before everything that was written before the call is
        durable, even if another call is already syncing it.
        """

    @abstractmethod
    def finish(self) -> None:
        """Complete the container; idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources, whether the container is finished or not."""
