"""The heads of msgpack objects, as msgpack-python with `use_bin_type` writes them: as short as they can be.

Texts and maps can also be given a longer head; `msgpack_contents` says what that marks.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from wherry.integrations.containers.msgpack.contents import EMPTY_MARKS

if TYPE_CHECKING:
    from collections.abc import Mapping

_WIDTHS = {kind: width for width, kind in EMPTY_MARKS.items()}
# Bytes of a head → its first byte, and its form.
_TEXT_HEADS = {1: (0xA0, ""), 2: (0xD9, ">BB"), 3: (0xDA, ">BH"), 5: (0xDB, ">BI")}
_MAP_HEADS = {1: (0x80, ""), 3: (0xDE, ">BH"), 5: (0xDF, ">BI")}


def text(value: str, width: int = 0) -> bytes:
    """A text with its head, as short as it can be or of `width` bytes."""
    data = value.encode()
    count = len(data)
    least = 1 if count < 1 << 5 else 2 if count < 1 << 8 else 3 if count < 1 << 16 else 5
    return _head(_TEXT_HEADS, count, max(width, least)) + data


def map_head(count: int, width: int = 0) -> bytes:
    """The head of a map, as short as it can be or of `width` bytes."""
    least = 1 if count < 1 << 4 else 3 if count < 1 << 16 else 5
    return _head(_MAP_HEADS, count, max(width, least))


def _head(heads: Mapping[int, tuple[int, str]], count: int, width: int) -> bytes:
    """A head of so many bytes; one that is a single byte holds the count in itself."""
    code, form = heads[width]
    return bytes([code | count]) if width == 1 else struct.pack(form, code, count)


def packed(value: Any) -> bytes:
    """A plain value of JSON's types as a packer would write it."""
    if isinstance(value, dict):
        return map_head(len(value)) + b"".join(text(key) + packed(child) for key, child in value.items())
    if isinstance(value, list):
        return array_head(len(value)) + b"".join(packed(child) for child in value)
    return b"\xc0" if value is None else scalar(value)


def empty(kind: str) -> bytes:
    """nil, or a map without children whose head has the width that marks its kind."""
    return b"\xc0" if kind == "none" else map_head(0, _WIDTHS[kind])


def scalar(value: str | float | bool) -> bytes:
    """A text, number or bool."""
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return integer(value)
    return struct.pack(">Bd", 0xCB, value) if isinstance(value, float) else text(value)


def integer(value: int) -> bytes:
    """A whole number of at most 64 bits."""
    if -(1 << 5) <= value < 1 << 7:
        return struct.pack(">b", value)
    rows = (
        ((8, 0xCC, "B"), (16, 0xCD, "H"), (32, 0xCE, "I"), (64, 0xCF, "Q"))
        if value >= 0
        else ((7, 0xD0, "b"), (15, 0xD1, "h"), (31, 0xD2, "i"), (63, 0xD3, "q"))
    )
    code, form = next((code, form) for bits, code, form in rows if -(1 << bits) <= value < 1 << bits)
    return struct.pack(f">B{form}", code, value)


def array_head(count: int) -> bytes:
    """The head of a msgpack array."""
    if count < 1 << 4:
        return struct.pack(">B", 0x90 | count)
    return struct.pack(">BH", 0xDC, count) if count < 1 << 16 else struct.pack(">BI", 0xDD, count)


def bin_head(count: int) -> bytes:
    """The head of bytes."""
    if count < 1 << 8:
        return struct.pack(">BB", 0xC4, count)
    return struct.pack(">BH", 0xC5, count) if count < 1 << 16 else struct.pack(">BI", 0xC6, count)


def ext_head(code: int, count: int) -> bytes:
    """The head of an ext; five lengths have one of their own."""
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
    if count in fixed:
        return struct.pack(">Bb", fixed[count], code)
    if count < 1 << 8:
        return struct.pack(">BBb", 0xC7, count, code)
    return (
        struct.pack(">BHb", 0xC8, count, code) if count < 1 << 16 else struct.pack(">BIb", 0xC9, count, code)
    )
