"""Four-bit floats, the one type that flat containers pack.

There are two per byte on disk, the even element in the low nibble (the order of the
safetensors specification and of torch's float4_e2m1fn_x2), one byte per element in canonical form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.tensorspec import Region, Span, TensorSpec
from wherry.errors import UnrepresentableError
from wherry.formats.contents import Computed, Extent
from wherry.mover.read import region_bytes
from wherry.mover.regions import fill_region, read_span

if TYPE_CHECKING:
    import numpy as np


PACKED = "float4_e2m1fn"
_NIBBLE = 0x0F


def stored_size(spec: TensorSpec) -> int:
    """Size in bytes of a tensor in its file; a trailing half byte counts as a byte."""
    return (spec.size + 1) // 2 if spec.dtype == PACKED else spec.nbytes


def packed_access(spec: TensorSpec, extents: tuple[Extent, ...]) -> Computed:
    """How a tensor of packed elements is read.

    Args:
        spec: the tensor.
        extents: the extents of its stored bytes, in order.
    """

    def read(first: int, buffer: memoryview) -> None:
        # An element is a byte in memory and half a byte on disk.
        stop = first + len(buffer)
        stored = bytearray((stop + 1) // 2 - first // 2)
        read_span(extents, Span(first // 2, (stop + 1) // 2), memoryview(stored), spec)
        buffer[:] = unpack_nibbles(stored)[first % 2 : first % 2 + len(buffer)].data

    def fill(region: Region, out: memoryview) -> None:
        fill_region(spec, region, read, out)

    return Computed(fill, lambda region: 2 * region_bytes(spec, region))


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
