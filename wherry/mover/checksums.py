"""Verifies the checksums that a container records, while its bytes are read.

Torch and npz archives record a CRC-32 for each member, tensor bundles a CRC-32C for each tensor. The mover's fast path
reads spans without the container's own reader, so a flipped bit would be copied and get a valid digest. A reader that
knows the checksum of a range of a file reports it; every pass (converting, verifying, inspecting) then compares it once
the whole range was read. Parts that no tensor covers, or that a resumed run does not read again, are read here.

`PieceCrc` computes the CRC of a byte string whose pieces come in any order, from several threads, and more than
once. Pieces are kept per cell of 4 MiB; a piece that overlaps known pieces of a cell replaces them, so after a
repeated write the last bytes count. Parts that no piece covers (an earlier process wrote them) are read when the CRC of
the whole is computed. Where a container records the CRCs of parts of a tensor, no piece lies in two of them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from wherry.errors import CorruptError
from wherry.store.crc import KINDS, combine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wherry.core.tensorspec import Span, TensorSpec
    from wherry.formats.contents import Extent, RangeChecksum
    from wherry.storage.location import Location


class _WatchedRange(NamedTuple):
    location: Location
    spec: TensorSpec
    recorded: RangeChecksum
    crc: PieceCrc


class ContainerChecksums:
    """The byte ranges of one pass whose checksum is known; safe from several threads."""

    def __init__(self) -> None:
        self._watched: dict[tuple[str, int], _WatchedRange] = {}
        self._compared: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def update(self, extents: tuple[Extent, ...], span: Span, data: memoryview, spec: TensorSpec) -> None:
        """Add the bytes of a span of a tensor.

        Raises:
            CorruptError: a range is complete and its checksum differs from the recorded one.
        """
        only = extents[0] if len(extents) == 1 else None
        if only and only.crc32 is not None and only.length == len(data) <= CELL and _crc(data) == only.crc32:
            return  # the whole range, as almost always where tensors are small
        position = 0
        for extent in extents:
            start, stop = max(span.start, position), min(span.stop, position + extent.length)
            recorded = extent.checksum if start < stop else None
            if recorded is not None:
                piece = data[start - span.start : stop - span.start]
                at = extent.offset + start - position - recorded.offset
                if len(piece) == recorded.length <= CELL:
                    _require(recorded, KINDS[recorded.kind].of(piece), extent.location, spec)
                else:
                    self._take(extent, recorded, spec, at, piece)
            position += extent.length

    def finish(self) -> None:
        """Read the missing parts of incomplete ranges, and compare their checksums.

        Raises:
            CorruptError: a checksum differs from the recorded one, or a file is truncated.
            StorageError: the storage failed.
        """
        with self._lock:
            missing, self._watched = list(self._watched.values()), {}
        for watched in missing:
            self._compare(watched)

    def _take(
        self, extent: Extent, recorded: RangeChecksum, spec: TensorSpec, start: int, piece: memoryview
    ) -> None:
        key = (extent.file, recorded.offset)
        with self._lock:
            if key in self._compared:
                return  # tensors may share their bytes
            watched = self._watched.get(key)
            if watched is None:
                crc = PieceCrc(recorded.length, recorded.kind)
                watched = self._watched[key] = _WatchedRange(extent.location, spec, recorded, crc)
        watched.crc.update(start, piece)
        if not watched.crc.left:
            self._compare(watched)
            with self._lock:
                self._compared.add(key)
                self._watched.pop(key, None)

    def _compare(self, watched: _WatchedRange) -> None:
        recorded, location = watched.recorded, watched.location
        found = watched.crc.value(lambda start, stop: _read(location, recorded.offset, start, stop))
        _require(recorded, found, location, watched.spec)


_crc = KINDS["CRC-32"].of


def _require(recorded: RangeChecksum, found: int, location: Location, spec: TensorSpec) -> None:
    if found != recorded.value:
        raise CorruptError(
            f"checksum mismatch: expected {recorded.kind} {recorded.value:08x}, got {found:08x}",
            uri=location.uri,
            path=spec.name,
            cure="copy the checkpoint again, or use another step",
        )


def _read(location: Location, offset: int, start: int, stop: int) -> memoryview:
    data = location.read(offset + start, offset + stop)
    if len(data) != stop - start:
        raise CorruptError(
            f"the file is truncated: expected {offset + stop} bytes or more, got {offset + start + len(data)}",
            uri=location.uri,
        )
    return memoryview(data)


CELL = 4 << 20


class PieceCrc:
    """The CRC of one string of known length.

    Attributes:
        size: its length.
        left: how many of its bytes no piece covers.
    """

    def __init__(self, size: int, kind: str = "CRC-32", ends: Iterable[int] = ()) -> None:
        """A string of which no piece is known.

        Args:
            size: its length.
            kind: of the CRC.
            ends: of its parts whose CRC can be requested, in order.
        """
        self.size = self.left = size
        self._kind = kind
        self._ends = list(ends)
        self._lock = threading.Lock()
        self._cells: dict[int, dict[int, tuple[int, int]]] = {}  # cell → start → (stop, CRC)

    def update(self, start: int, data: memoryview) -> None:
        """Add the bytes [start, start + len(data))."""
        position, stop = start, start + len(data)
        while position < stop:
            part = self._ends[(at := bisect_right(self._ends, position)) : at + 1]
            end = min((position // CELL + 1) * CELL, stop, *part)
            self._keep(position, end, KINDS[self._kind].of(data[position - start : end - start]))
            position = end

    def known(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Start, stop and CRC of the pieces within [start, stop)."""
        with self._lock:
            cells = [self._cells.get(cell, {}) for cell in range(start // CELL, -(-stop // CELL))]
            return [
                (first, last, value)
                for pieces in cells
                for first, (last, value) in sorted(pieces.items())
                if start <= first and last <= stop
            ]

    def take(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Take up pieces that `known` has returned for the same string."""
        for start, stop, value in pieces:
            self._keep(start, stop, value)

    def _keep(self, start: int, stop: int, value: int) -> None:
        with self._lock:
            pieces = self._cells.setdefault(start // CELL, {})
            for old in [old for old, (end, _) in pieces.items() if old < stop and start < end]:
                self.left += pieces.pop(old)[0] - old
            pieces[start] = (stop, value)
            self.left -= stop - start

    def value(self, read: Callable[[int, int], memoryview], part: Span | None = None) -> int:
        """The CRC of the whole string, or of a part of it.

        Args:
            read: returns bytes [start, stop) that no piece covers; at most one cell at a time.
            part: one of the parts whose ends were given.
        """
        total, (first, last) = 0, part or (0, self.size)
        for base in range(first // CELL * CELL, last, CELL):
            position, end = max(base, first), min(base + CELL, last)
            pieces = self._cells.get(base // CELL, {})
            while position < end:
                if position not in pieces:
                    stop = min((start for start in pieces if position < start < end), default=end)
                    self._keep(position, stop, KINDS[self._kind].of(read(position, stop)))
                    pieces = self._cells[base // CELL]
                stop, value = pieces[position]
                total = combine(total, value, stop - position, self._kind)
                position = stop
        return total
