"""The bytes of a msgpack message, taken in order through a small window, and the head of each object in it.

A checkpoint of many gigabytes is walked by reading its heads only: a payload is stepped over, never read. After a
step the window starts small (the next head is near) and doubles while reading goes on in sequence, so that a file
of large arrays costs a kilobyte for each and a file of small ones is read in few pieces. Every length is compared
with what is left of the file before anything is taken or allocated.

Facts: the msgpack specification; all numbers are big endian. Before `use_bin_type` (msgpack 0.5 and earlier
defaults) bytes were written as the raw family, which is now the string family: both are one kind here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from wherry.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.storage.location import Location

Kind: TypeAlias = Literal["nil", "bool", "int", "float", "str", "bin", "array", "map", "ext"]
_SMALL_WINDOW = 1 << 10
_LARGE_WINDOW = 64 << 10
_CURE = "copy the file again, or use another step"

# first byte → kind and struct format of a number that follows; a length, unless the kind is a number itself.
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
        width: bytes of the head, by which a writer's choice of form can be told.
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


class Source:
    """A message read in order.

    Attributes:
        position: offset of the next byte.
        size: bytes of the whole.
        uri: what errors name.
        cut: whether the file proved shorter than an object in it.
        beyond: whether more was asked for than `fetch` had, although the file is longer.
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
            CorruptError: the file ends before.
        """
        self.require(length)
        offset = self.position - self._start
        if not 0 <= offset <= offset + length <= len(self._window):
            self._refill(length)
            offset = 0
        self.position += length
        return self._window[offset : offset + length]

    def skip(self, length: int) -> None:
        """Step over bytes without reading them.

        Raises:
            CorruptError: the file ends before.
        """
        self.require(length)
        self.position += length

    def head(self) -> Head:
        """The head of the next object; what follows it is not taken.

        Raises:
            CorruptError: the file ends before, or the byte begins no object.
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
                f"byte {first:#04x} at offset {self.position - 1} begins no msgpack object",
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
            CorruptError: the file ends before.
        """
        if length > self.size - self.position:
            self.cut = True
            raise CorruptError(
                f"msgpack ends at {self.size} bytes, inside an object that needs {length} more at {self.position}",
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
            raise CorruptError("the file became shorter while it was read", uri=self.uri, cure=_CURE)
        self._window, self._start = window, self.position


def file_source(location: Location) -> Source:
    """A source over a file.

    Raises:
        NotFoundError: there is no such file.
    """
    entry = location.stat()
    size = entry.size if entry is not None else 0
    return Source(location.read, size, location.uri)


def bytes_source(data: bytes, uri: str = "") -> Source:
    """A source over bytes in memory."""
    return Source(lambda start, stop: data[start:stop], len(data), uri)
