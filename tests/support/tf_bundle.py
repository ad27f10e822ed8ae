"""A TensorFlow bundle written by hand: an index (a table of protocol buffers) and one file of data."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import google_crc32c

if TYPE_CHECKING:
    import numpy as np

MAGIC = 0xDB4775248B80FB57
TYPES = {"float32": 1, "int32": 3, "int64": 9}


def varint(value: int) -> bytes:
    head = b""
    while value >= 0x80:
        head, value = head + bytes([value & 0x7F | 0x80]), value >> 7
    return head + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    """A field of a message: a number, or bytes."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def block(rows: dict[bytes, bytes]) -> bytes:
    """A block of a table with its type and its masked CRC-32C."""
    body = b"".join(
        varint(0) + varint(len(key)) + varint(len(value)) + key + value for key, value in sorted(rows.items())
    )
    data = body + struct.pack("<2I", 0, 1) + b"\0"
    return data + masked(data)


def masked(data: bytes) -> bytes:
    """The CRC-32C of bytes as it is stored."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def entry(array: np.ndarray, offset: int, size: int) -> bytes:
    shape = b"".join(field(2, field(1, extent)) for extent in array.shape)
    head = field(1, TYPES[array.dtype.name]) + field(2, shape) + field(4, offset) + field(5, size)
    return head + varint(6 << 3 | 5) + masked(array.tobytes())


def write(folder, arrays: dict[str, np.ndarray], *, sizes: dict[str, int] | None = None):
    """Write a bundle; `sizes` states other sizes in the index than the arrays have."""
    folder.mkdir()
    rows, data = {b"": field(1, 1)}, b""
    for name, array in arrays.items():
        rows[name.encode()] = entry(array, len(data), (sizes or {}).get(name, array.nbytes))
        data += array.tobytes()
    (folder / "ckpt.data-00000-of-00001").write_bytes(data)
    first, empty = block(rows), block({})
    places = [varint(0) + varint(len(first) - 5)]
    places.append(varint(len(first)) + varint(len(empty) - 5))
    index = block({max(rows): places[0]})
    places.append(varint(len(first + empty)) + varint(len(index) - 5))
    footer = (places[1] + places[2]).ljust(40, b"\0") + struct.pack("<Q", MAGIC)
    (folder / "ckpt.index").write_bytes(first + empty + index + footer)
    return folder
