"""coded_reader: makes the codes and scales of plain tensors as they are read, any region of them.

A region is made in bands of whole blocks, so the memory that it takes does not depend on the tensor. How far the codes
are from the values is measured on the way; codes for scales that were kept must mean the values exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.errors import MismatchError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.contents import Contents
from wherry.mover.decode import Parts
from wherry.mover.read import memory_for, read_array
from wherry.quantized.codes import code_table, scale_values
from wherry.quantized.encode import block_scales, encode, largest_error, pack_codes
from wherry.quantized.measured_view import MeasuringReader

if TYPE_CHECKING:
    import numpy as np

    from wherry.quantized.tensors import QuantizedTensor

_BAND = 1 << 18  # elements that are encoded at a time, or one block
_WORKING = 32  # bytes of memory for each of them


class Role(NamedTuple):
    """What a tensor of the quantised checkpoint is: `codes`, `scales` or `shape` of a tensor."""

    name: str
    tensor: QuantizedTensor


class CodedReader(MeasuringReader):
    """A reader of codes and scales over plain tensors; used from several threads."""

    def __init__(
        self,
        reader: Contents,
        plain: Mapping[KeyPath, TensorSpec],
        roles: Mapping[KeyPath, Role],
        files: Mapping[str, bytes],
        kept: Checkpoint | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            reader: of the plain checkpoint; it is closed together with this reader.
            plain: its tensors.
            roles: what is made of them, by key path.
            files: companion files that differ, by name.
            kept: a checkpoint that has the scales; closed together with this reader.
        """
        super().__init__(reader, plain, files)
        self._roles = roles
        self._kept = kept
        self._scales = Parts(kept.reader, kept.manifest.tensors) if kept else None

    def is_computed(self, spec: TensorSpec) -> bool:
        """Whether the tensor has codes, scales or a shape."""
        return spec.path in self._roles

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray) -> None:
        """Make a region of codes, scales or a shape.

        Raises:
            MismatchError: scales were kept, and a value is none that a code means.
        """
        role = self._roles[spec.path]
        if role.name == "shape":
            out[...] = role.tensor.shape[region[0]]
            return
        if role.name == "scales" and self._kept is not None:
            out[...] = read_array(self._kept.reader, spec, region)
            return
        try:
            (self._make_codes if role.name == "codes" else self._make_scales)(role, region, out)
        finally:
            self._parts.release()
            if self._scales is not None:
                self._scales.release()

    def memory(self, spec: TensorSpec, region: Region) -> int:
        """Memory for one band of whole blocks, and for what reading the plain tensor takes."""
        role = self._roles[spec.path]
        if role.name == "shape":
            return 0
        if role.name == "scales" and self._kept is not None:
            return memory_for(self._kept.reader.access(spec), spec, region) + spec.nbytes
        tensor = role.tensor
        elements = _wide(tensor, _elements(role, region))
        columns = elements[-1].stop - elements[-1].start
        band = min(max(_BAND, tensor.block[-2] * columns), math.prod(region_shape(elements)))
        first = next(_bands(tensor, elements), elements)
        plain = self._stored[tensor.plain.path]
        return _WORKING * band + memory_for(self.base.access(plain), plain, _of_plain(tensor, first))

    def close(self) -> None:
        """Close the readers below."""
        super().close()
        if self._kept is not None:
            self._kept.close()

    def _make_scales(self, role: Role, region: Region, out: np.ndarray) -> None:
        tensor = role.tensor
        for band in _bands(tensor, _wide(tensor, _elements(role, region))):
            largest = _largest(self._values(tensor, band), tensor.block)
            at = tuple(
                slice(part.start // size - start.start, -(-part.stop // size) - start.start)
                for part, size, start in zip(band, tensor.block, region, strict=True)
            )
            out[at] = block_scales(largest, tensor.code, tensor.scales.dtype).reshape(out[at].shape)

    def _make_codes(self, role: Role, region: Region, out: np.ndarray) -> None:
        tensor, elements = role.tensor, _elements(role, region)
        flat = out.view("u1").reshape(*region_shape(elements)[:-1], -1)
        # The bytes of each block that are wanted, and how many it has; None for codes without a dimension of their own.
        inside = (region[-1], tensor.codes.shape[-1]) if len(region) > len(tensor.shape) else None
        for band in _bands(tensor, _wide(tensor, elements)):
            made = pack_codes(self._codes(tensor, band), tensor.code)
            rows = slice(max(band[-2].start, elements[-2].start), min(band[-2].stop, elements[-2].stop))
            per = made.shape[1] / (band[-1].stop - band[-1].start)  # bytes of a code
            columns = slice(
                int((elements[-1].start - band[-1].start) * per),
                int((elements[-1].stop - band[-1].start) * per),
            )
            part = made[rows.start - band[-2].start : rows.stop - band[-2].start, columns]
            if inside is not None:  # a part of each block's bytes
                part = part.reshape(part.shape[0], -1, inside[1])[:, :, inside[0]].reshape(part.shape[0], -1)
            lead = tuple(one.start - first.start for one, first in zip(band[:-2], elements[:-2], strict=True))
            flat[(*lead, slice(rows.start - elements[-2].start, rows.stop - elements[-2].start))] = part

    def _values(self, tensor: QuantizedTensor, band: Region) -> np.ndarray:
        """The plain values of a band of one matrix: float32 [rows, columns]."""
        import numpy as np

        shape = region_shape(_of_plain(tensor, band))[-2:]
        read = self._parts.read(tensor.plain.path, _of_plain(tensor, band)).reshape(shape)
        return np.ascontiguousarray((read.T if tensor.transposed else read).astype(np.float32))

    def _codes(self, tensor: QuantizedTensor, band: Region) -> np.ndarray:
        """The codes of a band of whole blocks, a byte each."""
        import numpy as np

        values = self._values(tensor, band)
        if self._scales is not None:
            return self._kept_codes(tensor, band, values)
        largest = _largest(values, tensor.block)
        stored = block_scales(largest, tensor.code, tensor.scales.dtype)
        wide, tops = (_block_numbers(one, tensor.block, values.shape) for one in (stored, largest))
        codes = encode(values, wide, tensor.code, largest=tops)
        error = np.abs(code_table(tensor.code)[codes] * scale_values(wide, tensor.code) - values)
        worst = np.max(error, initial=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(tops > 0, error / tops, 0)
        self.measured.add(float(worst), float(np.max(shares, initial=0)) / largest_error(tensor.code))
        return codes

    def _kept_codes(self, tensor: QuantizedTensor, band: Region, values: np.ndarray) -> np.ndarray:
        """The codes whose products with the kept scales are the values."""
        import numpy as np

        assert self._scales is not None
        grid = tuple(
            slice(part.start // size, -(-part.stop // size))
            for part, size in zip(band, tensor.block, strict=True)
        )
        part = tensor.scales.whole if tensor.scales.size == 1 else grid[: len(tensor.scales.shape)]
        stored = self._scales.read(tensor.scales.path, part).reshape(region_shape(grid)[-2:])
        wide = _block_numbers(stored, tensor.block, values.shape)
        codes = encode(values, wide, tensor.code)
        kind = dtypes.numpy_dtype(self._stored[tensor.plain.path].dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            meant = (code_table(tensor.code)[codes] * scale_values(wide, tensor.code)).astype(kind)
        if not np.array_equal(meant.astype(np.float32), values, equal_nan=True):
            raise MismatchError(
                f"a value of {tensor.plain.name} is not the product of a {tensor.code} code and its kept scale",
                path=tensor.plain.name,
                cure="the weights changed since they were dequantised: leave scales out, and new ones are computed",
            )
        return codes


def _elements(role: Role, region: Region) -> Region:
    """The elements, in the order of the codes, that a region of codes or scales is made of."""
    tensor = role.tensor
    if role.name == "scales":
        return tuple(
            slice(part.start * size, min(part.stop * size, extent))
            for part, size, extent in zip(region, tensor.block, tensor.shape, strict=True)
        )
    counted = region[: len(tensor.shape)]
    last = slice(counted[-1].start * tensor.unit, counted[-1].stop * tensor.unit)
    return (*counted[:-1], last)


def _wide(tensor: QuantizedTensor, elements: Region) -> Region:
    """The whole blocks of which elements are a part."""
    return tuple(
        slice(part.start // size * size, min(-(-part.stop // size) * size, extent))
        for part, size, extent in zip(elements, tensor.block, tensor.shape, strict=True)
    )


def _bands(tensor: QuantizedTensor, elements: Region) -> Iterator[Region]:
    """Bands of whole rows of blocks of one matrix each."""
    rows, columns = tensor.block[-2], max(region_shape(elements)[-1], 1)
    step = max(_BAND // columns // rows, 1) * rows
    for place in product(*(range(part.start, part.stop) for part in elements[:-2])):
        outer = tuple(slice(index, index + 1) for index in place)
        for start in range(elements[-2].start, elements[-2].stop, step):
            yield (*outer, slice(start, min(start + step, elements[-2].stop)), elements[-1])


def _of_plain(tensor: QuantizedTensor, region: Region) -> Region:
    """A region of the codes' elements as one of the plain tensor."""
    return (*region[:-2], region[-1], region[-2]) if tensor.transposed else region


def _largest(values: np.ndarray, block: tuple[int, ...]) -> np.ndarray:
    """The largest magnitude of each block: float32 [block rows, block columns]."""
    import numpy as np

    sizes = np.abs(values)
    rows, columns = (
        np.arange(0, extent, size) for extent, size in zip(values.shape, block[-2:], strict=True)
    )
    return np.maximum.reduceat(np.maximum.reduceat(sizes, columns, axis=1), rows, axis=0)


def _block_numbers(blocks: np.ndarray, block: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The number of each block for each of its values: [rows, columns]."""
    import numpy as np

    wide = np.repeat(blocks, block[-1], axis=1)[:, : shape[1]] if blocks.shape[1] > 1 else blocks
    return np.repeat(wide, block[-2], axis=0)[: shape[0]] if blocks.shape[0] > 1 else wide
