"""Verifies the checksums that a container records, while its bytes are read.

Torch archives record a CRC-32 for each member. The mover's fast path reads spans without the container's own reader, so
a flipped bit would be copied and get a valid digest. A reader that knows the CRC of an extent reports it; every pass
(converting, verifying, inspecting) then compares it once the whole extent was read. Parts that a resumed run does not
read again are read here.

`PieceCrc` computes the CRC-32 of a byte string whose pieces come in any order, from several threads, and more than
once.

The CRC of two concatenated strings follows from the CRC of each and the length of the second: the first is multiplied
by x^(8·length) modulo the polynomial, over GF(2), as zlib's `crc32_combine` does. Pieces are kept per cell of
4 MiB; a piece that overlaps known pieces of a cell replaces them, so after a repeated write the last bytes count.
Parts that no piece covers (an earlier process wrote them) are read when the CRC of the whole is computed.
Source: the polynomial and bit order of ISO 3309, as zip uses them (APPNOTE 4.4.7).
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from zlib_ng.zlib_ng import crc32

from wherry.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.core.tensorspec import Span, TensorSpec
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.reader import Extent


class _WatchedExtent(NamedTuple):
    extent: Extent
    spec: TensorSpec
    crc: PieceCrc


class ContainerChecksums:
    """The extents of one pass whose CRC is known; safe from several threads."""

    def __init__(self) -> None:
        self._watched: dict[tuple[str, int], _WatchedExtent] = {}
        self._left: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def update(self, extents: tuple[Extent, ...], span: Span, data: memoryview, spec: TensorSpec) -> None:
        """Add the bytes of a span of a tensor; each byte must be added at most once.

        Raises:
            CorruptError: an extent is complete and its CRC differs from the recorded one.
        """
        position = 0
        for extent in extents:
            start, stop = max(span.start, position), min(span.stop, position + extent.length)
            if start < stop and extent.crc32 is not None:
                piece = data[start - span.start : stop - span.start]
                self._take(extent, spec, start - position, piece)
            position += extent.length

    def finish(self) -> None:
        """Read the missing parts of incomplete extents, and compare their CRCs.

        Raises:
            CorruptError: a CRC differs from the recorded one, or a file is truncated.
            StorageError: the storage failed.
        """
        for watched in list(self._watched.values()):
            self._compare(watched)

    def _take(self, extent: Extent, spec: TensorSpec, start: int, piece: memoryview) -> None:
        key = (extent.file, extent.offset)
        with self._lock:
            watched = self._watched.get(key)
            if watched is None:
                watched = self._watched[key] = _WatchedExtent(extent, spec, PieceCrc(extent.length))
                self._left[key] = extent.length
        watched.crc.update(start, piece)
        with self._lock:
            self._left[key] -= len(piece)
            complete = self._left[key] == 0
        if complete:
            self._compare(watched)

    def _compare(self, watched: _WatchedExtent) -> None:
        extent = watched.extent
        found = watched.crc.value(lambda start, stop: _read(extent, start, stop))
        if found != extent.crc32:
            raise CorruptError(
                f"checksum mismatch: expected CRC-32 {extent.crc32:08x}, got {found:08x}",
                uri=extent.file,
                path=watched.spec.name,
                cure="copy the checkpoint again, or use another step",
            )
        with self._lock:
            self._watched.pop((extent.file, extent.offset), None)


def _read(extent: Extent, start: int, stop: int) -> memoryview:
    data = extent.location.read(extent.offset + start, extent.offset + stop)
    if len(data) != stop - start:
        raise CorruptError(
            f"the file is truncated: expected {extent.offset + stop} bytes or more, "
            f"got {extent.offset + start + len(data)}",
            uri=extent.file,
        )
    return memoryview(data)


def without_checksum(checkpoint: Checkpoint) -> int:
    """The number of tensors that have no checksum in the container."""
    every = (checkpoint.reader.extents(spec) for spec in checkpoint.manifest.tensors.values())
    return sum(extents is None or any(one.crc32 is None for one in extents) for extents in every)


CELL = 4 << 20
_POLYNOMIAL = 0xEDB88320
_TOP = 1 << 31


def combine(first: int, second: int, length: int) -> int:
    """CRC of two concatenated strings.

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
        """Add the bytes [start, start + len(data))."""
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
        """The CRC of the whole string.

        Args:
            read: returns bytes [start, stop) that no piece covers; at most one cell at a time.
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
