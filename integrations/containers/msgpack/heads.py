"""The heads of msgpack objects: read in order through a small window, and written in the shortest form.

**Reading.** A checkpoint of many gigabytes is walked by reading its heads only; payloads are skipped. After a skip the
window starts small (the next head is near) and doubles while reading is sequential, so that a file of large arrays
costs a kilobyte for each, and a file of small arrays is read in few pieces. Every length is compared with the rest of
the file before anything is read or allocated.

**Writing.** Heads are those of msgpack-python with `use_bin_type`. Strings and maps can also have a longer head;
`contents.py` documents its meaning.

Facts: the msgpack specification; all numbers are big endian. Before `use_bin_type` (msgpack 0.5 and earlier
defaults) bytes were written as the raw family, which is now the string family; both are one kind here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from wherry.errors import CorruptError

if TYPE_CHECKING:
    from wherry.store.location import Location


Kind: TypeAlias = Literal["nil", "bool", "int", "float", "str", "bin", "array", "map", "ext"]
EMPTY_MARKS = {1: "dict", 3: "list", 5: "tuple"}
_SMALL_WINDOW = 1 << 10
_LARGE_WINDOW = 64 << 10
_CURE = "copy the file again, or use another step"

# First byte → kind, and struct format of the number that follows: a length, unless the kind is a number itself.
_FORMS: dict[int, tuple[Kind, str]] = {
    0xC4: ("bin", ">B"),
    0xC5: ("bin", ">H"),
    0xC6: ("bin", ">I"),
    0xC7: ("ext", ">B"),
    0xC8: ("ext", ">H"),
    0xC9: ("ext", ">I"),
    0xCA: ("float", ">f"),
    0xCB: ("float", ">d"),
    0xCC: ("int", ">B"),
    0xCD: ("int", ">H"),
    0xCE: ("int", ">I"),
    0xCF: ("int", ">Q"),
    0xD0: ("int", ">b"),
    0xD1: ("int", ">h"),
    0xD2: ("int", ">i"),
    0xD3: ("int", ">q"),
    0xD9: ("str", ">B"),
    0xDA: ("str", ">H"),
    0xDB: ("str", ">I"),
    0xDC: ("array", ">H"),
    0xDD: ("array", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}


class _Family(NamedTuple):
    """Objects that hold their length in their first byte."""

    first: int
    mask: int
    kind: Kind


_FIXED = (_Family(0x80, 0x0F, "map"), _Family(0x90, 0x0F, "array"), _Family(0xA0, 0x1F, "str"))
_SINGLE: dict[int, tuple[Kind, bool | None]] = {
    0xC0: ("nil", None),
    0xC2: ("bool", False),
    0xC3: ("bool", True),
}
_FIXED_EXT = range(0xD4, 0xD9)


class Head(NamedTuple):
    """The head of one object.

    Attributes:
        kind: what it is.
        value: of a number or bool, its value; of everything else, its length in bytes or in children.
        width: bytes of the head, which show the form that the writer chose.
        code: the type of an ext.
    """

    kind: Kind
    value: int | float | bool | None
    width: int
    code: int = 0

    @property
    def length(self) -> int:
        """Bytes or children that follow."""
        return int(self.value or 0)


class MessageSource:
    """A message read in order.

    Attributes:
        position: offset of the next byte.
        size: bytes of the whole.
        uri: the file, for errors.
        cut: whether the file is shorter than an object in it.
        beyond: whether `fetch` returned less than requested, although the file is longer.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, uri: str) -> None:
        self.position = 0
        self.size = size
        self.uri = uri
        self.cut = False
        self.beyond = False
        self._fetch = fetch
        self._window = b""
        self._start = 0
        self._next = _SMALL_WINDOW

    def take(self, length: int) -> bytes:
        """The next bytes.

        Raises:
            CorruptError: the file is truncated.
        """
        self.require(length)
        offset = self.position - self._start
        if not 0 <= offset <= offset + length <= len(self._window):
            self._refill(length)
            offset = 0
        self.position += length
        return self._window[offset : offset + length]

    def skip(self, length: int) -> None:
        """Skip bytes without reading them.

        Raises:
            CorruptError: the file is truncated.
        """
        self.require(length)
        self.position += length

    def head(self) -> Head:
        """The head of the next object; what follows it is not taken.

        Raises:
            CorruptError: the file is truncated, or the type byte is invalid.
        """
        first = self.take(1)[0]
        if first < 0x80:  # noqa: PLR2004  positive fixint
            return Head("int", first, 1)
        if first >= 0xE0:  # noqa: PLR2004  negative fixint
            return Head("int", first - 256, 1)
        if first < 0xC0:  # noqa: PLR2004  the families that hold their length in the first byte
            family = 2 if first >= _FIXED[2].first else 1 if first >= _FIXED[1].first else 0
            return Head(_FIXED[family].kind, first & _FIXED[family].mask, 1)
        return self._long_head(first)

    def _long_head(self, first: int) -> Head:
        if first in _SINGLE:
            kind, value = _SINGLE[first]
            return Head(kind, value, 1)
        if first in _FIXED_EXT:
            return Head("ext", 1 << (first - _FIXED_EXT.start), 2, self._code())
        if first not in _FORMS:
            raise CorruptError(
                f"invalid msgpack: unknown type byte {first:#04x} at offset {self.position - 1}",
                uri=self.uri,
                cure=_CURE,
            )
        kind, form = _FORMS[first]
        size = struct.calcsize(form)
        (value,) = struct.unpack(form, self.take(size))
        return Head(kind, value, size + 2, self._code()) if kind == "ext" else Head(kind, value, size + 1)

    def _code(self) -> int:
        return struct.unpack("b", self.take(1))[0]

    def require(self, length: int) -> None:
        """Refuse a length that the file cannot hold.

        Raises:
            CorruptError: the file is truncated.
        """
        if length > self.size - self.position:
            self.cut = True
            raise CorruptError(
                f"msgpack is truncated at {self.size} bytes: expected {length} bytes at offset {self.position}",
                uri=self.uri,
                cure=_CURE,
            )

    def _refill(self, length: int) -> None:
        sequential = self.position == self._start + len(self._window)
        self._next = min(self._next * 2, _LARGE_WINDOW) if sequential else _SMALL_WINDOW
        stop = min(self.position + max(length, self._next), self.size)
        window = self._fetch(self.position, stop)
        if len(window) < length:
            self.beyond = True
            raise CorruptError("the file was truncated while it was read", uri=self.uri, cure=_CURE)
        self._window, self._start = window, self.position


def file_source(location: Location) -> MessageSource:
    """A source over a file.

    Raises:
        NotFoundError: the file does not exist.
        HostileError: it is a FIFO, a socket or a device, or a link that must not be followed.
    """
    entry = location.stat()
    if entry is not None and entry.barred:
        location.read(0, 1)
    return MessageSource(location.read, entry.size if entry is not None else 0, location.uri)


def bytes_source(data: bytes, uri: str = "") -> MessageSource:
    """A source over bytes in memory."""
    return MessageSource(lambda start, stop: data[start:stop], len(data), uri)


_WIDTHS = {kind: width for width, kind in EMPTY_MARKS.items()}
# Bytes of a head → its first byte, and its form.
_TEXT_HEADS = {1: (0xA0, ""), 2: (0xD9, ">BB"), 3: (0xDA, ">BH"), 5: (0xDB, ">BI")}
_MAP_HEADS = {1: (0x80, ""), 3: (0xDE, ">BH"), 5: (0xDF, ">BI")}


def text(value: str, width: int = 0) -> bytes:
    """A string with its head, in the shortest form or `width` bytes long."""
    data = value.encode()
    count = len(data)
    least = 1 if count < 1 << 5 else 2 if count < 1 << 8 else 3 if count < 1 << 16 else 5
    return _head(_TEXT_HEADS, count, max(width, least)) + data


def map_head(count: int, width: int = 0) -> bytes:
    """The head of a map, in the shortest form or `width` bytes long."""
    least = 1 if count < 1 << 4 else 3 if count < 1 << 16 else 5
    return _head(_MAP_HEADS, count, max(width, least))


def _head(heads: Mapping[int, tuple[int, str]], count: int, width: int) -> bytes:
    """A head of `width` bytes; a head of one byte includes the count."""
    code, form = heads[width]
    return bytes([code | count]) if width == 1 else struct.pack(form, code, count)


def pack_value(value: Any) -> bytes:
    """A plain value of a JSON type as a packer would write it."""
    if isinstance(value, dict):
        return map_head(len(value)) + b"".join(text(key) + pack_value(child) for key, child in value.items())
    if isinstance(value, list):
        return array_head(len(value)) + b"".join(pack_value(child) for child in value)
    return b"\xc0" if value is None else scalar(value)


def empty(kind: str) -> bytes:
    """nil, or an empty map whose head has the width that marks its kind."""
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
    """The head of an ext object; five lengths have a head without a length field."""
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
    if count in fixed:
        return struct.pack(">Bb", fixed[count], code)
    if count < 1 << 8:
        return struct.pack(">BBb", 0xC7, count, code)
    return (
        struct.pack(">BHb", 0xC8, count, code) if count < 1 << 16 else struct.pack(">BIb", 0xC9, count, code)
    )
