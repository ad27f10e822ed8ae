"""Move: the unit of work, and how a tensor is cut into moves.

A move is a C-contiguous part of one target tensor with the part of the source that it needs. Where the target
takes any span and the source is stored raw, a move is two leaves (8 MiB). If either side has chunks, moves end at
chunk boundaries, so that every chunk is decoded and encoded once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from wherry.core import dtypes
from wherry.core.digest import LEAF
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, Span, TensorSpec, row_bands
from wherry.formats.format import Access, Computed, Contents, Extent, Stored

_Grid: TypeAlias = tuple[int, ...] | None
_Form: TypeAlias = tuple[tuple[int, ...], str, _Grid, tuple[_Grid, ...]]
_Cut: TypeAlias = tuple[Span, Region | None, bool]

SMALL = 64 << 10  # bytes of a move; calls cost little compared with the bytes of a larger one
RAW_BYTES = 2 * LEAF
DECODED_BYTES = 4 * LEAF
LARGEST_COMMON_BAND = 16 * LEAF  # rather than to decode chunks of the source twice
LARGEST_BAND = 4 * LEAF  # rather than to move chunk by chunk
DECODE_FACTOR = 2  # decoded data is in memory twice: in the codec and as an array


class Move(NamedTuple):
    """One unit of work of a conversion in which source and target tensors have the same shape and dtype.

    Attributes:
        source: key path in the source.
        span: canonical bytes that it covers, in the source and in every target.
        region: the same as a region; None if the source is read by span.
        box: whether the region is not one run of bytes; the span then only orders the moves and counts their bytes.
    """

    source: KeyPath
    span: Span
    region: Region | None
    box: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """How one tensor is read within a memory budget. It outlives the contents from which it was determined.

    Attributes:
        extents: where its bytes are, if files hold them as they are; else None.
        regions: whether any region can be read without decoding much more.
        gridded: whether the grid of its chunks matters.
        band: extents of the part in one spill file, if its chunks are too large to be decoded whole.
        flows: whether it is one such chunk that is decoded in order, so that no file is needed.
        stops: for each extent, how many of the tensor's bytes lie in it and in those before it.
    """

    extents: tuple[Extent, ...] | None
    regions: bool = True
    gridded: bool = False
    band: tuple[int, ...] | None = None
    flows: bool = False
    stops: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Find where extents end."""
        stops = tuple(accumulate(extent.length for extent in self.extents or ()))
        object.__setattr__(self, "stops", stops)

    @classmethod
    def of(cls, access: Access) -> Way:
        """How a tensor is read whose chunks are not too large."""
        if isinstance(access, Stored):
            return cls(access.extents)
        gridded = access.gridded if isinstance(access, Computed) else access.decoder is not None
        return cls(None, access.decoder is None, gridded)

    @property
    def spilled(self) -> bool:
        """Whether the tensor is decoded into spill files."""
        return self.band is not None and not self.flows

    @property
    def spans(self) -> bool:
        """Whether any span can be read, raw or from a spill file; otherwise only regions can."""
        return self.extents is not None or self.band is not None

    def moves(self, spec: TensorSpec, targets: Sequence[TensorSpec]) -> Iterator[Move]:
        """The moves of the tensor to some targets, in C order."""
        nbytes = spec.nbytes
        if nbytes <= SMALL:
            gridded = [target for target in targets if target.chunks is not None]
            if nbytes and self.extents is not None and not gridded:
                return iter((Move(spec.path, whole_span(nbytes), None),))
            cuts = _cuts_of(*self._form(spec, targets), raw=self.spans, regions=self.regions)
            return iter([Move(spec.path, *cut) for cut in cuts])
        source = spec if self.gridded or spec.chunks is None else replace(spec, chunks=None)
        return moves_of(source, targets, raw=self.spans, regions=self.regions)

    def count(self, spec: TensorSpec, targets: Sequence[TensorSpec]) -> int:
        """Number of these moves."""
        return self._sizes(spec, targets)[0]

    def largest(self, spec: TensorSpec, targets: Sequence[TensorSpec]) -> int:
        """Memory for the largest of these moves, in bytes; decoded data counts twice, as the codec holds it too."""
        nbytes = self._sizes(spec, targets)[1]
        return nbytes if self.spans else DECODE_FACTOR * nbytes

    def _sizes(self, spec: TensorSpec, targets: Sequence[TensorSpec]) -> tuple[int, int]:
        return _sizes_of(*self._form(spec, targets), raw=self.spans, regions=self.regions)

    def _form(self, spec: TensorSpec, targets: Sequence[TensorSpec]) -> _Form:
        grids = tuple([target.chunks for target in targets])
        return spec.shape, spec.dtype, spec.chunks if self.gridded else None, grids


@lru_cache(1 << 12)
def whole_span(nbytes: int) -> Span:
    """The span of all tensors of this size, of which a large model has thousands."""
    return Span(0, nbytes)


@lru_cache(1 << 12)
def _sizes_of(
    shape: tuple[int, ...], dtype: str, chunks: _Grid, grids: tuple[_Grid, ...], *, raw: bool, regions: bool
) -> tuple[int, int]:
    """The number of moves of all tensors with this form, of which a large model has thousands; bytes of the largest."""
    moves = _moves_of_form(shape, dtype, chunks, grids, raw=raw, regions=regions)
    sizes = [move.span.nbytes for move in moves]
    return len(sizes), sizes[0] if sizes else 0


@lru_cache(1 << 12)
def _cuts_of(
    shape: tuple[int, ...], dtype: str, chunks: _Grid, grids: tuple[_Grid, ...], *, raw: bool, regions: bool
) -> tuple[_Cut, ...]:
    """The moves of all tensors with this form, without their key paths."""
    moves = _moves_of_form(shape, dtype, chunks, grids, raw=raw, regions=regions)
    return tuple((move.span, move.region, move.box) for move in moves)


def _moves_of_form(
    shape: tuple[int, ...], dtype: str, chunks: _Grid, grids: tuple[_Grid, ...], *, raw: bool, regions: bool
) -> Iterator[Move]:
    source = TensorSpec((), shape, dtype, chunks)
    targets = [TensorSpec((), shape, dtype, grid) for grid in grids]
    return moves_of(source, targets, raw=raw, regions=regions)


def moves_of(
    source: TensorSpec, targets: Sequence[TensorSpec], *, raw: bool, regions: bool = False
) -> Iterator[Move]:
    """Cut one tensor into moves, in C order.

    Args:
        source: the tensor that is read; its chunk grid counts only if it must be decoded.
        targets: the tensors that are written from it; a chunk grid means that whole chunks must be written.
        raw: whether the source's canonical bytes are stored raw in files.
        regions: whether any region of the source can be read without reading much more.
    """
    if source.nbytes == 0:
        return
    grids = [target.chunks for target in targets if target.chunks is not None]
    if raw and not grids:
        for start in range(0, source.nbytes, RAW_BYTES):
            yield Move(source.path, Span(start, min(start + RAW_BYTES, source.nbytes)), None)
        return
    # Where only digests are wanted, larger regions are read in fewer and longer runs.
    limit = RAW_BYTES if raw or (regions and targets) else DECODED_BYTES
    decoded = [] if raw or source.chunks is None else [source.chunks]
    grid = common_grid(source.shape, [*decoded, *grids])
    if grids and decoded and _band_bytes(source, grid) > LARGEST_COMMON_BAND:
        grid = common_grid(source.shape, grids)  # decoding a chunk twice is better than holding the tensor
    if grids and regions and _band_bytes(source, grid) > LARGEST_BAND:
        yield from _boxes(source, grids)
        return
    for region, span in row_bands(source, limit, grid):
        yield Move(source.path, span, region)


def _boxes(source: TensorSpec, grids: Sequence[tuple[int, ...]]) -> Iterator[Move]:
    """Moves of single chunks that are not runs of the tensor's bytes: a band of them would not fit the memory."""
    steps = tuple(
        min(math.lcm(*(grid[axis] for grid in grids)), extent) for axis, extent in enumerate(source.shape)
    )
    at = 0
    for cell in cells(source.whole, steps):
        elements = math.prod(part.stop - part.start for part in cell)
        end = at + dtypes.canonical_size(source.dtype, elements)
        yield Move(source.path, Span(at, end), cell, box=True)
        at = end


def common_grid(shape: tuple[int, ...], grids: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Extents on whose multiples a tensor may be cut without touching a chunk of any grid twice.

    Only leading axes are cut: an axis is cut below its full extent only while all axes before it are cut to 1,
    because a move must be contiguous in C order.
    """
    cut: list[int] = []
    open_axis = True
    for axis, extent in enumerate(shape):
        step = math.lcm(*(grid[axis] for grid in grids))
        cut.append(min(step, extent) if open_axis else extent)
        open_axis = open_axis and step == 1
    return tuple(cut)


def _band_bytes(spec: TensorSpec, grid: tuple[int, ...]) -> int:
    rest = [extent if step > 1 else 1 for step, extent in zip(grid, spec.shape, strict=True)]
    return dtypes.canonical_size(spec.dtype, math.prod([*grid[:1], *rest[1:]])) if grid else spec.nbytes


def chunk_count(shape: tuple[int, ...], chunks: tuple[int, ...]) -> int:
    """Number of chunks of a regular grid over a shape."""
    return math.prod(-(-extent // max(chunk, 1)) for extent, chunk in zip(shape, chunks, strict=True))


def region_span(spec: TensorSpec, region: Region) -> Span:
    """Canonical bytes of a region that is contiguous in C order."""
    offset = sum(part.start * math.prod(spec.shape[axis + 1 :]) for axis, part in enumerate(region))
    elements = math.prod(part.stop - part.start for part in region)
    start = dtypes.canonical_size(spec.dtype, offset)
    return Span(start, start + dtypes.canonical_size(spec.dtype, elements))


def begins_at(spec: TensorSpec, region: Region, at: int) -> bool:
    """Whether a region is one run of the tensor's canonical bytes, and begins at an offset of them."""
    rows = zip(region, spec.shape, strict=True)
    long = [number for number, (part, _extent) in enumerate(rows) if part.stop - part.start > 1]
    inner = zip(region[long[0] + 1 :], spec.shape[long[0] + 1 :], strict=True) if long else ()
    run = all(part.stop - part.start == extent for part, extent in inner)
    return run and region_span(spec, region).start == at


def cells(region: Region, chunks: tuple[int, ...]) -> Iterator[Region]:
    """The chunks of a grid in a region whose bounds are on the grid or at the tensor's edge."""
    if not region:
        yield ()
        return
    first, rest = region[0], region[1:]
    for start in range(first.start, first.stop, chunks[0]):
        part = slice(start, min(start + chunks[0], first.stop))
        for tail in cells(rest, chunks[1:]):
            yield (part, *tail)


def on_grid(region: Region, chunks: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a region consists of whole chunks."""
    return all(
        part.start % chunk == 0 and (part.stop % chunk == 0 or part.stop == extent)
        for part, chunk, extent in zip(region, chunks, shape, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Ways:
    """How tensors are read. Of raw tensors, of which large checkpoints have very many, nothing is kept.

    Attributes:
        reader: the checkpoint's reader.
        specs: the tensors of the checkpoint.
        paths: key paths of those that are read; may have one several times.
        kept: key path → how the tensor is read, of those that are not raw.
    """

    reader: Contents
    specs: Mapping[KeyPath, TensorSpec]
    paths: Collection[KeyPath]
    kept: Mapping[KeyPath, Way]

    def __getitem__(self, path: KeyPath) -> Way:
        way = self.kept.get(path)
        return Way.of(self.reader.access(self.specs[path])) if way is None else way

    def items(self) -> Iterator[tuple[KeyPath, Way]]:
        """Each tensor that is read, with its way as `how` has it."""
        return ((path, self.how(path)) for path in dict.fromkeys(self.paths))

    def moves(self, path: KeyPath, targets: Sequence[TensorSpec]) -> Iterator[Move]:
        """The moves of a tensor to some targets, in C order; where its raw bytes lie does not matter."""
        return self.how(path).moves(self.specs[path], targets)

    def how(self, path: KeyPath) -> Way:
        """How a tensor is cut into moves and read, without where its raw bytes lie."""
        return self.kept.get(path, _RAW)

    def joined(self, more: Sequence[Ways]) -> Ways:
        """The ways of these tensors and of more of the same checkpoint."""
        paths = [path for ways in (self, *more) for path in ways.paths]
        kept = {path: way for ways in (self, *more) for path, way in ways.kept.items()}
        return replace(self, paths=paths, kept=kept)


_RAW = Way(())


@dataclass(frozen=True, slots=True)
class JointMoves:
    """The moves of all targets of one source; each part of the source is read once.

    Attributes:
        sources: the source tensors that are read.
        targets: source key path → the target tensors that are made of it.
        ways: how they are read.
    """

    sources: Mapping[KeyPath, TensorSpec]
    targets: Mapping[KeyPath, Sequence[TensorSpec]]
    ways: Ways

    def __iter__(self) -> Iterator[Move]:
        for source, targets in self.targets.items():
            yield from self.ways.moves(source, targets)

    def of(self, source: KeyPath) -> Iterator[Move]:
        """The moves of one source tensor."""
        return self.ways.moves(source, self.targets[source])

    def are_boxes(self, source: KeyPath) -> bool:
        """Whether the moves of a source tensor are boxes: all are, or none."""
        first = next(self.of(source), None)
        return first is not None and first.box
