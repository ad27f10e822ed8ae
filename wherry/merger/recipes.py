"""Recipes: how the elements of a merged tensor are computed from regions of source tensors.

Arithmetic is in float32, in float64 where an element type is wider; the result is rounded to the target's type once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wherry.core import dtypes
from wherry.core.dtypes import canonical_size
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.layout.copies import Read

if TYPE_CHECKING:
    import numpy as np


_SINGLE, _DOUBLE = "float32", "float64"


class Recipe(Protocol):
    """What a merged tensor is made of."""

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """The source tensors."""
        ...

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements of a region, not yet rounded.

        Args:
            region: of the merged tensor.
            read: returns the elements of a region of a source tensor.
        """
        ...

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """Bytes that `values` holds for a region, its result included."""
        ...


@dataclass(frozen=True, slots=True)
class UnchangedTensor:
    """The elements of one source tensor, unchanged."""

    source: KeyPath

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """The one source tensor."""
        return (self.source,)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements themselves."""
        return read(self.source, region)

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """The elements themselves."""
        return _nbytes(specs[self.source].dtype, region)


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of source tensors of one shape, each times its weight, added in their order."""

    terms: tuple[tuple[KeyPath, float], ...]

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """The source tensors, in the order in which they are added."""
        return tuple(path for path, _weight in self.terms)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """Σ weight × element."""
        (path, weight), *rest = self.terms
        total = _wide(read(path, region))
        total *= total.dtype.type(weight)
        for path, weight in rest:
            term = _wide(read(path, region))
            term *= term.dtype.type(weight)
            total += term
        return total

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """The sum, one term, and the elements that it is made of."""
        dtype = specs[self.terms[0][0]].dtype
        return 2 * _nbytes(_wide_name(dtype), region) + _nbytes(dtype, region)


@dataclass(frozen=True, slots=True)
class LowRank:
    """A matrix plus the scaled product of two narrow ones: W + s·B·A, or W + s·(B·A)ᵀ.

    Attributes:
        base: W, [out, in]; [in, out] if transposed.
        down: A, [rank, in].
        up: B, [out, rank].
        rank: rows of A, columns of B.
        scale: s.
        transposed: whether W has its inputs first.
    """

    base: KeyPath
    down: KeyPath
    up: KeyPath
    rank: int
    scale: float
    transposed: bool = False

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """W, A and B."""
        return (self.base, self.down, self.up)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements of a region: of B only its rows are read, of A only its columns."""
        outs, ins = region[::-1] if self.transposed else region
        ranks = slice(0, self.rank)
        delta = _wide(read(self.up, (outs, ranks))) @ _wide(read(self.down, (ranks, ins)))
        delta *= delta.dtype.type(self.scale)
        base = _wide(read(self.base, region))
        base += delta.T if self.transposed else delta
        return base

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """W in float32 and as it is stored, the product, and the parts of A and B."""
        dtype = specs[self.base].dtype
        narrow = 2 * canonical_size(_DOUBLE, self.rank * sum(region_shape(region)))
        return 2 * _nbytes(_wide_name(dtype), region) + _nbytes(dtype, region) + narrow


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """A matrix whose rows, those of each output, are scaled to given lengths: DoRA, m · V / |V| with V = W + s·B·A.

    Attributes:
        matrix: V.
        magnitude: m, [out].
        inputs: the length of a row.
    """

    matrix: LowRank
    magnitude: KeyPath
    inputs: int

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """W, A, B and m."""
        return (*self.matrix.sources, self.magnitude)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements of a region; the lengths of its rows are computed from whole rows, piece by piece."""
        outs, ins = region[::-1] if self.matrix.transposed else region
        found = self.matrix.values(region, read)
        wanted = read(self.magnitude, (outs,)).astype(found.dtype)
        factor = wanted / self._lengths(outs, ins, found, read).astype(found.dtype)
        found *= factor if self.matrix.transposed else factor[:, None]
        return found

    def _lengths(self, outs: slice, ins: slice, found: np.ndarray, read: Read) -> np.ndarray:
        """The length of each row, of which `found` has the columns `ins`."""
        axis, width = (0 if self.matrix.transposed else 1), ins.stop - ins.start
        squares = (found.astype(_DOUBLE) ** 2).sum(axis)
        for first, last in ((0, ins.start), (ins.stop, self.inputs)):
            for start in range(first, last, width):
                part = slice(start, min(start + width, last))
                region = (part, outs) if self.matrix.transposed else (outs, part)
                squares += (self.matrix.values(region, read).astype(_DOUBLE) ** 2).sum(axis)
        return squares**0.5

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """The region, the squares of a part, and the part."""
        return 2 * self.matrix.memory(region, specs) + 2 * _nbytes(_DOUBLE, region)


@dataclass(frozen=True, slots=True)
class ExpertLowRank:
    """A matrix of each expert, or of one, plus the scaled product of its two narrow ones: W_e + s·B_e·A_e.

    The narrow matrices of all experts are two tensors: the rows of A are those of expert 0, then of expert 1; the
    columns of B are the first of each expert, then the second of each.

    Attributes:
        base: W, [expert, out, in], or of one expert [out, in]; with the last two exchanged if transposed.
        down: A, [experts · rank, in].
        up: B, [out, rank · experts].
        rank: rows of A, columns of B, of one expert.
        experts: their number.
        scale: s.
        transposed: whether W has its inputs first.
        expert: the expert of a matrix; None of the matrices of all.
        first: the row of the product that the first row of W gets: several tensors of a base are one for PEFT.
    """

    base: KeyPath
    down: KeyPath
    up: KeyPath
    rank: int
    experts: int
    scale: float
    transposed: bool = False
    expert: int | None = None
    first: int = 0

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """W, A and B."""
        return (self.base, self.down, self.up)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements of a region."""
        base = _wide(read(self.base, region))
        rows, columns = region[-2:]
        rows = slice(rows.start + self.first, rows.stop + self.first)
        outs, ins = (columns, rows) if self.transposed else (rows, columns)
        up = _wide(read(self.up, (outs, slice(0, self.rank * self.experts))))
        matrices, numbers = (base, range(region[0].start, region[0].stop))
        if self.expert is not None:
            matrices, numbers = base[None], range(self.expert, self.expert + 1)
        for place, number in enumerate(numbers):
            ranks = slice(number * self.rank, (number + 1) * self.rank)
            delta = up[:, number :: self.experts] @ _wide(read(self.down, (ranks, ins)))
            delta *= delta.dtype.type(self.scale)
            matrices[place] += delta.T if self.transposed else delta
        return base

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """W in float32 and as it is stored, the product of one expert, and the parts of A and B."""
        dtype, shape = specs[self.base].dtype, region_shape(region)
        narrow = 2 * canonical_size(_DOUBLE, self.rank * (self.experts + 1) * sum(shape[-2:]))
        return 2 * _nbytes(_wide_name(dtype), region) + _nbytes(dtype, region) + narrow


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """A matrix of which some rows are those of another tensor.

    Attributes:
        base: the matrix.
        rows: the tensor that holds the rows.
        numbers: the number in the matrix of each of its rows, each once.
    """

    base: KeyPath
    rows: KeyPath
    numbers: tuple[int, ...]

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """The matrix and the rows."""
        return (self.base, self.rows)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements of a region; each of the rows in it is read alone."""
        found = read(self.base, region).copy()
        lines, columns = region
        for place, number in enumerate(self.numbers):
            if lines.start <= number < lines.stop:
                row = read(self.rows, (slice(place, place + 1), columns))
                found[number - lines.start] = row[0].astype(found.dtype)
        return found

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """The region as it is read, its copy, and one row."""
        return 3 * _nbytes(specs[self.base].dtype, region)


def is_summable(dtype: str) -> bool:
    """Whether arithmetic in float32 or float64 holds the values of an element type."""
    return dtype.startswith(("float", "bfloat")) and dtype in dtypes.NUMPY


def _wide_name(dtype: str) -> str:
    return _DOUBLE if dtype == _DOUBLE else _SINGLE


def _wide(values: np.ndarray) -> np.ndarray:
    """A copy in the type of the arithmetic."""
    return values.astype(_wide_name(values.dtype.name))


def _nbytes(dtype: str, region: Region) -> int:
    return canonical_size(dtype, math.prod(region_shape(region)))
