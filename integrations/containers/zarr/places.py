"""Where the chunks of an OCDBT database lie in its data files, on a disk and in a store alike."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.digest import sha256_of
from wherry.integrations.containers.flat.blocks import BLOCK
from wherry.integrations.containers.flat.files import SMALL
from wherry.integrations.containers.ocdbt.write import Reference, encode_database

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from wherry.integrations.containers.ocdbt.write import Value
    from wherry.integrations.containers.zarr.metadata import ZarrArray

DATA = "d"
FILE_BYTES = 2 << 30


class EncodedDatabase(NamedTuple):
    """The tree and the manifest of a database.

    Attributes:
        nodes: name of the data file with the tree, relative to the database.
        tree: its contents.
        manifest: contents of the manifest.
    """

    nodes: str
    tree: bytes
    manifest: bytes


def encoded_database(values: Mapping[str, Value]) -> EncodedDatabase:
    """The tree over values whose data files exist; only the time of the commit differs between two runs."""
    name = sha256_of("ocdbt", sorted(values))[:32]
    nodes = f"{DATA}/{name}"
    return EncodedDatabase(nodes, *encode_database(values, nodes, bytes.fromhex(name), time.time_ns()))


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


class ChunkPlaces(Mapping[str, Reference]):
    """Key → place of each chunk of some arrays of which every chunk has the same size, one after another.

    The places are computed, not kept: a giant has several 100,000 chunks, and a row of a dict for each is 100 MB.

    Attributes:
        arrays: what the keys of an array's chunks begin with → the array, in the order of the files.
        ends: the size of each data file, the first of which always exists.
    """

    def __init__(self, arrays: Mapping[str, ZarrArray], file_bytes: int = FILE_BYTES) -> None:
        """Place the chunks.

        Args:
            arrays: what the keys of an array's chunks begin with → the array.
            file_bytes: size of a data file; a larger chunk has a file of its own.
        """
        self.arrays = arrays
        firsts = list(accumulate([array.chunk_count for array in arrays.values()], initial=0))
        self._count = firsts.pop()
        self._firsts = dict(zip(arrays, firsts, strict=True))
        self._runs = list(_runs(arrays.values(), file_bytes))
        self._starts = [run.first for run in self._runs]
        self.ends = {data_file(0): 0} | {data_file(run.file): run.end for run in self._runs}

    def __getitem__(self, key: str) -> Reference:
        """The place of a chunk."""
        return self._at(self._number(key))

    def __iter__(self) -> Iterator[str]:
        """The keys, in the order of the files."""
        for prefix, array in self.arrays.items():
            yield from (prefix + key for key in array.keys())  # noqa: SIM118  of chunks, not of a mapping

    def __len__(self) -> int:
        """Number of chunks."""
        return self._count

    def stop(self, key: str) -> int:
        """Where the bytes after a chunk end that nobody else writes: at the next chunk, or at the end of the file."""
        number = self._number(key)
        file = self._at(number).file
        after = self._at(number + 1) if number + 1 < self._count else None
        return self.ends[file] if after is None or after.file != file else after.offset

    def _at(self, number: int) -> Reference:
        run = self._runs[bisect_right(self._starts, number) - 1]
        return Reference(data_file(run.file), run.start + (number - run.first) * run.stride, run.size)

    def _number(self, key: str) -> int:
        """The number of a chunk, counted over all arrays."""
        end = len(key)
        while end > 0:  # the name of an array may contain slashes, and so may the key of a chunk in it
            end = key.rfind("/", 0, end) + 1
            array = self.arrays.get(key[:end])
            number = None if array is None else array.number(key[end:])
            if number is not None:
                return self._firsts[key[:end]] + number
            end -= 1
        raise KeyError(key)


def _runs(arrays: Iterable[ZarrArray], file_bytes: int) -> Iterator[_ChunkRun]:
    number = file = end = 0
    for array in arrays:
        size, left = array.chunk_nbytes, array.chunk_count
        stride = start_after(size, size)
        while left:
            start = start_after(end, size)
            room = (file_bytes - start - size) // stride + 1
            if end and room <= 0:
                file, end = file + 1, 0
                continue
            run = _ChunkRun(number, min(left, max(room, 1)), file, start, size, stride)
            yield run
            number, left, end = number + run.chunks, left - run.chunks, run.end


def start_after(end: int, nbytes: int) -> int:
    """Offset of a chunk after others: a large chunk begins on a block, for direct I/O."""
    return end if nbytes < SMALL else -(-end // BLOCK) * BLOCK


def ends_of(places: Mapping[str, Reference]) -> dict[str, int]:
    """The size of each data file, the first of which always exists."""
    ends = {data_file(0): 0}
    for place in places.values():
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    return ends


@lru_cache(1 << 12)  # chunks share the name, of which a giant has a thousand
def data_file(number: int) -> str:
    """A deterministic name: with random names, as in tensorstore, two conversions of a checkpoint would differ."""
    return f"{DATA}/{number:032x}"
