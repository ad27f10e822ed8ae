"""crc: CRC-32 and CRC-32C of byte strings, and of strings that are concatenated.

The CRC of two concatenated strings follows from the CRC of each and the length of the second: the first is multiplied
by x^(8·length) modulo the polynomial, over GF(2), as zlib's `crc32_combine` does. So the checksum of an object follows
from those of its parts.
Source: the polynomials and bit order of ISO 3309, as zip uses them (APPNOTE 4.4.7), and of RFC 3720 (Castagnoli).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from isal.isal_zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable

_TOP = 1 << 31
_PIECE = 128 << 10  # bytes that are copied at a time: malloc keeps such blocks for each thread


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
