"""PartPieces: the bytes of one part of an object, held in the pieces in which they came.

No buffer of the size of the part is needed, so that a part of which only a few bytes are known (the frame of an
archive, a header) costs only these. The store sends the pieces one after the other. Pieces that wait for long can wait
in the store (`overflow`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from wherry.upload.overflow import StoredPiece

if TYPE_CHECKING:
    from wherry.upload.overflow import StoredBytes


class PartPieces:
    """The pieces of one part; where bytes come twice, the later ones count.

    Attributes:
        nbytes: size of the part.
        held: bytes that are known.
        in_memory: those of them that take memory; others wait in the store.
    """

    __slots__ = ("_objects", "_pieces", "_starts", "held", "in_memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.held = self.in_memory = 0
        self._starts: list[int] = []
        self._pieces: list[memoryview | StoredPiece] = []
        self._objects: set[StoredBytes] = set()

    @property
    def complete(self) -> bool:
        """Whether all bytes are known."""
        return self.held == self.nbytes

    @property
    def views(self) -> list[memoryview]:
        """The pieces, in order; those that wait in the store are read.

        Raises:
            StorageError: the storage failed.
        """
        by_object: dict[StoredBytes, list[StoredPiece]] = {}
        for one in self._pieces:
            if isinstance(one, StoredPiece):
                by_object.setdefault(one.whole, []).append(one)
        found: dict[StoredBytes, tuple[int, memoryview]] = {}
        for whole, pieces in by_object.items():
            start, stop = min(one.start for one in pieces), max(one.stop for one in pieces)
            found[whole] = start, whole.bytes_of(start, stop)

        def load(one: StoredPiece) -> memoryview:
            start, data = found[one.whole]
            return data[one.start - start : one.stop - start]

        return [load(one) if isinstance(one, StoredPiece) else one for one in self._pieces]

    def move_out(self, whole: StoredBytes) -> None:
        """Let an object that is not put yet have the pieces that are in memory."""
        at = whole.append([one for one in self._pieces if not isinstance(one, StoredPiece)])
        for number, one in enumerate(self._pieces):
            if not isinstance(one, StoredPiece):
                self._pieces[number] = StoredPiece(whole, at, at + len(one))
                at += len(one)
        self._objects.add(whole)
        self.in_memory = 0

    def leave(self) -> None:
        """The part is sent: its bytes and its objects are no longer needed.

        Raises:
            StorageError: the storage failed.
        """
        self._starts.clear()
        self._pieces.clear()  # before others hold as much: the task that has sent them may end later
        for whole in self._objects:
            whole.leave()

    def add(self, start: int, piece: memoryview) -> int:
        """Add bytes, which are kept without a copy.

        Args:
            start: offset in the part.
            piece: the bytes.

        Returns:
            Number of bytes in memory that were known already, and are dropped.
        """
        stop, before = start + len(piece), self.in_memory
        low = bisect_right(self._starts, start)
        if low and self._stop(low - 1) > start:
            low -= 1
        high = bisect_left(self._starts, stop)
        rows: list[tuple[int, memoryview | StoredPiece]] = [(start, piece)]
        for at in range(low, high):
            first, known = self._starts[at], self._pieces[at]
            if first < start:
                rows.insert(0, (first, known[: start - first]))
            if self._stop(at) > stop:
                rows.append((stop, known[stop - first :]))
        self._count(self._pieces[low:high], -1)
        self._starts[low:high] = [first for first, _known in rows]
        self._pieces[low:high] = [known for _first, known in rows]
        self._count(self._pieces[low : low + len(rows)], 1)
        return before + len(piece) - self.in_memory

    def fill(self) -> int:
        """Fill the gaps with zeros, as a file system does; returns how many bytes that took."""
        before, end = self.held, 0
        for start, piece in [*zip(self._starts, self._pieces, strict=True), (self.nbytes, memoryview(b""))]:
            if end < start:
                self.add(end, memoryview(bytes(start - end)))
            end = start + len(piece)
        return self.held - before

    def _count(self, pieces: list[memoryview | StoredPiece], sign: int) -> None:
        self.held += sign * sum(map(len, pieces))
        self.in_memory += sign * sum(len(one) for one in pieces if not isinstance(one, StoredPiece))

    def _stop(self, at: int) -> int:
        return self._starts[at] + len(self._pieces[at])
