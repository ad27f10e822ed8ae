"""Reads the dequantised tensors of a checkpoint: any region, from the codes and scales of that region only.

A region is made in bands of rows that fit in the cache, so the memory that it takes does not depend on the tensor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from wherry import kernels
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.errors import CorruptError
from wherry.formats.contents import Absent, Contents
from wherry.layout.copies import permute
from wherry.layout.losses import errors_of, note, note_error
from wherry.mover.decode import Parts
from wherry.quantized.codes import (
    code_bits,
    code_table,
    decode,
    multiply,
    scale_values,
    subtract,
    unpack_rows,
)
from wherry.quantized.computed_reader import ComputedReader

if TYPE_CHECKING:
    import numpy as np

    from wherry.quantized.tensors import QuantizedTensor

_BAND = 1 << 18  # elements that are made at a time; with their scales they fit in the second-level cache
_LOOKED_UP = 4 * _BAND  # elements that are looked up at a time, each in three bytes
_WORKING = 20  # bytes of memory for each of them: code, value, scale, rounded value
# Bits of a code → elements of a block for which a table of all products costs less than it saves.
_LEAST_BLOCK = {8: 2048, 4: 32}
_CODES = 256  # of 8 bits
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


class DequantizedReader(ComputedReader):
    """A reader over a checkpoint with quantised tensors; used from several threads."""

    def __init__(
        self,
        reader: Contents,
        stored: Mapping[KeyPath, TensorSpec],
        quantized: Mapping[KeyPath, QuantizedTensor],
        files: Mapping[str, bytes],
    ) -> None:
        """Read nothing yet.

        Args:
            reader: of the stored checkpoint; it is closed together with this reader.
            stored: the stored tensors.
            quantized: the tensors that are dequantised, by their key path.
            files: companion files that differ from the stored ones, by name.
        """
        super().__init__(reader, stored, files)
        self._quantized = quantized
        self._parts = Parts(reader, stored)
        self._checked: set[KeyPath] = set()
        self._lock = threading.Lock()

    def is_computed(self, spec: TensorSpec) -> bool:
        """Whether the tensor is dequantised."""
        return spec.path in self._quantized

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray) -> None:
        """Dequantise a region.

        Raises:
            CorruptError: the checkpoint states another shape for the codes.
        """
        try:
            self._make_bands(self._quantized[spec.path], region, out)
        finally:
            self._parts.release()

    def compute_at(self, spec: TensorSpec, region: Region, out: np.ndarray) -> bool:
        """As `compute`, for a tensor that is dequantised."""
        if spec.path not in self._quantized:
            return False
        self.compute(spec, region, out)
        return True

    def memory(self, spec: TensorSpec, region: Region) -> int:
        """Memory for one band, and for the scales of the region."""
        found = self._quantized[spec.path]
        scales = math.prod(region_shape(_grid_region(found, _of_codes(found, region))))
        columns = region_shape(_of_codes(found, region))[-1]
        elements = min(max(_BAND, columns), math.prod(region_shape(region)))
        return _WORKING * elements + (8 if found.zeros is None else 32) * scales

    def absent(self) -> Iterable[Absent]:
        """Missing chunks, of a tensor that is dequantised under its own key path."""
        owners = {path: one.plain.path for one in self._quantized.values() for path in one.made_of}
        return (replace(one, path=owners.get(one.path, one.path)) for one in self.base.absent())

    def _make_bands(self, tensor: QuantizedTensor, region: Region, out: np.ndarray) -> None:
        import numpy as np

        self._require_shape(tensor)
        of_codes = _of_codes(tensor, region)
        grid, stored = _grid_region(tensor, of_codes), tensor.scales
        part = stored.whole if stored.size == 1 else grid[: len(stored.shape)]
        scales = scale_values(self._parts.read(stored.path, part), tensor.code).reshape(region_shape(grid))
        # The element at which the first of the scales begins.
        corner = tuple(one.start * size for one, size in zip(grid, tensor.block, strict=True))
        zeros = self._zeros(tensor, of_codes) if tensor.zeros is not None else None
        words = out.view(_WORDS[out.dtype.itemsize])
        words = words.swapaxes(-1, -2) if tensor.transposed else words
        wanted = _RegionToMake(tensor, of_codes, scales, zeros, corner, words, out.dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for wide in _bands(of_codes, _LOOKED_UP if wanted.has_tables else _BAND, tensor.block[-2]):
                if wanted.has_tables and self._look_up(wanted, wide):
                    continue
                for band in _bands(wide, _BAND):
                    self._multiply(wanted, band)

    def _multiply(self, wanted: _RegionToMake, band: Region) -> None:
        """Make a band: each code, less its zero point, times the scale of its block."""
        import numpy as np

        matrix, first, into = wanted.place(band)
        values = self._values(wanted.tensor, band)
        if wanted.zeros is not None:
            subtract(values, wanted.zeros[matrix], first, wanted.block)
        multiply(values, wanted.scales[matrix], first, wanted.block)
        made = np.ascontiguousarray(values.astype(wanted.dtype))
        note(values, made)
        _put(made.view(into.dtype), into)

    def _look_up(self, wanted: _RegionToMake, band: Region) -> bool:
        """Make a band whose blocks have one table of products each.

        A product of a code of one byte and the scale of its block is computed once for each code, not for each element.

        Returns:
            Whether that was done: not where values are lost, each of which is counted.
        """
        import numpy as np

        matrix, first, into = wanted.place(band)
        rows = len(into)
        top = first[0] // wanted.block[0]
        taken = wanted.scales[matrix][top : -(-(first[0] + rows) // wanted.block[0])]
        table = code_table(wanted.tensor.code)
        if wanted.zeros is not None:
            table = table - wanted.zeros[matrix][top : top + len(taken)][..., None]
        values = table * taken[..., None]
        made = values.astype(wanted.dtype)
        corner = (first[0] - top * wanted.block[0], first[1])
        stored, skip = self._codes(wanted.tensor, band)
        errors = errors_of(values, made)
        plain = into if into.itemsize in into.strides else np.empty(into.shape, into.dtype)
        orders = None if errors is None or errors.shape[-1] < _CODES else _orders(errors)
        seen = kernels.look_up(stored, made.view(into.dtype), orders, corner, wanted.block, plain, skip)
        if errors is not None and not note_error(float(errors.max(where=seen, initial=0))):
            return False
        if plain is not into:
            _put(plain, into)
        return True

    def _values(self, tensor: QuantizedTensor, band: Region) -> np.ndarray:
        """The codes of a band of one matrix as float32 [rows, columns], without zero points and scales."""
        stored, skip = self._codes(tensor, band)
        return decode(stored, tensor.code)[:, skip : skip + region_shape(band)[-1]]

    def _codes(self, tensor: QuantizedTensor, band: Region) -> tuple[np.ndarray, int]:
        """The bytes of a band's codes, uint8 [rows, bytes], and how many codes come before them in each row."""
        unit = tensor.unit
        steps = slice(band[-1].start // unit, -(-band[-1].stop // unit))
        inner = tensor.codes.whole[len(tensor.shape) :]
        stored = self._parts.read(tensor.codes.path, (*band[:-1], steps, *inner))
        rows = region_shape(band)[-2]
        return stored.reshape(rows, -1).view("u1"), band[-1].start - steps.start * unit

    def _zeros(self, tensor: QuantizedTensor, region: Region) -> np.ndarray:
        """The zero points of a region as float32, of the shape of its scales."""
        import numpy as np

        stored, grid, unit = tensor.zeros, _grid_region(tensor, region), tensor.unit
        assert stored is not None
        if unit == 1:
            part = stored.whole if stored.size == 1 else grid[: len(stored.shape)]
            return self._parts.read(stored.path, part).astype(np.float32).reshape(region_shape(grid))
        rows = grid[-2]
        words = slice(rows.start // unit, -(-rows.stop // unit))
        packed = self._parts.read(stored.path, (*grid[:-2], words, grid[-1]))
        first = words.start * unit
        return unpack_rows(packed, tensor.code, slice(rows.start - first, rows.stop - first))

    def _require_shape(self, tensor: QuantizedTensor) -> None:
        """Compare the shape that the checkpoint states for packed codes with the shape of the codes."""
        stated = tensor.shape_tensor
        if stated is None or tensor.plain.path in self._checked:
            return
        found = tuple(self._parts.read(stated.path, stated.whole).reshape(-1).tolist())
        if found != tensor.shape:
            raise CorruptError(
                f"{stated.name} states the shape {found}, but the codes have the shape {tensor.shape}",
                path=tensor.codes.name,
                cure="unsupported padding of packed rows, or a damaged file: compare it with the original",
            )
        with self._lock:
            self._checked.add(tensor.plain.path)


class _RegionToMake(NamedTuple):
    """A region of a tensor that is being made.

    Attributes:
        tensor: the tensor.
        region: of its codes.
        scales: of the region, with the rank of the codes.
        zeros: its zero points, of the shape of the scales; None without.
        corner: the element at which the first scale begins.
        words: receives the elements of the region, as plain words.
        dtype: of the elements.
    """

    tensor: QuantizedTensor
    region: Region
    scales: np.ndarray
    zeros: np.ndarray | None
    corner: tuple[int, ...]
    words: np.ndarray
    dtype: np.dtype

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return self.tensor.block[-2], self.tensor.block[-1]

    @property
    def has_tables(self) -> bool:
        """Whether the products of a block are looked up: not where that is no faster."""
        is_large = math.prod(self.block) >= _LEAST_BLOCK[code_bits(self.tensor.code)]
        return is_large and self.dtype.itemsize in (2, 4) and kernels.load() is not None

    def place(self, band: Region) -> tuple[tuple[int, ...], tuple[int, int], np.ndarray]:
        """The matrix of a band of rows, its first code counted from the matrix's first scale, and its words."""
        at = tuple(part.start - first.start for part, first in zip(band, self.region, strict=True))
        places = tuple(part.start - start for part, start in zip(band, self.corner, strict=True))
        matrix = tuple(place // size for place, size in zip(places, self.tensor.block, strict=True))[:-2]
        rows = slice(at[-2], at[-2] + band[-2].stop - band[-2].start)
        return matrix, (places[-2], places[-1]), self.words[(*at[:-2], rows)]


def _put(words: np.ndarray, into: np.ndarray) -> None:
    """Copy a band to its place, row by row or column by column."""
    if into.strides[0] < into.strides[1]:
        words, into = words.T, into.T
    permute(words, into)


def _orders(errors: np.ndarray) -> np.ndarray:
    """The codes of each block, uint8, in the order of their errors."""
    import numpy as np

    # Errors are not negative, so that they have the order of their bits.
    keys = errors.view(np.uint32).astype(np.uint64) << np.uint64(8) | np.arange(_CODES, dtype=np.uint64)
    keys.sort(axis=-1)
    return keys.astype(np.uint8)


def _of_codes(tensor: QuantizedTensor, region: Region) -> Region:
    """A region of the dequantised tensor, as a region of the codes."""
    return (*region[:-2], region[-1], region[-2]) if tensor.transposed else region


def _grid_region(tensor: QuantizedTensor, region: Region) -> Region:
    """The scales of a region of codes."""
    return tuple(
        slice(part.start // size, -(-part.stop // size))
        for part, size in zip(region, tensor.block, strict=True)
    )


def _bands(region: Region, most: int, multiple: int = 1) -> Iterator[Region]:
    """Bands of rows of one matrix each, of so many elements at most where a row has no more.

    They end at multiples of a number of rows where they can.
    """
    step = max(most // max(region_shape(region)[-1], 1), 1)
    for place in product(*(range(part.start, part.stop) for part in region[:-2])):
        outer = tuple(slice(index, index + 1) for index in place)
        start, end = region[-2].start, region[-2].stop
        while start < end:
            stop = min(start + step, end)
            whole = stop // multiple * multiple
            stop = whole if start < whole and stop < end else stop
            yield (*outer, slice(start, stop), region[-1])
            start = stop
