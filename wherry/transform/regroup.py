"""regroup: a checkpoint whose tensors are put together of regions of another one's, as the parts of parallel ranks are.

A tensor is a sequence of parts along one axis: regions of the source's tensors, then zeros. A region that several
tensors of the source hold must be the same in all of them. What is contiguous in the source's files is read as it is
stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core.account import IgnoredEntry
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.errors import CorruptError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.format import Access, Extent, Stored
from wherry.layout.runs import contiguous_span, cut
from wherry.mover.output import as_array
from wherry.transform.view import Transform, TransformReader, View, with_files

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class SourceRegion:
    """A region that tensors of the source hold.

    Attributes:
        sources: the key paths of these tensors, all of which hold the same elements there.
        region: the region, in each of them.
    """

    sources: tuple[KeyPath, ...]
    region: Region


@dataclass(frozen=True, slots=True)
class RegroupedTensor:
    """A tensor of parts.

    Attributes:
        spec: its name, shape and element type.
        parts: in their order along the axis; zeros follow them.
        axis: the axis; of a tensor without axes, whose only part is a whole tensor, 0.
    """

    spec: TensorSpec
    parts: tuple[SourceRegion, ...]
    axis: int = 0


class Regroup(Transform):
    """Tensors that are put together of regions of the source's."""

    def __init__(
        self,
        stored: Mapping[KeyPath, TensorSpec],
        grouped: Mapping[KeyPath, RegroupedTensor],
        constants: Mapping[KeyPath, bytes],
    ) -> None:
        """Read nothing yet.

        Args:
            stored: the tensors of the source.
            grouped: the tensors of the view that are made of them, by key path.
            constants: the bytes of its further tensors, by key path.
        """
        super().__init__(stored)
        self._grouped, self._constants = grouped, constants

    def sources(self, path: KeyPath) -> tuple[KeyPath, ...]:
        """The tensors that its parts are regions of."""
        parts = () if path in self._constants else self._grouped[path].parts
        return tuple(dict.fromkeys(one for part in parts for one in part.sources))

    def unchanged(self, spec: TensorSpec) -> None:
        """None: what is not read as extents is put together."""

    def same_bytes(self, path: KeyPath) -> KeyPath | None:
        """The tensor of the source that is its only part."""
        taken = self.sources(path)
        whole = len(taken) == 1 and self._grouped[path].spec.shape == self.stored[taken[0]].shape
        return taken[0] if whole else None

    def access(self, spec: TensorSpec, source: TransformReader) -> Access:
        """Stored if all parts are contiguous in files, and held once; otherwise put together by region."""
        extents = None if spec.path in self._constants else self._extents(self._grouped[spec.path], source)
        return source.computed(spec) if extents is None else Stored(extents)

    def _extents(self, grouped: RegroupedTensor, source: TransformReader) -> tuple[Extent, ...] | None:
        found, size = list[Extent](), 0
        for part in grouped.parts:
            span = contiguous_span(self.stored[part.sources[0]], part.region)
            extents = source.access_of(part.sources[0]).extents
            if len(part.sources) > 1 or span is None or extents is None:
                return None
            found += cut(extents, span)
            size += span.nbytes
        outer = grouped.spec.shape[: grouped.axis]
        # Parts follow one another in C order only along the first axis.
        contiguous = len(grouped.parts) == 1 or math.prod(outer) == 1
        return tuple(found) if contiguous and size == grouped.spec.nbytes else None

    def memory(self, spec: TensorSpec, region: Region, source: TransformReader) -> int:
        """Memory for the largest part of a region, and for a second one where two are compared."""
        found = [] if spec.path in self._constants else list(self._cut(self._grouped[spec.path], region))
        element = spec.nbytes // max(spec.size, 1)
        held = [
            source.memory_for(part.sources[0], part.region)
            + min(len(part.sources), 2) * element * math.prod(region_shape(part.region))
            for part, _place in found
        ]
        return max(held, default=0)

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray, source: TransformReader) -> None:
        """Put a region together.

        Raises:
            CorruptError: two tensors of the source differ that hold the same elements.
        """
        if spec.path in self._constants:
            out[...] = as_array(memoryview(self._constants[spec.path]), spec.dtype, spec.shape)[region]
            return
        out[...] = 0
        for part, place in self._cut(self._grouped[spec.path], region):
            first, *copies = part.sources
            out[place] = source.read(first, part.region)
            for copy in copies:
                if source.read(copy, part.region).tobytes() != out[place].tobytes():
                    raise CorruptError(
                        f"{render(first)} and {render(copy)} differ, of which both are {spec.name}", path=render(copy),
                        cure="restore the files from a backup, or write them again",
                    )  # fmt: skip

    @staticmethod
    def _cut(grouped: RegroupedTensor, region: Region) -> list[tuple[SourceRegion, Region]]:
        """The parts that a region needs, and the place of each in it."""
        if not region:
            return [(part, ()) for part in grouped.parts]
        axis, begin = grouped.axis, 0
        found = list[tuple[SourceRegion, Region]]()
        for part in grouped.parts:
            own = part.region[axis]
            start = max(region[axis].start, begin)
            stop = min(region[axis].stop, begin + own.stop - own.start)
            if start < stop:
                taken = tuple(
                    slice(
                        one.start + (start - begin if at == axis else wanted.start),
                        one.start + (stop - begin if at == axis else wanted.stop),
                    )
                    for at, (one, wanted) in enumerate(zip(part.region, region, strict=True))
                )
                place = tuple(
                    slice(start - wanted.start, stop - wanted.start) if at == axis else slice(None)
                    for at, wanted in enumerate(region)
                )
                found.append((replace(part, region=taken), place))
            begin += own.stop - own.start
        return found


def regrouped_view(
    source: Checkpoint,
    grouped: Mapping[KeyPath, RegroupedTensor],
    constants: Mapping[KeyPath, bytes],
    *,
    files: Mapping[str, bytes] | None = None,
    left: tuple[IgnoredEntry, ...] = (),
    note: str = "",
    record: Mapping[str, Any] | None = None,
) -> View:
    """The view of a checkpoint whose tensors are put together of its regions.

    Args:
        source: the checkpoint.
        grouped: the tensors of the view, by key path.
        constants: bytes of further ones, each a float32 without axes.
        files: companion files that differ from those of the source, by name.
        left: tensors of the source that have no place in the view.
        note: what is done, for the plan.
        record: entries of the manifest's origin.
    """
    specs = {path: one.spec for path, one in grouped.items()}
    specs |= {path: TensorSpec(path, (), "float32") for path in constants}
    manifest = with_files(source.manifest, files or {})
    manifest = replace(manifest, tensors=specs, origin={**manifest.origin, **(record or {})})
    transform = Regroup(source.manifest.tensors, grouped, constants)
    view = View(source, transform, manifest, files, (note,))
    view.ignored = (*view.ignored, *left)
    return view
