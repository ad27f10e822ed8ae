"""Decoding of a whole tensor: its blocks one after another, and its digest where they come in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.digest import LeafHasher
from wherry.core.tensorspec import row_bands
from wherry.formats.format import Reader, StreamingReader
from wherry.mover.move import cells
from wherry.mover.output import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.tensorspec import Region, TensorSpec

_BAND = 8 << 20


def blocks_of(reader: Reader, spec: TensorSpec) -> Iterator[tuple[Region, Iterator[memoryview]]]:
    """The boxes that a tensor is decoded in, each as pieces of canonical bytes that are valid until the next."""
    for cell in _cells(spec):
        if spec.chunks is not None and isinstance(reader, StreamingReader) and reader.held(spec, cell):
            yield from ((block.region, block.pieces) for block in reader.stream(spec, cell))
        else:
            yield cell, iter([as_bytes(reader.read(spec, cell))])


def _cells(spec: TensorSpec) -> Iterator[Region]:
    if spec.chunks is not None:
        return cells(spec.whole, spec.chunks)
    return (region for region, _span in row_bands(spec, _BAND, (1,) * len(spec.shape)))


class InOrder:
    """Hashes a tensor's bytes as long as they come one after another; chunks of inner axes do not."""

    def __init__(self, spec: TensorSpec) -> None:
        self._hasher: LeafHasher | None = LeafHasher(spec)
        self._position = 0

    def take(self, data: memoryview, offset: int) -> None:
        """The bytes at an offset."""
        if self._hasher is not None and offset == self._position:
            self._hasher.update(offset, data)
            self._position += len(data)
        else:
            self._hasher = None

    @property
    def whole(self) -> LeafHasher | None:
        """The hashed leaves, if all bytes came in order."""
        found = self._hasher
        return found if found is not None and self._position == found.spec.nbytes else None
