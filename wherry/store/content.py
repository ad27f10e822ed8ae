"""content: the bytes of parts and objects: their checksums, and the body of a request that is made of buffers.

Checksums are texts, `crc32c:` or `md5:` and hex digits. CRC-32C is the one checksum that both Google Cloud Storage and
S3 compute of parts and of the object that they become. Azure computes MD5 of what is sent at once: of parts and of
small objects.

The CRC of two concatenated strings follows from the CRC of each and the length of the second: the first is multiplied
by x^(8·length) modulo the polynomial, over GF(2), as zlib's `crc32_combine` does. So the checksum of an object follows
from those of its parts.
Source: the polynomials and bit order of ISO 3309, as zip uses them (APPNOTE 4.4.7), and of RFC 3720 (Castagnoli).
"""

from __future__ import annotations

import hashlib
import io
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from isal.isal_zlib import crc32

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from wherry.store.store import Content, Part, StoredObject


_TOP = 1 << 31
_PIECE = 128 << 10  # bytes that are copied at a time: malloc keeps such blocks for each thread
CRC32C, MD5 = "crc32c", "md5"
_BYTES = 4
_PREFIX = f"{CRC32C}:"
_BLOCK = 256 << 10  # bytes that are given at a time, of a large buffer
_SMALL = 64 << 10  # bytes of a buffer that is given together with others


def crc32c(data: memoryview, start: int = 0) -> int:
    """CRC-32C of a string.

    Args:
        data: the string.
        start: CRC of the bytes before it.
    """
    from google_crc32c import extend  # few containers need it

    for first in range(0, len(data), _PIECE):
        start = extend(start, bytes(data[first : first + _PIECE]))  # it takes nothing but bytes
    return start


class Crc(NamedTuple):
    """One kind of CRC.

    Attributes:
        polynomial: with reflected bits.
        of: computes it.
    """

    polynomial: int
    of: Callable[[memoryview], int]


KINDS = {"CRC-32": Crc(0xEDB88320, crc32), "CRC-32C": Crc(0x82F63B78, crc32c)}


def combine(first: int, second: int, length: int, kind: str = "CRC-32") -> int:
    """CRC of two concatenated strings.

    Args:
        first: CRC of the first.
        second: CRC of the second.
        length: bytes of the second.
        kind: one of `KINDS`.
    """
    polynomial = KINDS[kind].polynomial
    return _multiply(_shift(length, polynomial), first, polynomial) ^ second


@cache
def _shift(length: int, polynomial: int) -> int:
    """x^(8·length) modulo the polynomial; bits are reflected, so x^0 is the top bit."""
    result, power = _TOP, _TOP >> 8
    while length:
        if length & 1:
            result = _multiply(power, result, polynomial)
        power = _multiply(power, power, polynomial)
        length >>= 1
    return result


def _multiply(left: int, right: int, polynomial: int) -> int:
    product = 0
    while left:
        if left & _TOP:
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (polynomial if right & 1 else 0)
    return product


class PartBytes(list[memoryview]):
    """The pieces of one part, whose bytes never change: each checksum of them is computed once."""

    __slots__ = ("_known",)

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        super().__init__(pieces)
        self._known: dict[str, str] = {}

    def checksum(self, algorithm: str) -> str:
        """Like `checksum_of`."""
        if algorithm not in self._known:
            self._known[algorithm] = checksum_of(iter(self), algorithm)
        return self._known[algorithm]


def checksum_of(buffers: Iterable[memoryview], algorithm: str = CRC32C) -> str:
    """The checksum of buffers, one after the other."""
    if isinstance(buffers, PartBytes):
        return buffers.checksum(algorithm)
    if algorithm == MD5:
        found = hashlib.md5(usedforsecurity=False)
        for data in buffers:
            found.update(data)
        return f"{MD5}:{found.hexdigest()}"
    value = 0
    for data in buffers:
        value = crc32c(data.cast("B"), value)
    return f"{_PREFIX}{value:08x}"


def agrees(reported: str, buffers: Iterable[memoryview]) -> bool:
    """Whether a checksum that a store reports is that of these buffers; empty if it reports none."""
    return not reported or reported == checksum_of(buffers, reported.partition(":")[0])


def joined_checksum(parts: Sequence[Part]) -> str:
    """The CRC-32C of the object of these parts; empty if that of a part is unknown."""
    value = 0
    for part in parts:
        if not part.checksum.startswith(_PREFIX):
            return ""
        value = combine(value, int(part.checksum.removeprefix(_PREFIX), 16), part.nbytes, "CRC-32C")
    return f"{_PREFIX}{value:08x}"


def to_base64(checksum: str) -> str:
    """A checksum as stores write it: its bytes in base64, the highest first."""
    return b64encode(bytes.fromhex(checksum.removeprefix(_PREFIX))).decode()


def from_base64(text: str | None) -> str:
    """The inverse of `to_base64`; empty if the store reports none, or one of checksums, which ends with `-NUMBER`."""
    if not text or "-" in text:
        return ""
    data = b64decode(text)
    return f"{_PREFIX}{data.hex()}" if len(data) == _BYTES else ""


def by_algorithm(checksum: str) -> dict[str, str]:
    """The `checksums` of an object."""
    algorithm, _, digest = checksum.partition(":")
    return {algorithm: digest} if checksum else {}


def is_same(found: StoredObject, run: str, nbytes: int, checksum: str) -> bool:
    """Whether an object is the one that a run sent.

    Args:
        found: what the store has.
        run: id of the run.
        nbytes: size of what it sent.
        checksum: of what it sent; empty if it is unknown.
    """
    algorithm, _, digest = checksum.partition(":")
    same = found.checksums.get(algorithm, digest) == digest
    return same and (found.run, found.nbytes) == (run, nbytes)


def views_of(data: Content) -> Sequence[memoryview]:
    """The buffers of bytes that are given whole, or in pieces."""
    return [memoryview(data)] if isinstance(data, bytes) else data


class Body:
    """Buffers, one after the other, as clients of HTTP take them.

    Attributes:
        nbytes: size of all.
    """

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._views = [memoryview(one).cast("B") for one in buffers]
        *self._starts, self.nbytes = accumulate(map(len, self._views), initial=0)
        self._position = 0

    async def __aiter__(self) -> AsyncIterator[memoryview | bytes]:
        """All bytes, in blocks."""
        for block in self._blocks():
            yield block

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position, in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position; returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes, as many as that or up to the end; all of them without a size."""
        start, rest = self._position, max(self.nbytes - self._position, 0)
        self._position += rest if size is None or size < 0 else min(size, rest)
        first, found = max(bisect_right(self._starts, start) - 1, 0), list[memoryview]()
        for at, view in zip(self._starts[first:], self._views[first:], strict=True):
            if at >= self._position:
                break
            found.append(view[max(start - at, 0) : self._position - at])
        return b"".join(found)

    def _blocks(self) -> Iterator[memoryview | bytes]:
        small = bytearray()
        for view in self._views:
            large = len(view) >= _SMALL
            if not large:
                small += view
            if small and (large or len(small) >= _SMALL):
                yield bytes(small)
                small.clear()
            if large:
                yield from (view[at : at + _BLOCK] for at in range(0, len(view), _BLOCK))
        if small:
            yield bytes(small)
