"""View: a checkpoint that is computed from another one while it is read, and the transforms that do it.

A transform says of each tensor of the view of which tensors of the source it is made, makes any region of it, and says
what memory that takes and what values lose. One reader serves them all, and leaves tensors that stay as they are to the
source. So the same plan, mover, journal and verification serve conversions between systems and between containers, and
a view may lie over a view.

`ChangeLayout` shows a source in another system's layout, as if that system had written it: with the target's key paths,
shapes and dtypes. If a tensor's bytes are contiguous in the source's files (renamed, stacked along its first axis,
taken out of a stack), they are read as extents and are never turned into an array in memory.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from wherry.core.account import Bound, IgnoredEntry
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import GRID, Region, TensorSpec, region_shape
from wherry.families import Projection, target_manifest
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.companions import CompanionsReader, ignored_companion
from wherry.formats.format import Absent, Access, Computed, Contents, Extent, Opened, Stored
from wherry.layout.copies import Copy, copies, part_bytes, taken_by
from wherry.layout.cuts import cut_copy, cut_multiples, dimension_to_cut, rows_of_long_runs, stacked_grid
from wherry.layout.runs import cut, runs
from wherry.layout.tree_reading import ModelTree
from wherry.mover.decode import DecodedReader, Parts
from wherry.mover.output import as_array
from wherry.mover.read import memory_for, read_array

if TYPE_CHECKING:
    import numpy as np

    from wherry.families.companions import CompanionFiles

_OTHER_SYSTEM = "the file belongs to the source's system; the target's does not use it"
_NO_PLACE = "a layout has places for tensors only"
_BAND = 8 << 20  # bytes gathered at a time: the unit of raw moves
_LARGEST_BAND = 4 * _BAND  # rather than to gather short runs


class MeasuredLoss:
    """How far values that were made are from the source's: the largest error, and that as a share of the bound."""

    def __init__(self) -> None:
        self.error = self.share = 0.0
        self._lock = threading.Lock()

    def add(self, error: float, share: float) -> None:
        """Record the loss of some values; called from several threads."""
        with self._lock:
            self.error, self.share = max(self.error, error), max(self.share, share)


class Transform(ABC):
    """How the tensors of a view are made of those of its source; used from several threads.

    Attributes:
        stored: the tensors of the source.
        losses: key path → bound of what a tensor's values lose by this transform.
        measured: how far the values that were made are from the source's, where that is measured.
        strided: whether it computes into an array of any strides as fast as into one in C order.
    """

    losses: Mapping[KeyPath, Bound] = {}
    strided = False

    def __init__(self, stored: Mapping[KeyPath, TensorSpec]) -> None:
        """Nothing is read yet.

        Args:
            stored: the tensors of the source.
        """
        self.stored = stored
        self.measured = MeasuredLoss()

    @abstractmethod
    def sources(self, path: KeyPath) -> Collection[KeyPath]:
        """The tensors of the source that a tensor is made of."""

    @abstractmethod
    def unchanged(self, spec: TensorSpec) -> KeyPath | None:
        """The tensor of the source whose elements a tensor has; None if they are computed."""

    @abstractmethod
    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray, source: TransformReader) -> None:
        """Write the elements of a region of a computed tensor into an array; the region is not empty."""

    def memory(self, spec: TensorSpec, region: Region, source: TransformReader) -> int:  # noqa: ARG002  for some
        """Bytes of memory that `compute` takes for a region."""
        return 0

    def access(self, spec: TensorSpec, source: TransformReader) -> Access:
        """How a tensor is read: as the source's, or computed by region."""
        same = self.unchanged(spec)
        return source.computed(spec) if same is None else source.access_of(same)

    def same_bytes(self, path: KeyPath) -> KeyPath | None:  # noqa: ARG002  for some
        """The tensor of the source whose bytes a tensor has, all of them in the same order; None if that is unknown."""
        return None

    def absent(self, missing: Iterable[Absent]) -> Iterable[Absent]:
        """The missing chunks, from those of the source."""
        return missing

    def bounds(self, source: Mapping[KeyPath, Bound], paths: Iterable[KeyPath]) -> dict[KeyPath, Bound]:
        """The bound of each tensor whose values can change, here or in the source.

        Args:
            source: those of the source.
            paths: the tensors of the view.
        """
        found = dict(self.losses)
        for path in paths if source else ():
            taken = [source[one] for one in self.sources(path) if one in source]
            if taken:
                found[path] = reduce(Bound.joined, taken, found.get(path, Bound()))
        return found

    def parameters(self, source: Checkpoint, manifest: Manifest) -> int:  # noqa: ARG002  for some
        """The number of elements of the model, from the source and the manifest of the view."""
        return source.parameters

    def close(self) -> None:  # noqa: B027  most hold nothing
        """No resources to release."""


class TransformReader(CompanionsReader):
    """The contents of a view over those of its source; used from several threads."""

    def __init__(self, base: Contents, transform: Transform, files: Mapping[str, bytes]) -> None:
        """Nothing is read yet.

        Args:
            base: of the source; it is closed together with these contents.
            transform: makes the tensors.
            files: companion files that differ from those of the source, by name.
        """
        super().__init__(base, files)
        self.transform = transform
        self._parts = Parts(base, transform.stored)

    def access(self, spec: TensorSpec) -> Access:
        """See Transform."""
        return self.transform.access(spec, self)

    def access_of(self, path: KeyPath) -> Access:
        """How a tensor of the source is read."""
        return self.base.access(self.transform.stored[path])

    def read(self, path: KeyPath, region: Region) -> np.ndarray:
        """A region of a tensor of the source, valid until this thread reads the next one."""
        return self._parts.read(path, region)

    def memory_for(self, path: KeyPath, region: Region) -> int:
        """Bytes of memory that reading a region of a tensor of the source takes."""
        spec = self.transform.stored[path]
        return memory_for(self.base.access(spec), spec, region)

    def computed(self, spec: TensorSpec, *, gridded: bool = False) -> Computed:
        """A tensor that is computed by region."""
        memory = partial(self.transform.memory, spec, source=self)
        return Computed(partial(self._fill, spec), memory, gridded=gridded)

    def compute_at(self, spec: TensorSpec, region: Region, out: np.ndarray) -> bool:
        """Compute a region into an array with any strides.

        Returns:
            Whether that was done: not for a tensor that is not computed, nor where it would be slower than to copy it.
        """
        if not self.transform.strided or self.transform.unchanged(spec) is not None:
            return False
        self._compute(spec, region, out)
        return True

    def _fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        self._compute(spec, region, as_array(buffer, spec.dtype, region_shape(region)))

    def _compute(self, spec: TensorSpec, region: Region, out: np.ndarray) -> None:
        try:
            self.transform.compute(spec, region, out, self)
        finally:
            self._parts.release()

    def absent(self) -> Iterable[Absent]:
        """The missing chunks of the source, for the tensors that need them."""
        return self.transform.absent(super().absent())

    def close(self) -> None:
        """Close the contents below, and what the transform holds."""
        super().close()
        self.transform.close()


class View(Checkpoint):
    """A checkpoint that is made of another, which must stay open while the view is used.

    Attributes:
        source: the checkpoint of which it is made, which may be a view itself.
        transform: makes its tensors; None if they are those of the source.
    """

    def __init__(
        self,
        source: Checkpoint,
        transform: Transform | None,
        manifest: Manifest,
        files: Mapping[str, bytes] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """Create a view; nothing is read yet.

        Args:
            source: the source.
            transform: makes the tensors; None if they are those of the source.
            manifest: the contents of the view.
            files: companion files that differ from those of the source, by name.
            notes: messages for the plan, after those of the source.
        """
        self.source, self._new_files = source, files or {}
        self.transform = transform
        self.is_view = source.is_view or transform is not None
        stored = source.original.reader
        reader = self.reader_over(DecodedReader(stored) if self.is_view else stored)
        super().__init__(Opened(source.detection, manifest, reader, source.ignored))
        self.laid_out, self.snippet = source.laid_out, source.snippet
        self.uses, self.uses_in_files = source.uses, source.uses_in_files
        self.bounds = transform.bounds(source.bounds, manifest.tensors) if transform else source.bounds
        self.notes = (*source.notes, *notes)

    @property
    def original(self) -> Checkpoint:
        """The stored checkpoint: the source, or the checkpoint of which the source is a view."""
        return self.source.original

    @property
    def parameters(self) -> int:
        """The number of elements of the model, second copies counted once."""
        if self.transform is None:
            return self.source.parameters
        return self.transform.parameters(self.source, self.manifest)

    def made_of(self, path: KeyPath) -> Collection[KeyPath]:
        """The stored tensors of which a tensor is made."""
        taken = self.transform.sources(path) if self.transform else (path,)
        return tuple(dict.fromkeys(stored for one in taken for stored in self.source.made_of(one)))

    def same_bytes(self, path: KeyPath) -> KeyPath | None:
        """The stored tensor whose bytes a tensor has, all of them in the same order; None if there is none."""
        return None if self.source.is_view or not self.transform else self.transform.same_bytes(path)

    def reader_over(self, reader: Contents) -> Contents:
        """Contents of the view over those of the stored checkpoint."""
        below = self.source.reader_over(reader)
        if self.transform is None:
            return CompanionsReader(below, self._new_files)
        return TransformReader(below, self.transform, self._new_files)


def with_files(manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
    """A manifest with companion files that take the places of those of the same names."""
    found = {one.name: one for one in manifest.companions}
    found |= {name: Companion(name, len(data)) for name, data in files.items()}
    return replace(manifest, companions=tuple(found.values()))


class ChangeLayout(Transform):
    """Tensors with the names, axes and element types of another layout, gathered from regions of the source."""

    def __init__(self, stored: Mapping[KeyPath, TensorSpec], projected: Projection) -> None:
        """Nothing is read yet.

        Args:
            stored: the tensors of the source.
            projected: the projection of the source in the target's layout.
        """
        super().__init__(stored)
        self.projected = projected
        self.losses = projected.bounds

    def sources(self, path: KeyPath) -> Collection[KeyPath]:
        """The source's tensors of which a tensor is made."""
        taken = self.projected.scalars.get(path)
        if taken is not None:
            return (taken,)
        return tuple(dict.fromkeys(taken_by(self.projected.targets[path], self.projected.pieces)))

    def unchanged(self, spec: TensorSpec) -> None:
        """None: what is not read as extents is gathered."""

    def parameters(self, source: Checkpoint, manifest: Manifest) -> int:  # noqa: ARG002
        """The number of the source's parameters; second copies count once."""
        return source.parameters - self.projected.source.repeated

    def same_bytes(self, path: KeyPath) -> KeyPath | None:
        """See Transform."""
        stored = self.projected.targets.get(path)
        if stored is None:
            return self.projected.scalars.get(path)
        spans = runs(stored, self.projected.pieces)
        if spans is None or len(spans) != 1:
            return None
        ((source, span),) = spans
        return source.path if span.nbytes == source.nbytes == stored.spec.nbytes else None

    def access(self, spec: TensorSpec, source: TransformReader) -> Access:
        """Stored if the source's bytes are in the same order as the target's, otherwise gathered by region."""
        extents = self._extents(spec, source)
        return source.computed(spec, gridded=True) if extents is None else Stored(extents)

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray, source: TransformReader) -> None:
        """Gather a region."""
        taken = self.projected.scalars.get(spec.path)
        if taken is not None:
            out[...] = read_array(source.base, self.stored[taken], region)
            return

        def compute(path: KeyPath, part: Region, into: np.ndarray) -> bool:
            """Compute a region of a source tensor in its place; False if it is read."""
            below = source.base
            return isinstance(below, TransformReader) and below.compute_at(self.stored[path], part, into)

        self.projected.gather(spec.path, region, source.read, out, partial(self._cut, source=source), compute)

    def memory(self, spec: TensorSpec, region: Region, source: TransformReader) -> int:
        """Memory for the largest part of the source that is read for a region, and for its cast."""
        found = self.parts(spec, region, source)
        held = max((part_bytes(part, spec.dtype) for part in found), default=0)
        if not isinstance(source.base, TransformReader):  # stored tensors are read without more
            return held
        return held + max((source.memory_for(one.source.path, one.region) for one in found), default=0)

    def parts(self, spec: TensorSpec, region: Region, source: TransformReader) -> list[Copy]:
        """The parts of the source that are read for a region, none for a scalar."""
        stored = self.projected.targets.get(spec.path)
        every = () if stored is None else copies(stored, region, self.projected.pieces)
        return [part for copy in every for part in self._cut(copy, source)]

    def _cut(self, copy: Copy, source: TransformReader) -> Iterable[Copy]:
        """The parts in which a copy is made: small ones where the source can be read by any region."""
        if copy.nbytes <= _BAND or source.base.access(copy.source).decoder is not None:
            return (copy,)
        return cut_copy(copy, _BAND)

    def _extents(self, spec: TensorSpec, source: TransformReader) -> tuple[Extent, ...] | None:
        """The extents of a tensor if the source's bytes are in the same order as the target's; None otherwise."""
        taken = self.projected.scalars.get(spec.path)
        if taken is not None:
            return source.access_of(taken).extents
        spans = runs(self.projected.targets[spec.path], self.projected.pieces)
        if spans is None:
            return None
        found: list[Extent] = []
        for one, span in spans:
            extents = source.base.access(one).extents
            if extents is None:
                return None
            found += cut(extents, span)
        return tuple(found)

    def absent(self, missing: Iterable[Absent]) -> Iterable[Absent]:
        """The parts of carried tensors that are missing in the source, under their names there."""
        used = {spec.path for held in self.projected.pieces.held.values() for spec, _piece in held.values()}
        used |= set(self.projected.scalars.values())
        return (piece for piece in missing if piece.path in used)


class LayoutView(View):
    """A source in another system's layout.

    Attributes:
        projected: the projection of the source in the target's layout.
        overflow: whether finite values may become infinite.
    """

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
        kept = tuple(one for one in manifest.companions if one.name in carried)
        manifest = with_files(replace(manifest, companions=kept), files)
        manifest = replace(manifest, custom={**manifest.custom, **(custom or {})})
        options = (("dtype", dtype), ("only", only), ("overflow", overflow), ("rename", list(renames)))
        recorded = {name: value for name, value in options if value}
        if recorded:
            layout = {**manifest.origin["layout"], **recorded}
            manifest = replace(manifest, origin={**manifest.origin, "layout": layout})
        removed = tuple(one.words for one in tree.removed) if tree else ()
        notes = (*removed, *(made.warnings if made else ()))
        super().__init__(source, ChangeLayout(source.manifest.tensors, projected), manifest, files, notes)
        left = [ignored_companion(name, _OTHER_SYSTEM) for name in (made.left if made else ())]
        values = [IgnoredEntry(path, "values", _NO_PLACE, "value") for path in source.manifest.values]
        self.ignored = (*source.ignored, *projected.ignored, *values, *left)
        self.projected, self.overflow, self.laid_out = projected, overflow, True
        self.snippet = made.snippet if made else ""


def view_manifest(source: Checkpoint, projected: Projection) -> Manifest:
    """The manifest of a source in the target's layout, with the grids on which its tensors should be cut."""
    manifest = target_manifest(projected, source.manifest)
    specs = {
        path: _with_chunk_grid(_with_bands(path, spec, projected), projected)
        for path, spec in manifest.tensors.items()
    }
    return replace(manifest, tensors=specs)


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
