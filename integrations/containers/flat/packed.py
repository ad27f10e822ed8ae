"""Tensors whose canonical bytes lie raw in files: a region is read with as few bytes as it needs.

Shared by every container that gives `Extent`s (safetensors, contiguous tensors of torch archives). Four-bit
floats are the one packed type: two per byte on disk, the even element in the low nibble (the order of the
safetensors specification and of torch's float4_e2m1fn_x2), one byte per element in canonical form.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import Span, TensorSpec, region_shape
from wherry.errors import UnrepresentableError
from wherry.mover.regions import read_span

if TYPE_CHECKING:
    import numpy as np

    from wherry.core.tensorspec import Region
    from wherry.formats.format import Extent

PACKED = "float4_e2m1fn"
_BAND = 1 << 20
_NIBBLE = 0x0F


def stored_size(spec: TensorSpec) -> int:
    """Bytes of a tensor as it lies in the file; a half byte at the end counts as one."""
    return (spec.size + 1) // 2 if spec.dtype == PACKED else spec.nbytes


def read_region(spec: TensorSpec, region: Region, extents: tuple[Extent, ...]) -> np.ndarray:
    """Read a region of a tensor that lies raw.

    Runs that are contiguous are read straight into the result; where the runs are short, a band of at most
    1 MiB that covers many of them is read once and cut.

    Args:
        spec: the tensor.
        region: slices with explicit bounds.
        extents: where its stored bytes lie, in order.

    Returns:
        A new C-order array of the region's shape.

    Raises:
        CorruptError: a file ends before the bytes that its metadata promises.
        StorageError: the storage failed.
    """
    import numpy as np

    result = np.empty(region_shape(region), dtypes.numpy_dtype(spec.dtype))
    if result.size:
        _Source(spec, extents).fill(result.reshape(result.shape or (1,)), region or (slice(0, 1),), 0, 0)
    return result


def read_stored(spec: TensorSpec, extents: tuple[Extent, ...]) -> bytes:
    """The stored bytes of a whole tensor, for types that numpy cannot hold."""
    buffer = bytearray(stored_size(spec))
    read_span(extents, Span(0, len(buffer)), memoryview(buffer), spec)
    return bytes(buffer)


class _Source:
    """One tensor in its files, addressed by element."""

    def __init__(self, spec: TensorSpec, extents: tuple[Extent, ...]) -> None:
        self._spec = spec
        self._extents = extents
        self._shape = spec.shape or (1,)

    def fill(self, out: np.ndarray, region: Region, axis: int, base: int) -> None:
        """Fill `out` from the block of `shape[axis:]` that begins at element `base`."""
        import numpy as np

        inner = math.prod(self._shape[axis + 1 :])
        rows, rest = region[axis], region[axis + 1 :]
        first, count = base + rows.start * inner, (rows.stop - rows.start) * inner
        if all(part == slice(0, extent) for part, extent in zip(rest, self._shape[axis + 1 :], strict=True)):
            self._elements(first, out.reshape(-1))
        elif count * out.itemsize <= _BAND:
            band = np.empty(count, out.dtype)
            self._elements(first, band)
            out[...] = band.reshape(-1, *self._shape[axis + 1 :])[(slice(None), *rest)]
        else:
            for index in range(out.shape[0]):
                self.fill(out[index], region, axis + 1, first + index * inner)

    def _elements(self, first: int, flat: np.ndarray) -> None:
        stop = first + flat.size
        if self._spec.dtype != PACKED:
            width = flat.itemsize
            self._bytes(Span(first * width, stop * width), flat.view("u1").data)
            return
        stored = bytearray((stop + 1) // 2 - first // 2)
        self._bytes(Span(first // 2, (stop + 1) // 2), memoryview(stored))
        flat.view("u1")[:] = unpack_nibbles(stored)[first % 2 : first % 2 + flat.size]

    def _bytes(self, span: Span, buffer: memoryview) -> None:
        read_span(self._extents, span, buffer, self._spec)


def unpack_nibbles(stored: bytes | bytearray | memoryview) -> np.ndarray:
    """Two elements of each byte, low nibble first, one uint8 per element."""
    import numpy as np

    packed = np.frombuffer(stored, "u1")
    return np.stack((packed & _NIBBLE, packed >> 4), axis=-1).reshape(-1)


def pack_nibbles(elements: memoryview, path: str) -> memoryview:
    """The inverse of `unpack_nibbles`.

    Raises:
        UnrepresentableError: a half byte would be left over, or an element has more than four bits.
    """
    import numpy as np

    whole = np.frombuffer(elements, "u1")
    if whole.size % 2:
        raise UnrepresentableError("an odd number of four-bit elements does not fill whole bytes", path=path)
    if whole.size and int(whole.max()) > _NIBBLE:
        raise UnrepresentableError("an element of a four-bit type has more than four bits", path=path)
    return (whole[0::2] | (whole[1::2] << 4)).data
