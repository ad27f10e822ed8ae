"""Reads regions of tensors that are stored raw in files, with as few bytes as possible.

Shared by every container that gives `Extent`s (safetensors, contiguous tensors of torch archives). Four-bit
floats are the one packed type: two per byte on disk, the even element in the low nibble (the order of the
safetensors specification and of torch's float4_e2m1fn_x2), one byte per element in canonical form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import Span, TensorSpec, region_shape
from wherry.errors import UnrepresentableError
from wherry.mover.regions import RawBytes, fill_region, read_span

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from wherry.core.tensorspec import Region
    from wherry.formats.reader import Extent

PACKED = "float4_e2m1fn"
_NIBBLE = 0x0F


def stored_size(spec: TensorSpec) -> int:
    """Size in bytes of a tensor in its file; a trailing half byte counts as a byte."""
    return (spec.size + 1) // 2 if spec.dtype == PACKED else spec.nbytes


def read_region(spec: TensorSpec, region: Region, extents: tuple[Extent, ...]) -> np.ndarray:
    """Read a region of a tensor that is stored raw.

    Args:
        spec: the tensor.
        region: slices with explicit bounds.
        extents: the extents of its stored bytes, in order.

    Returns:
        A new C-order array of the region's shape.

    Raises:
        CorruptError: a file is shorter than its metadata says.
        StorageError: the storage failed.
    """
    import numpy as np

    result = np.empty(region_shape(region), dtypes.numpy_dtype(spec.dtype))
    read = _unpacker(spec, extents) if spec.dtype == PACKED else RawBytes(extents, spec)
    fill_region(spec, region, read, result.reshape(-1).view("u1").data)
    return result


def read_stored(spec: TensorSpec, extents: tuple[Extent, ...]) -> bytes:
    """The stored bytes of a whole tensor, for types that numpy cannot hold."""
    buffer = bytearray(stored_size(spec))
    read_span(extents, Span(0, len(buffer)), memoryview(buffer), spec)
    return bytes(buffer)


def _unpacker(spec: TensorSpec, extents: tuple[Extent, ...]) -> Callable[[int, memoryview], None]:
    """A function that fills a buffer from an element on; an element is a byte in memory and half a byte on disk."""

    def read(first: int, buffer: memoryview) -> None:
        stop = first + len(buffer)
        stored = bytearray((stop + 1) // 2 - first // 2)
        read_span(extents, Span(first // 2, (stop + 1) // 2), memoryview(stored), spec)
        buffer[:] = unpack_nibbles(stored)[first % 2 : first % 2 + len(buffer)].data

    return read


def unpack_nibbles(stored: bytes | bytearray | memoryview) -> np.ndarray:
    """The two elements of each byte, low nibble first, as one uint8 per element."""
    import numpy as np

    packed = np.frombuffer(stored, "u1")
    return np.stack((packed & _NIBBLE, packed >> 4), axis=-1).reshape(-1)


def pack_nibbles(elements: memoryview, path: str) -> memoryview:
    """The inverse of `unpack_nibbles`.

    Raises:
        UnrepresentableError: the number of elements is odd, or an element has more than four bits.
    """
    import numpy as np

    whole = np.frombuffer(elements, "u1")
    if whole.size % 2:
        raise UnrepresentableError(
            f"cannot pack an odd number of four-bit elements into whole bytes: {whole.size}", path=path
        )
    if whole.size and int(whole.max()) > _NIBBLE:
        raise UnrepresentableError(
            f"element out of range for a four-bit type: {int(whole.max())} exceeds {_NIBBLE}", path=path
        )
    return (whole[0::2] | (whole[1::2] << 4)).data
