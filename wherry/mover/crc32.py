"""CRC-32 of a byte string whose pieces come in any order, from several threads, and more than once.

The CRC of two strings in a row follows from the CRC of each and the length of the second: the first is multiplied
by x^(8·length) modulo the polynomial, over GF(2), as zlib's `crc32_combine` does. Pieces are kept per cell of
4 MiB; a piece that overlaps what is known of a cell replaces it, so a repeated write counts with its last bytes.
What no piece covers (an earlier process wrote it) is asked for when the whole is combined.
Source: the polynomial and bit order of ISO 3309, as zip uses them (APPNOTE 4.4.7).
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

# Seven times as fast as zlib's. (isal's is as fast, but leaves the vector registers in a state in which the SHA
# instructions that follow on the same thread take a third longer: measured on an AMD EPYC.)
from zlib_ng.zlib_ng import crc32

if TYPE_CHECKING:
    from collections.abc import Callable

CELL = 4 << 20
_POLYNOMIAL = 0xEDB88320
_TOP = 1 << 31


def combine(first: int, second: int, length: int) -> int:
    """CRC of two strings in a row.

    Args:
        first: CRC of the first.
        second: CRC of the second.
        length: bytes of the second.
    """
    return _multiply(_shift(length), first) ^ second


@cache
def _shift(length: int) -> int:
    """x^(8·length) modulo the polynomial; bits are reflected, so x^0 is the top bit."""
    result, power = _TOP, _TOP >> 8
    while length:
        if length & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        length >>= 1
    return result


def _multiply(left: int, right: int) -> int:
    product = 0
    while left:
        if left & _TOP:
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product


class PieceCrc:
    """The CRC of one string of known length."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._cells: dict[int, dict[int, tuple[int, int]]] = {}  # cell → start → (stop, CRC)

    def update(self, start: int, data: memoryview) -> None:
        """Take the bytes [start, start + len(data))."""
        position, stop = start, start + len(data)
        while position < stop:
            end = min((position // CELL + 1) * CELL, stop)
            self._keep(position, end, crc32(data[position - start : end - start]))
            position = end

    def _keep(self, start: int, stop: int, value: int) -> None:
        with self._lock:
            pieces = self._cells.setdefault(start // CELL, {})
            for old in [old for old, (end, _) in pieces.items() if old < stop and start < end]:
                del pieces[old]
            pieces[start] = (stop, value)

    def value(self, read: Callable[[int, int], memoryview]) -> int:
        """The CRC of all of it.

        Args:
            read: gives bytes [start, stop) that no piece covers; at most a cell at a time.
        """
        total = 0
        for base in range(0, self.size, CELL):
            position, end = base, min(base + CELL, self.size)
            pieces = self._cells.get(base // CELL, {})
            while position < end:
                if position not in pieces:
                    stop = min((start for start in pieces if start > position), default=end)
                    self._keep(position, stop, crc32(read(position, stop)))
                    pieces = self._cells[base // CELL]
                stop, value = pieces[position]
                total = combine(total, value, stop - position)
                position = stop
        return total
