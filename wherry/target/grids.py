"""Grids: the chunks of the tensors that are written on a grid, by their numbers; nothing is kept for each chunk.

The chunks of a target are numbered one after another, each tensor's in C order.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from wherry.core import dtypes
from wherry.errors import UsageError

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec


class TensorChunk(NamedTuple):
    """A chunk of a tensor.

    Attributes:
        spec: the tensor.
        cell: index of the chunk in the grid.
    """

    spec: TensorSpec
    cell: tuple[int, ...]

    @property
    def region(self) -> Region:
        """The part of the tensor that it holds."""
        spec = self.spec
        return tuple(
            slice(at * step, min((at + 1) * step, extent))
            for at, step, extent in zip(self.cell, spec.chunks or (), spec.shape, strict=True)
        )


class Grids:
    """The chunks of tensors, by their numbers; a tensor takes some 100 bytes, and a chunk none."""

    __slots__ = ("_firsts", "_rows", "specs")

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        """Number the chunks.

        Args:
            specs: tensors with grids, none of them twice.

        Attributes:
            specs: the same, in their order.
        """
        self.specs = tuple(specs)
        self._rows = {spec.path: row for row, spec in enumerate(self.specs)}
        self._firsts = array("q", accumulate((math.prod(counts_of(spec)) for spec in self.specs), initial=0))

    def __len__(self) -> int:
        """Number of chunks."""
        return self._firsts[-1]

    def __contains__(self, path: KeyPath) -> bool:
        """Whether a tensor is written on a grid."""
        return path in self._rows

    def __getitem__(self, number: int) -> TensorChunk:
        """A chunk."""
        row = bisect_right(self._firsts, number) - 1
        spec, rest = self.specs[row], number - self._firsts[row]
        cell: list[int] = []
        for count in reversed(counts_of(spec)):
            rest, at = divmod(rest, count)
            cell.append(at)
        return TensorChunk(spec, tuple(reversed(cell)))

    def spec(self, path: KeyPath) -> TensorSpec:
        """A tensor."""
        return self.specs[self._rows[path]]

    def number(self, path: KeyPath, region: Region) -> int:
        """The number of a chunk.

        Args:
            path: of the tensor.
            region: the part of it that the chunk holds.

        Raises:
            UsageError: the region is not one whole chunk, which is shorter at the edge of the tensor.
        """
        row = self._rows[path]
        spec, number = self.specs[row], 0
        for part, step, extent in zip(region, spec.chunks or (), spec.shape, strict=True):
            at, odd = divmod(part.start, step)
            if odd or part.stop != min(part.start + step, extent):
                raise UsageError(f"region {region} is not one whole chunk of {spec.chunks}", path=spec.name)
            number = number * -(-extent // step) + at
        return self._firsts[row] + number


def counts_of(spec: TensorSpec) -> tuple[int, ...]:
    """Number of chunks along each axis."""
    return tuple([-(-extent // step) for extent, step in zip(spec.shape, spec.chunks or (), strict=True)])


def chunk_bytes(spec: TensorSpec) -> int:
    """Bytes of a whole chunk before it is encoded, with the padding at the edge of the tensor."""
    return dtypes.canonical_size(spec.dtype, math.prod(spec.chunks or ()))


class ChunkCodec(Protocol):
    """How the elements of chunks are stored; used from several threads."""

    @property
    def plain(self) -> bool:
        """Whether a stored chunk has as many bytes as its elements and their padding."""
        ...

    def unchanged(self, region: Region, spec: TensorSpec) -> bool:
        """Whether a chunk is stored as its canonical bytes, with zeros after them at the edge of the tensor."""
        ...

    def encode(self, data: memoryview, region: Region, spec: TensorSpec) -> memoryview:
        """The stored bytes of a chunk, valid until this thread encodes the next one.

        Args:
            data: its canonical bytes, without padding.
            region: the part of the tensor that it holds.
            spec: the tensor.

        Returns:
            The bytes; of a plain chunk, zeros at the end may be left out.
        """
        ...

    def decoding(self, spec: TensorSpec) -> Hashable:
        """Everything besides the stored bytes that the elements of a tensor's chunks depend on."""
        ...

    def decode(
        self, data: memoryview, region: Region, spec: TensorSpec, name: str
    ) -> Iterator[tuple[Region, Iterator[memoryview]]]:
        """The elements of an encoded chunk.

        Args:
            data: its stored bytes.
            region: the part of the tensor that it holds.
            spec: the tensor.
            name: the chunk's, for errors.

        Returns:
            Boxes of elements in C order, in pieces; they may extend beyond the edge of the tensor.

        Raises:
            CorruptError: the bytes cannot be decoded.
        """
        ...


class ChunkPlace(NamedTuple):
    """Where a chunk is.

    Attributes:
        file: the file, relative to the folder of the chunks.
        offset: of its first byte.
        nbytes: its stored bytes, padding included.
        stop: where the zeros after it end that belong to nothing else.
    """

    file: str
    offset: int
    nbytes: int
    stop: int
