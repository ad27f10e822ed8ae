"""Where the chunks of an OCDBT database lie in its data files, on a disk and in a store alike."""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from wherry.target.files import start_after
from wherry.target.grids import ChunkPlace, chunk_bytes, counts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.core.tensorspec import TensorSpec

DATA = "d"
_NUMBERED = re.compile(r"0{16}[0-9a-f]{16}")  # those with trees are digests


class _ChunkRun(NamedTuple):
    """Chunks of one array, one after another in one data file.

    Attributes:
        first: number of the first, counted over all arrays.
        chunks: their number.
        file: number of the data file.
        start: offset of the first.
        size: bytes of each.
        stride: bytes from the start of one to the start of the next.
    """

    first: int
    chunks: int
    file: int
    start: int
    size: int
    stride: int

    @property
    def end(self) -> int:
        """The end of the last chunk in the file."""
        return self.start + (self.chunks - 1) * self.stride + self.size


class ChunkPlaces:
    """The places of chunks of some tensors, all of a tensor's of the same size, one after another; they are computed.

    Attributes:
        ends: the size of each data file, the first of which always exists.
    """

    def __init__(self, specs: Sequence[TensorSpec], file_bytes: int) -> None:
        """Place the chunks.

        Args:
            specs: the tensors.
            file_bytes: size of a data file; a larger chunk has a file of its own.
        """
        self._firsts, self._fields = array("q"), array("q")  # of all runs: the first chunk, and everything
        self.ends = {data_file(0): 0}
        number = file = end = 0
        for spec in specs:
            size, left = chunk_bytes(spec), math.prod(counts_of(spec))
            stride = start_after(size, size)
            while left:
                start = start_after(end, size)
                room = (file_bytes - start - size) // stride + 1
                if end and room <= 0:
                    file, end = file + 1, 0
                    continue
                run = _ChunkRun(number, min(left, max(room, 1)), file, start, size, stride)
                self._firsts.append(run.first)
                self._fields.extend(run)
                self.ends[data_file(run.file)] = run.end
                number, left, end = number + run.chunks, left - run.chunks, run.end

    def at(self, number: int) -> ChunkPlace:
        """The place of a chunk, by its number."""
        row = bisect_right(self._firsts, number) - 1
        run = self._run(row)
        file, offset = data_file(run.file), run.start + (number - run.first) * run.stride
        if number + 1 < run.first + run.chunks:
            stop = offset + run.stride
        else:
            after = self._run(row + 1) if row + 1 < len(self._firsts) else None
            stop = after.start if after is not None and after.file == run.file else self.ends[file]
        return ChunkPlace(file, offset, run.size, stop)

    def _run(self, row: int) -> _ChunkRun:
        width = len(_ChunkRun._fields)
        return _ChunkRun(*self._fields[row * width : (row + 1) * width])


@lru_cache(1 << 12)  # chunks share the name, of which a giant has a thousand
def data_file(number: int) -> str:
    """A deterministic name: with random names, as in tensorstore, two conversions of a checkpoint would differ."""
    return f"{DATA}/{number:032x}"


def number_of_data_file(name: str) -> int | None:
    """The number of a data file with chunks, by its name; None of any other file, such as one with a tree."""
    digits = name.removeprefix(f"{DATA}/")
    return int(digits, 16) if _NUMBERED.fullmatch(digits) and name != digits else None
