"""FileMap: what each byte of a checkpoint's files is; the mirror of a reader's extents. Nothing here writes.

A format's `layout(manifest, options, scene)` returns one. It is pure. A map is computed, not stored: the segments of a
file follow one another without a gap, and each is computed when it is wanted. So the bytes of a target follow from its
manifest, and whatever writes them (one process or several, to a disk or in parts of an upload, at once or after a
kill) writes the same.

Laws (`tests/target/test_laws.py`): segments tile each file exactly; `places` and segments are inverse to each other; a
map takes at most 200 bytes a tensor, and finds a byte in O(log n).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Span, TensorSpec
from wherry.target.grids import ChunkCodec, ChunkPlace, Grids, chunk_bytes

if TYPE_CHECKING:
    from wherry.store.location import Location


def _no_companion(_name: str) -> Location | None:
    return None


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything besides manifest and options that decides bytes of a target.

    Attributes:
        companion: where a companion file of the plan is read, by its name, since some layouts have to parse some: in
            the source, so that every process finds it; None if the plan has none of this name.
        name: of the target, which states the step in some systems; empty where it is not known.
        created_ns: the time that all files of the target state, in nanoseconds of the Unix epoch.
    """

    companion: Callable[[str], Location | None] = _no_companion
    name: str = ""
    created_ns: int = 0


# ---- segments --------------------------------------------------------------------------------------------------------


class SegmentRange(NamedTuple):
    """Bytes [start, stop) of a file that lie in one segment; file and segment are given by their numbers."""

    file: int
    segment: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that manifest, options and scene fix; padding too."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Raw:
    """A span of a tensor's canonical bytes."""

    tensor: KeyPath
    span: Span


@dataclass(frozen=True, slots=True)
class Codec:
    """How elements become bytes, where a block of canonical bytes becomes fewer.

    Attributes:
        block: canonical bytes of a block; a span begins at a multiple.
        stored: bytes of a block in a file.
        encode: from canonical bytes of whole blocks.
    """

    block: int
    stored: int
    encode: Callable[[memoryview], memoryview]


@dataclass(frozen=True, slots=True)
class Coded:
    """All of a tensor's canonical bytes, encoded."""

    tensor: KeyPath
    codec: Codec


class Checksum(NamedTuple):
    """A CRC-32 in a segment, of four bytes, little endian.

    Attributes:
        at: its offset in the segment.
        first, stop: the segments whose bytes it is of, counted from the one that it stands in: (1, 3) are the two that
            follow that one.
    """

    at: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes that are known only when others are: they state checksums, perhaps before the bytes that these are of.

    Attributes:
        data: with zeros where the checksums stand.
        checksums: in any order.
    """

    data: bytes
    checksums: tuple[Checksum, ...]


Segment: TypeAlias = Literal | Raw | Coded | Late


class Segments:
    """The segments of a file, in order: each takes 9 bytes, and is computed when it is wanted."""

    __slots__ = ("_segment", "offsets", "tensors")

    def __init__(self, segment: Callable[[int], Segment]) -> None:
        """No rows yet.

        Args:
            segment: computes a segment from its number.

        Attributes:
            offsets: of each segment, and the size of the file.
            tensors: for each segment, whether it has bytes of a tensor.
        """
        self._segment = segment
        self.offsets, self.tensors = array("q", [0]), bytearray()

    def add(self, nbytes: int, *, tensor: bool = False) -> None:
        """Add a segment of this many bytes.

        Args:
            nbytes: its size.
            tensor: whether it is Raw or Coded.
        """
        self.offsets.append(self.offsets[-1] + nbytes)
        self.tensors.append(tensor and nbytes > 0)

    def __len__(self) -> int:
        """Number of segments."""
        return len(self.tensors)

    def __getitem__(self, number: int) -> Segment:
        """A segment."""
        return self._segment(number)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.offsets[-1]

    def bounds(self, number: int) -> Span:
        """The bytes of the file that a segment is."""
        return Span(self.offsets[number], self.offsets[number + 1])

    def at(self, offset: int) -> int:
        """Number of the segment that has the byte at an offset; segments without bytes have none."""
        return bisect_right(self.offsets, offset) - 1

    def frames(self) -> Iterator[tuple[int, int]]:
        """The numbers of the segments between tensors, before the first and after the last one, where there are any."""
        find, start, count = self.tensors.find, 0, len(self.tensors)
        while start < count:
            stop = find(1, start)
            if stop < 0:
                stop = count
            if start < stop:
                yield start, stop
            start = stop + 1

    def frame_start(self, number: int) -> int:
        """Number of the first segment after the tensor before a segment with bytes of a tensor."""
        return self.tensors.rfind(1, 0, number) + 1

    def frame_stop(self, number: int) -> int:
        """Number of the next segment with bytes of a tensor, or of all segments if there is none."""
        found = self.tensors.find(1, number + 1)
        return len(self.tensors) if found < 0 else found


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class File:
    """One file.

    Attributes:
        name: relative to the target, with `/`; `.` if it is the target.
        body: its segments; or, of a small file without tensors whose size is not needed before, what computes it.
    """

    name: str
    body: Segments | Callable[[], bytes]


# ---- chunks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of the tensors that are written on a grid, and the files that hold them.

    They lie in a file each (`SeparateChunks`), at known places of files of known size (`PlacedChunks`), or, where their
    sizes are known only when they are encoded, one after another as they come (`PackedChunks`).

    Attributes:
        grids: their numbers.
        codec: how they are stored.
        name: what a chunk is called in errors, by its number.
        index: the files that describe the chunks and are written after them, from a function that gives their places;
            in order, relative to the folder.
        folder: in which all these files are, relative to the target; empty for the target itself.
    """

    grids: Grids
    codec: ChunkCodec
    name: Callable[[int], str]
    index: Callable[[Callable[[int], ChunkPlace]], Iterable[File]]
    folder: str = ""

    def size(self, number: int) -> int | None:
        """Stored bytes of a chunk; None if they are known only when it is encoded."""
        return chunk_bytes(self.grids[number].spec) if self.codec.plain else None

    def known_place(self, number: int) -> ChunkPlace | None:  # noqa: ARG002  overridden
        """Where a chunk is; None if sizes decide it that are known only when chunks are encoded."""
        return None

    def name_in_target(self, file: str) -> str:
        """The name of a file relative to the target, from the one relative to the folder."""
        return f"{self.folder}/{file}" if self.folder else file


@dataclass(frozen=True, slots=True)
class SeparateChunks(Chunks):
    """Chunks in a file each, which has the name of the chunk; no order is needed among the files that describe them."""

    def known_place(self, number: int) -> ChunkPlace | None:
        """See Chunks."""
        size = self.size(number)
        return None if size is None else ChunkPlace(self.name(number), 0, size, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedChunks(Chunks):
    """Plain chunks at known places of files of known size.

    Attributes:
        place: where a chunk is.
        sizes: file → its bytes.
    """

    place: Callable[[int], ChunkPlace]
    sizes: Mapping[str, int]

    def known_place(self, number: int) -> ChunkPlace:
        """See Chunks."""
        return self.place(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedChunks(Chunks):
    """Encoded chunks, one after another in data files as they come.

    Attributes:
        file: the name of a data file, by its number.
        number_of: the number of a data file, by its name; None of any other file.
        file_bytes: most bytes of one, unless a chunk has more.
    """

    file: Callable[[int], str]
    number_of: Callable[[str], int | None]
    file_bytes: int


@dataclass(frozen=True, slots=True)
class FileMap:
    """The files of a checkpoint.

    Attributes:
        files: those that hold tensors, then those that are written when all bytes of tensors are durable.
        places: where the bytes of a span of a tensor lie, in the order of the span; of a Coded tensor, as they are
            stored.
        checksums: whether a segment is Late.
        codecs: key path → codec of the tensors that are Coded.
        chunks: of the tensors that are written on a grid, and the files that hold and describe them.
    """

    files: Sequence[File]
    places: Callable[[KeyPath, Span], Sequence[SegmentRange]]
    checksums: bool = False
    codecs: Mapping[KeyPath, Codec] = field(default_factory=dict["KeyPath", Codec])
    chunks: Chunks | None = None


def map_of_chunks(chunks: Chunks | None, files: Iterable[File]) -> FileMap:
    """The map of a target whose tensors are all written on a grid.

    Args:
        chunks: of the tensors; None if there are none.
        files: written when the chunks and the files that describe them are durable.
    """
    return FileMap(tuple(files), lambda _path, _span: (), chunks=chunks)


def within(folder: str, file_map: FileMap) -> FileMap:
    """A map whose files lie in a folder of the target.

    Args:
        folder: relative to the target.
        file_map: its files, relative to the folder.
    """
    files = tuple(File(f"{folder}/{file.name}", file.body) for file in file_map.files)
    chunks = file_map.chunks
    if chunks is not None:
        chunks = replace(chunks, folder=f"{folder}/{chunks.folder}".rstrip("/"))
    return replace(file_map, files=files, chunks=chunks)


def names_in(file_map: FileMap) -> Iterator[str]:
    """The names of files that key paths decide; those of a database are numbers and digests."""
    yield from (file.name for file in file_map.files if file.name != ".")
    chunks = file_map.chunks
    if isinstance(chunks, SeparateChunks):
        index = chunks.index(_no_place)
        names = chain(map(chunks.name, range(len(chunks.grids))), (file.name for file in index))
        yield from map(chunks.name_in_target, names)


def _no_place(number: int) -> ChunkPlace:
    raise AssertionError(
        f"the files that describe separate chunks state no place, such as that of chunk {number}"
    )


def content_of(file: File) -> bytes:
    """The bytes of a file without tensors."""
    assert not isinstance(file.body, Segments), "files with tensors have segments"
    return file.body()


def map_of_one(head: bytes, specs: Iterable[TensorSpec], alignment: int = 1) -> FileMap:
    """The map of one file: some bytes, then each tensor.

    Args:
        head: the first bytes.
        specs: the tensors, in their order.
        alignment: each tensor, the last one too, is followed by zeros up to a multiple of this many bytes; `head` is
            not.
    """

    def segment(number: int) -> Segment:
        if body.tensors[number]:
            return tensors.raw(0, number)
        return Literal(bytes(body.bounds(number).nbytes) if number else head)

    body = Segments(segment)
    tensors = TensorSegments([body])
    body.add(len(head))
    for spec in specs:
        if nbytes := spec.nbytes:
            tensors.add(spec, 0, len(body))
            body.add(nbytes, tensor=True)
            if padding := -nbytes % alignment:
                body.add(padding)
    return FileMap((File(".", body),), tensors.places)


class TensorSegments:
    """The segments that hold each tensor, in 40 bytes: a layout adds them in the order of the map."""

    __slots__ = ("_bodies", "_ends", "_keys", "_last", "_order", "_specs", "_starts")

    def __init__(self, bodies: Sequence[Segments]) -> None:
        """No tensors yet.

        Args:
            bodies: of the files, to which the layout adds.
        """
        self._bodies = bodies
        self._specs: list[TensorSpec] = []
        self._ends = array("q", [0])  # up to and with each tensor: how many segments there are
        self._keys = array("q")  # of each segment: its file and its number
        self._starts = array("q")  # of each segment: its first byte in the tensor
        self._order = array("q")  # the tensors by key path; computed when one is looked up out of order
        self._last = 0  # the tensor that was looked up last

    def add(self, spec: TensorSpec, file: int, segment: int, start: int = 0) -> None:
        """Add a segment; those of a tensor follow one another.

        Args:
            spec: the tensor.
            file: number of the file.
            segment: its number there.
            start: its first byte in the tensor.
        """
        key = file << _FILE | segment
        assert not self._keys or self._keys[-1] < key, "segments are added in the order of the map"
        if start == 0:
            self._specs.append(spec)
            self._ends.append(self._ends[-1])
        assert self._specs[-1] is spec, "the segments of a tensor follow one another"
        self._keys.append(key)
        self._starts.append(start)
        self._ends[-1] += 1

    def places(self, path: KeyPath, span: Span) -> Sequence[SegmentRange]:
        """See FileMap; of a span that ends behind its tensor, the bytes that there are."""
        begin, stop = span
        if begin == stop:
            return ()
        number = self._number(path)
        first, end = self._ends[number], self._ends[number + 1]
        if end - first == 1:
            return (self._place(first, begin, stop),)
        first = bisect_right(self._starts, begin, first, end) - 1
        end = bisect_left(self._starts, stop, first, end)
        return [self._place(entry, begin, stop) for entry in range(first, end)]

    def _place(self, entry: int, begin: int, stop: int) -> SegmentRange:
        """Where bytes of a tensor lie that are in a segment."""
        key = self._keys[entry]
        file, segment = key >> _FILE, key & _SEGMENT
        offsets = self._bodies[file].offsets
        first = offsets[segment]
        moved = first - self._starts[entry]
        return SegmentRange(file, segment, max(begin + moved, first), min(stop + moved, offsets[segment + 1]))

    def raw(self, file: int, segment: int) -> Raw:
        """A segment, as bytes of its tensor."""
        entry = bisect_left(self._keys, file << _FILE | segment)
        spec, start = self._specs[bisect_right(self._ends, entry) - 1], self._starts[entry]
        return Raw(spec.path, Span(start, start + self._bodies[file].bounds(segment).nbytes))

    def _number(self, path: KeyPath) -> int:
        """The number of a tensor; the last one and the next one, which are most often wanted, are found at once."""
        specs, last = self._specs, self._last
        if last < len(specs) and specs[last].path == path:
            return last
        if last + 1 < len(specs) and specs[last + 1].path == path:
            self._last = last + 1
            return last + 1
        if len(self._order) < len(specs):
            self._order = array("q", sorted(range(len(specs)), key=lambda number: specs[number].path))
        found = bisect_left(self._order, path, key=lambda number: specs[number].path)
        if found == len(self._order) or specs[self._order[found]].path != path:
            raise KeyError(path)
        self._last = self._order[found]
        return self._last


_FILE = 40  # bits of the number of a segment
_SEGMENT = (1 << _FILE) - 1
