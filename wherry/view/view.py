"""View: a checkpoint in another system's layout, as if that system had written it.

The view has the target's key paths, shapes and dtypes; its reader gathers any region from the source. So the same
plan, mover, journal and verification serve conversions between systems and between containers. If a tensor's bytes are
contiguous in the source's files (renamed, stacked along its first axis, taken out of a stack), they are read as extents
and are never turned into an array in memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from wherry.core.account import Bound, IgnoredEntry
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import GRID, Region, TensorSpec, region_shape
from wherry.families import Projection, target_manifest
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.companions import MemoryFiles, ignored_companion
from wherry.formats.contents import Absent, Access, Computed, Contents, ContentsOver, Extent, Stored
from wherry.formats.format import Opened
from wherry.layout.copies import Copy, copies, part_bytes, taken_by
from wherry.layout.cuts import cut_copy, cut_multiples, dimension_to_cut, rows_of_long_runs, stacked_grid
from wherry.layout.runs import cut, runs
from wherry.mover.decode import DecodedReader, Parts
from wherry.mover.output import as_array
from wherry.mover.read import memory_for, read_array
from wherry.quantized.computed_reader import ComputedReader
from wherry.storage.location import Location
from wherry.tree.tree_reading import ModelTree

if TYPE_CHECKING:
    import numpy as np

    from wherry.families.companions import CompanionFiles

_OTHER_SYSTEM = "the file belongs to the source's system; the target's does not use it"
_NO_PLACE = "a layout has places for tensors only"
_BAND = 8 << 20  # bytes gathered at a time: the unit of raw moves
_LARGEST_BAND = 4 * _BAND  # rather than to gather short runs


class View(Checkpoint):
    """A checkpoint whose tensors are made of tensors of another, which must stay open while the view is used.

    Attributes:
        projected: the projection of the source in the target's layout.
    """

    is_view = True

    def __init__(
        self,
        source: Checkpoint,
        projected: Projection,
        manifest: Manifest,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Create a view; nothing is read yet.

        Args:
            source: the source.
            projected: its projection in the target's layout.
            manifest: the contents of the view.
            files: new companion files, by name.
        """
        self._source = source
        self._new_files = files or {}
        self.projected = projected
        reader = self.reader_over(DecodedReader(source.original.reader))
        super().__init__(Opened(source.detection, manifest, reader, source.ignored))
        self.uses = source.uses

    @property
    def original(self) -> Checkpoint:
        """The stored checkpoint: the source, or the checkpoint of which the source is a view."""
        return self._source.original

    @property
    def source(self) -> Checkpoint:
        """The source, whose layout this view changes."""
        return self._source

    @property
    def parameters(self) -> int:
        """The number of the source's elements, second copies counted once."""
        return self._source.parameters - self.projected.source.repeated

    def made_of(self, path: KeyPath) -> Collection[KeyPath]:
        """The stored tensors of which a tensor is made."""
        return {stored for taken in self._sources_of(path) for stored in self._source.made_of(taken)}

    def same_bytes(self, path: KeyPath) -> KeyPath | None:
        """The stored tensor whose bytes a tensor has, all of them in the same order; None if there is none."""
        if self._source.is_view:
            return None
        stored = self.projected.targets.get(path)
        if stored is None:
            return self.projected.scalars.get(path)
        spans = runs(stored, self.projected.pieces)
        if spans is None or len(spans) != 1:
            return None
        ((source, span),) = spans
        return source.path if span.nbytes == source.nbytes == stored.spec.nbytes else None

    def _sources_of(self, path: KeyPath) -> Collection[KeyPath]:
        """The source's tensors of which a tensor is made."""
        taken = self.projected.scalars.get(path)
        if taken is not None:
            return {taken}
        return set(taken_by(self.projected.targets[path], self.projected.pieces))

    def reader_over(self, reader: Contents) -> Contents:
        """A reader of the view over one of the stored checkpoint."""
        return ViewReader(self._source, self._source.reader_over(reader), self.projected, self._new_files)


class LayoutView(View):
    """A source in another system's layout.

    Attributes:
        ignored: entries of the source that are not carried, each with its rule.
        bounds: key path → bound of the error after a round trip; see Checkpoint.
        overflow: whether finite values may become infinite.
        notes: messages about content that could not be carried or made.
        snippet: code that loads the result with the target's own software.
    """

    laid_out = True

    def __init__(
        self,
        source: Checkpoint,
        projected: Projection,
        made: CompanionFiles | None = None,
        dtype: str | None = None,
        only: str | None = None,
        custom: Mapping[str, Any] | None = None,
        tree: ModelTree | None = None,
        renames: Sequence[str] = (),
        *,
        overflow: bool = False,
    ) -> None:
        """Create a view; nothing is read yet.

        Args:
            source: the source.
            projected: its projection in the target's layout.
            made: the companion files of the target.
            dtype: the element type to which the parameters are cast, which is recorded with the layout.
            only: `params` if the optimizer's state is left out on request; recorded too.
            custom: free metadata of the target.
            tree: the tree of the source that the layout was bound to; what was removed from its names is a note.
            renames: the user's rules, applied before the layout; recorded too.
            overflow: whether finite values may become infinite; recorded too.
        """
        files, carried = (made.files, made.carried) if made else ({}, ())
        manifest = view_manifest(source, projected)
        kept = [one for one in source.manifest.companions if one.name in carried and one.name not in files]
        new = [Companion(name, len(data)) for name, data in files.items()]
        manifest = replace(manifest, companions=(*kept, *new), custom={**manifest.custom, **(custom or {})})
        options = (("dtype", dtype), ("only", only), ("overflow", overflow), ("rename", list(renames)))
        recorded = {name: value for name, value in options if value}
        if recorded:
            layout = {**manifest.origin["layout"], **recorded}
            manifest = replace(manifest, origin={**manifest.origin, "layout": layout})
        super().__init__(source, projected, manifest, files)
        left = [ignored_companion(name, _OTHER_SYSTEM) for name in (made.left if made else ())]
        values = [IgnoredEntry(path, "values", _NO_PLACE, "value") for path in source.manifest.values]
        self.ignored: tuple[IgnoredEntry, ...] = (*source.ignored, *projected.ignored, *values, *left)
        self.bounds: Mapping[KeyPath, Bound] = self._bounds()
        self.overflow = overflow
        removed = tuple(one.words for one in tree.removed) if tree else ()
        self.notes: tuple[str, ...] = (*source.notes, *removed, *(made.warnings if made else ()))
        self.snippet: str = made.snippet if made else ""

    def _bounds(self) -> Mapping[KeyPath, Bound]:
        """The bound of each tensor: that of the layout, or that of the source where it is larger."""
        found = dict(self.projected.bounds)
        if not self._source.bounds:
            return found
        for path in self.projected.targets:
            taken = [self._source.bounds[one] for one in self._sources_of(path) if one in self._source.bounds]
            if taken:
                found[path] = reduce(Bound.joined, taken, found.get(path, Bound()))
        return found


def view_manifest(source: Checkpoint, projected: Projection) -> Manifest:
    """The manifest of a source in the target's layout, with the grids on which its tensors should be cut."""
    manifest = target_manifest(projected, source.manifest)
    specs = {
        path: _with_chunk_grid(_with_bands(path, spec, projected), projected)
        for path, spec in manifest.tensors.items()
    }
    return replace(manifest, tensors=specs)


class ViewReader(ContentsOver):
    """Reads target tensors from a source."""

    def __init__(
        self, source: Checkpoint, reader: Contents, projected: Projection, files: Mapping[str, bytes]
    ) -> None:
        """Create a reader; nothing is read yet.

        Args:
            source: the source of the view.
            reader: the source's contents, decoded where they must be; closed together with this reader.
            projected: the projection of the source in the target's layout.
            files: new companion files, by name.
        """
        self._source = source
        self.base = reader
        self._projected = projected
        self._new_files = files
        self._parts = Parts(reader, source.manifest.tensors)

    def access(self, spec: TensorSpec) -> Access:
        """Stored if the source's bytes are in the same order as the target's, otherwise gathered by region."""
        extents = self._extents(spec)
        if extents is None:
            return Computed(partial(self._fill, spec), partial(self._memory, spec), gridded=True)
        return Stored(extents)

    def _fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Gather a region into a buffer."""
        out = as_array(buffer, spec.dtype, region_shape(region))
        taken = self._projected.scalars.get(spec.path)
        if taken is not None:
            out[...] = read_array(self.base, self._source.spec(taken), region)
            return
        try:
            self._projected.gather(spec.path, region, self._parts.read, out, self._cut, self._compute)
        finally:
            self._parts.release()

    def _memory(self, spec: TensorSpec, region: Region) -> int:
        """Memory for the largest part of the source that is read for a region, and for its cast."""
        found = self.parts(spec, region)
        if not found:
            return 0
        held = max((part_bytes(part, spec.dtype) for part in found), default=0)
        if not self._source.is_view:  # stored tensors are read without more
            return held
        accesses = ((self.base.access(one.source), one) for one in found)
        return held + max((memory_for(access, one.source, one.region) for access, one in accesses), default=0)

    def parts(self, spec: TensorSpec, region: Region) -> list[Copy]:
        """The parts of the source that are read for a region, none for a scalar."""
        stored = self._projected.targets.get(spec.path)
        every = () if stored is None else copies(stored, region, self._projected.pieces)
        return [part for copy in every for part in self._cut(copy)]

    def _compute(self, path: KeyPath, region: Region, out: np.ndarray) -> bool:
        """Compute a region of a source tensor in its place; False if it is read."""
        reader = self.base
        return isinstance(reader, ComputedReader) and reader.compute_at(self._source.spec(path), region, out)

    def _cut(self, copy: Copy) -> Iterable[Copy]:
        """The parts in which a copy is made: small ones where the source can be read by any region."""
        if copy.nbytes <= _BAND or self.base.access(copy.source).decoder is not None:
            return (copy,)
        return cut_copy(copy, _BAND)

    def _extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """The extents of a tensor if the source's bytes are in the same order as the target's; None otherwise."""
        taken = self._projected.scalars.get(spec.path)
        if taken is not None:
            return self.base.access(self._source.spec(taken)).extents
        stored = self._projected.targets[spec.path]
        spans = runs(stored, self._projected.pieces)
        if spans is None:
            return None
        found: list[Extent] = []
        for source, span in spans:
            extents = self.base.access(source).extents
            if extents is None:
                return None
            found += cut(extents, span)
        return tuple(found)

    def absent(self) -> Iterator[Absent]:
        """The parts of carried tensors that are missing in the source."""
        used = {spec.path for held in self._projected.pieces.held.values() for spec, _piece in held.values()}
        used |= set(self._projected.scalars.values())
        return (piece for piece in self._source.reader.absent() if piece.path in used)

    def companion(self, name: str) -> Location:
        """The location of a companion: in memory, or in the source."""
        if name in self._new_files:
            return Location(MemoryFiles(files=self._new_files), name)
        return super().companion(name)


def _with_bands(path: KeyPath, spec: TensorSpec, projected: Projection) -> TensorSpec:
    """A target tensor with the grid on which it should be cut, so that no source row is read twice."""
    stored = projected.targets.get(path)
    if stored is None or spec.size == 0 or not spec.shape:
        return spec
    multiples = list(cut_multiples(stored, _BAND, projected.pieces.sizes))
    cut, row = dimension_to_cut(spec, _BAND)
    long = math.lcm(multiples[cut], rows_of_long_runs(stored, cut, projected.pieces))
    if long <= spec.shape[cut] and long * row <= _LARGEST_BAND:
        multiples[cut] = long
    return replace(spec, chunks=(*multiples[: cut + 1], *spec.shape[cut + 1 :]))


def _with_chunk_grid(spec: TensorSpec, projected: Projection) -> TensorSpec:
    """A target tensor with the chunk grid in which each source tensor fills whole chunks, for formats with chunks.

    It matters only if an unrolled axis comes after a transposed one, so that the grid does not consist of runs.
    """
    stored = projected.targets.get(spec.path)
    if stored is None or spec.nbytes <= _BAND:
        return spec
    unrolled = projected.pieces.unrolled
    pairs = ((name, piece) for piece in stored.pieces for name in unrolled[piece.parameter])
    if not any(name in names for name, piece in pairs for names in piece.groups):
        return spec  # it has no axis that the source splits into several tensors
    grid = stacked_grid(stored, projected.pieces, _BAND)
    cut = next((axis for axis, step in enumerate(grid) if step > 1), len(grid))
    if grid[cut + 1 :] == spec.shape[cut + 1 :]:
        return spec
    return replace(spec, tags={**(spec.tags or {}), GRID: "x".join(map(str, grid))})
