"""The nouns of writing: a FileMap says what each byte of a checkpoint's files is; nothing here writes.

A file has **positions**: its bytes, if its size is known; the numbers of its chunks, if it is a Pack; a single one, if
it is one Late text. Everything that is counted, recorded, cut or shared out is a **Range** of positions, so there are
no numbers of pieces that a map would have to keep.

Laws (`tests/infra/test_spike_filemap.py`): segments tile each file exactly; `at` and `places` are inverse to each
other; a map takes at most 200 bytes a tensor and none a chunk, and finds what it is asked for in O(log n).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from wherry.core import dtypes
from wherry.core.tensorspec import Region, Span, TensorSpec, region_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from wherry.core.keypath import KeyPath


# ---- what decides bytes beside manifest and options ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything else that decides bytes; it stands in the first line of the log, so that all workers have the same.

    Attributes:
        name: of the target.
        step: training step, where known.
        item: name of the item of a run that the target is; empty if it is none.
        created_ns: the one time that the target's files state.
        contents: name → bytes of companions that a layout has to parse.
    """

    name: str
    step: int | None = None
    item: str = ""
    created_ns: int = 0
    contents: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


# ---- facts: what is known only when other bytes are -----------------------------------------------------------------


class Crc32(NamedTuple):
    """The CRC-32 of positions [start, stop) of a file."""

    file: int
    start: int
    stop: int


class Sizes(NamedTuple):
    """The stored size of every chunk of a Pack, from which the place of each follows."""

    file: int
    count: int


Need: TypeAlias = Crc32 | Sizes


class Known(Protocol):
    """The facts so far."""

    def crc32(self, need: Crc32) -> int | None: ...

    def sizes(self, need: Sizes) -> Sequence[int] | None: ...


# ---- segments --------------------------------------------------------------------------------------------------------


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
class Copied:
    """A span of a companion, or of another pinned file of the source."""

    member: str
    span: Span


@dataclass(frozen=True, slots=True)
class Codec:
    """How the elements of a chunk become bytes. `build` is in the plan: only the same build gives the same bytes."""

    name: str
    build: str
    encode: Callable[[memoryview], bytes] = field(compare=False)
    decode: Callable[[memoryview, int], memoryview] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Coded:
    """A chunk: a region of a tensor, padded with zeros to `shape`, then encoded."""

    tensor: KeyPath
    region: Region
    shape: tuple[int, ...]
    dtype: str
    codec: Codec

    @property
    def nbytes(self) -> int:
        """Bytes before encoding."""
        return dtypes.canonical_size(self.dtype, math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes that can be computed only when facts are known.

    Attributes:
        needs: the facts, in the order in which they become known: the first that is unknown settles it.
        render: computes the bytes, as a pure function of the facts.
        nbytes: their number; None only if they are all of a file.
    """

    needs: Sequence[Need]
    render: Callable[[Known], bytes]
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Pack:
    """All of a file: chunks whose sizes are known only when they are encoded, in an order that the layout fixes.

    Attributes:
        chunks: computed, not stored.
        nbytes: of all chunks before encoding.
    """

    chunks: Sequence[Coded]
    nbytes: int


Segment: TypeAlias = Literal | Raw | Copied | Coded | Late


class Segments:
    """The segments of a file of known size: rows of equal segments, of which each is computed when it is wanted.

    A row takes 24 bytes, whatever the number of its segments.
    """

    __slots__ = ("_firsts", "_offsets", "_segment", "_sizes")

    def __init__(self, segment: Callable[[int, int], Segment]) -> None:
        """No rows yet.

        Args:
            segment: computes a segment from the number of its row and its number in the row.
        """
        self._segment = segment
        self._firsts, self._offsets, self._sizes = array("q", [0]), array("q", [0]), array("q")

    def add(self, nbytes: int, count: int = 1) -> int:
        """Add a row of so many segments of so many bytes each; returns the offset of the first."""
        offset = self._offsets[-1]
        self._sizes.append(nbytes)
        self._firsts.append(self._firsts[-1] + count)
        self._offsets.append(offset + count * nbytes)
        return offset

    def __len__(self) -> int:
        """Number of segments."""
        return self._firsts[-1]

    def __getitem__(self, number: int) -> Segment:
        """A segment."""
        row = bisect_right(self._firsts, number) - 1
        return self._segment(row, number - self._firsts[row])

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._offsets[-1]

    def bounds(self, number: int) -> Span:
        """The bytes of the file that a segment is."""
        row = bisect_right(self._firsts, number) - 1
        start = self._offsets[row] + (number - self._firsts[row]) * self._sizes[row]
        return Span(start, start + self._sizes[row])

    def at(self, offset: int) -> int:
        """Number of the segment that has the byte at an offset; segments without bytes have none."""
        row = bisect_right(self._offsets, offset) - 1
        return self._firsts[row] + (offset - self._offsets[row]) // self._sizes[row]


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class File:
    """One file.

    Attributes:
        name: relative to the target, with `/`; `.` if it is the target.
        body: its segments, or the one that is all of it and has no known size.
    """

    name: str
    body: Segments | Pack | Late

    @property
    def length(self) -> int:
        """Number of its positions."""
        if isinstance(self.body, Segments):
            return self.body.nbytes
        return len(self.body.chunks) if isinstance(self.body, Pack) else 1

    @property
    def weight(self) -> int:
        """Bytes that are moved for it, by which work is shared out; 0 if that is known at its end only."""
        return 0 if isinstance(self.body, Late) else self.body.nbytes


class Range(NamedTuple):
    """Positions [start, stop) of a file."""

    file: int
    start: int
    stop: int


Slice: TypeAlias = tuple[Range, ...]  # of one worker, in map order


@dataclass(frozen=True, slots=True)
class FileMap:
    """The files of a checkpoint.

    Attributes:
        files: in map order, computed where they are many.
        places: where the bytes of a part of a tensor lie, in its order.
        commit_members: names of the files that make the target a checkpoint, in the order in which they appear.
        checksums: whether pieces have a CRC-32, because a Late needs it.
    """

    files: Sequence[File]
    places: Callable[[KeyPath, Region | Span], Iterator[Range]]
    commit_members: tuple[str, ...]
    checksums: bool = False


class Paths:
    """Key path → number of a tensor in a sequence of specs, in O(log n) and 8 bytes a tensor: no dict."""

    __slots__ = ("_order", "_specs")

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._order = array("q", sorted(range(len(specs)), key=lambda number: specs[number].path))

    def number(self, path: KeyPath) -> int:
        """The number of a tensor; KeyError if there is none."""
        found = bisect_left(self._order, path, key=lambda number: self._specs[number].path)
        if found == len(self._order) or self._specs[self._order[found]].path != path:
            raise KeyError(path)
        return self._order[found]


# ---- chunk grids -----------------------------------------------------------------------------------------------------


class Grids:
    """The chunks of several tensors, one tensor after another, each in an order of its axes.

    Attributes:
        specs: with chunk grids; the tag `order` names the axes from the slowest to the fastest.
    """

    def __init__(self, specs: Sequence[TensorSpec], codec: Codec) -> None:
        self.specs, self._codec = specs, codec
        self.paths = Paths(specs)
        counts = (math.prod(counts_of(spec)) for spec in specs)
        self._firsts = array("q", accumulate(counts, initial=0))

    def __len__(self) -> int:
        """Number of chunks."""
        return self._firsts[-1]

    def __getitem__(self, number: int) -> Coded:
        """A chunk, by its number over all tensors."""
        spec, index = self.locate(number)
        region = tuple(
            slice(at * step, min((at + 1) * step, extent))
            for at, step, extent in zip(index, spec.chunks or (), spec.shape, strict=True)
        )
        return Coded(spec.path, region, spec.chunks or (), spec.dtype, self._codec)

    def locate(self, number: int) -> tuple[TensorSpec, tuple[int, ...]]:
        """The tensor of a chunk, and its index in the grid."""
        row = bisect_right(self._firsts, number) - 1
        spec, rest = self.specs[row], number - self._firsts[row]
        counts, index = counts_of(spec), [0] * len(spec.shape)
        for axis in reversed(order_of(spec)):
            rest, index[axis] = divmod(rest, counts[axis])
        return spec, tuple(index)

    def number(self, path: KeyPath, index: Sequence[int]) -> int:
        """The number of the chunk at an index of a tensor's grid."""
        row, rest = self.paths.number(path), 0
        counts = counts_of(self.specs[row])
        for axis in order_of(self.specs[row]):
            rest = rest * counts[axis] + index[axis]
        return self._firsts[row] + rest


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks [first, first + count) of grids, as those of a pack."""

    grids: Grids
    first: int
    count: int

    def __len__(self) -> int:
        """Number of chunks."""
        return self.count

    def __getitem__(self, number: int) -> Coded:
        """A chunk, by its number in the pack."""
        if not 0 <= number < self.count:
            raise IndexError(number)
        return self.grids[self.first + number]


def packs_of(grids: Grids, most: int) -> list[Pack]:
    """The packs that hold the chunks of grids in order, each of at most so many bytes before encoding, or one chunk.

    Chunks along the fastest axis are computed together, so a pack ends with such a line where lines are small.
    """
    found: list[Pack] = []
    first = number = filled = 0
    for spec in grids.specs:
        size, left, line = chunk_bytes(spec), math.prod(counts_of(spec)), line_of(spec)
        line = line if 2 * line * size <= most else 1
        while left:
            room = max(most - filled, 0) // size // line * line
            taken = min(left, room or (0 if filled else 1))
            number, left, filled = number + taken, left - taken, filled + taken * size
            if left:
                found.append(Pack(Run(grids, first, number - first), filled))
                first, filled = number, 0
    if number > first:
        found.append(Pack(Run(grids, first, number - first), filled))
    return found


def line_of(spec: TensorSpec) -> int:
    """Number of chunks along the fastest axis of a grid."""
    return counts_of(spec)[order_of(spec)[-1]] if spec.shape else 1


def counts_of(spec: TensorSpec) -> tuple[int, ...]:
    """Number of chunks along each axis."""
    return tuple(-(-extent // step) for extent, step in zip(spec.shape, spec.chunks or (), strict=True))


def order_of(spec: TensorSpec) -> tuple[int, ...]:
    """The axes of a grid from the slowest to the fastest; those of C order if the manifest names none."""
    text = (spec.tags or {}).get(ORDER)
    return tuple(map(int, text.split("x"))) if text else tuple(range(len(spec.shape)))


def chunk_bytes(spec: TensorSpec) -> int:
    """Bytes of a chunk before encoding, padding included."""
    return dtypes.canonical_size(spec.dtype, math.prod(spec.chunks or ()))


ORDER = "order"  # in a spec's tags, beside `grid`: a hint of the transform for formats with packs


# ---- what the engine cuts a map into ---------------------------------------------------------------------------------


class Piece(NamedTuple):
    """What is recorded: positions of one segment, of at most the engine's step.

    Attributes:
        range: its positions.
        segment: what they are.
        within: the bytes of the segment; of a chunk and of a Late without size, all.
    """

    range: Range
    segment: Segment
    within: Span


class Batch(NamedTuple):
    """What is computed together: pieces that follow one another in a file and need the same source bytes.

    Attributes:
        pieces: in map order.
        region: of the one tensor of which they are whole chunks; None for all other pieces.
        memory: bytes that it holds while it is computed.
    """

    pieces: tuple[Piece, ...]
    region: Region | None
    memory: int


class Part(NamedTuple):
    """What storage takes of a file at a time: bytes [number × step, …) as they are stored.

    Attributes:
        file: number of the file.
        number: of the part.
        nbytes: its size.
        mark: what the store calls this state of it.
        checksum: that the store has computed.
    """

    file: int
    number: int
    nbytes: int
    mark: str = ""
    checksum: str = ""


def pieces(file_map: FileMap, part: Range, step: int) -> Iterator[Piece]:
    """The pieces of a range, in order: no piece crosses a segment or a multiple of the step."""
    body = file_map.files[part.file].body
    if isinstance(body, Pack):
        for number in range(part.start, part.stop):
            chunk = body.chunks[number]
            yield Piece(Range(part.file, number, number + 1), chunk, Span(0, chunk.nbytes))
        return
    if isinstance(body, Late):
        yield Piece(part, body, Span(0, 0))
        return
    position = part.start
    while position < part.stop:
        number = body.at(position)
        bounds = body.bounds(number)
        stop = min(bounds.stop, part.stop, (position // step + 1) * step)
        within = Span(position - bounds.start, stop - bounds.start)
        yield Piece(Range(part.file, position, stop), body[number], within)
        position = stop


def slices(file_map: FileMap, count: int, grain: int) -> list[Slice]:
    """Cut the files that hold tensors among workers, in map order; the rest is nobody's, and so the commit's.

    Args:
        file_map: the map.
        count: of the workers.
        grain: borders within a file of known size are at its multiples: the size of parts, or 64 KiB on a file system.
    """
    total = sum(file.weight for file in file_map.files)
    found: list[list[Range]] = [[] for _ in range(count)]
    done = 0
    for number, file in enumerate(file_map.files):
        if not file.weight:
            continue
        if isinstance(file.body, Pack):
            found[min((done + file.weight // 2) * count // total, count - 1)].append(
                Range(number, 0, file.length)
            )
        else:
            cuts = [(total * worker // count - done) // grain * grain for worker in range(1, count)]
            edges = [0, *(min(max(cut, 0), file.weight) for cut in cuts), file.weight]
            for worker, (start, stop) in enumerate(pairwise(edges)):
                if start < stop:
                    found[worker].append(Range(number, start, stop))
        done += file.weight
    return [tuple(ranges) for ranges in found]


def joined_region(first: Region, second: Region) -> Region | None:
    """The region that two disjoint regions cover together; None if that is no box."""
    whole = tuple(
        slice(min(a.start, b.start), max(a.stop, b.stop)) for a, b in zip(first, second, strict=True)
    )
    sizes = [math.prod(region_shape(region)) for region in (first, second, whole)]
    return whole if sizes[0] + sizes[1] == sizes[2] else None
