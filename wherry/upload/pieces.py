"""PartPieces: the bytes of one part of an object, held in the pieces in which they came.

No buffer of the size of the part is needed, so that a part of which only a few bytes are known (the frame of an
archive, a header) costs only these. The store sends the pieces one after the other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class PartPieces:
    """The pieces of one part; where bytes come twice, the later ones count.

    Attributes:
        nbytes: size of the part.
        held: bytes that are known.
    """

    __slots__ = ("_pieces", "_starts", "held", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.held = 0
        self._starts: list[int] = []
        self._pieces: list[memoryview] = []

    @property
    def complete(self) -> bool:
        """Whether all bytes are known."""
        return self.held == self.nbytes

    @property
    def views(self) -> list[memoryview]:
        """The pieces, in order."""
        return list(self._pieces)

    def add(self, start: int, piece: memoryview) -> int:
        """Add bytes, which are kept without a copy.

        Args:
            start: offset in the part.
            piece: the bytes.

        Returns:
            Number of bytes that were known already, and are dropped.
        """
        stop, before = start + len(piece), self.held
        low = bisect_right(self._starts, start)
        if low and self._stop(low - 1) > start:
            low -= 1
        high = bisect_left(self._starts, stop)
        rows = [(start, piece)]
        for at in range(low, high):
            first, known = self._starts[at], self._pieces[at]
            if first < start:
                rows.insert(0, (first, known[: start - first]))
            if self._stop(at) > stop:
                rows.append((stop, known[stop - first :]))
        dropped = sum(len(known) for known in self._pieces[low:high])
        self._starts[low:high] = [first for first, _known in rows]
        self._pieces[low:high] = [known for _first, known in rows]
        self.held += sum(len(known) for _first, known in rows) - dropped
        return before + len(piece) - self.held

    def fill(self) -> int:
        """Fill the gaps with zeros, as a file system does; returns how many bytes that took."""
        before, end = self.held, 0
        for start, piece in [*zip(self._starts, self._pieces, strict=True), (self.nbytes, memoryview(b""))]:
            if end < start:
                self.add(end, memoryview(bytes(start - end)))
            end = start + len(piece)
        return self.held - before

    def _stop(self, at: int) -> int:
        return self._starts[at] + len(self._pieces[at])
