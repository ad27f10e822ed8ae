"""MergedView: joined checkpoints as the one checkpoint that a merge makes of them.

It has the tree, the companions and the format of the first, so that plan, mover, journal and verification treat it as
any source; a layout of another system may lie over it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Companion
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.companions import CompanionsReader
from wherry.formats.contents import Absent, Access, Computed, Contents, ContentsOver
from wherry.formats.format import Opened
from wherry.layout.losses import note
from wherry.mover.decode import DecodedReader
from wherry.mover.output import as_array
from wherry.mover.read import read_array

if TYPE_CHECKING:
    import numpy as np

    from wherry.merger.join import JoinedCheckpoint
    from wherry.merger.recipes import Recipe


class MergedView(Checkpoint):
    """What a merge makes of joined checkpoints, which must stay open while the view is used.

    Attributes:
        recipes: key path → how the tensor is computed, of every tensor of the result.
    """

    is_view = True

    def __init__(
        self,
        joined: JoinedCheckpoint,
        recipes: Mapping[KeyPath, Recipe],
        merge: Mapping[str, Any],
        notes: tuple[str, ...],
        *,
        added: Iterable[TensorSpec] = (),
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Create a view; nothing is read.

        Args:
            joined: the sources.
            recipes: how each tensor is computed.
            merge: what is recorded of the merge, in the manifest's `origin`; the plan's digest covers it.
            notes: the merge in words, and messages about it, for the plan.
            added: the tensors that the first checkpoint has not.
            files: new companion files, by name; they replace those of the first checkpoint.
        """
        self._joined = joined
        self.recipes = recipes
        self._files_by_name = files or {}
        first = joined.parts[0].checkpoint.manifest
        kept = [one for one in first.companions if one.name not in self._files_by_name]
        new = [Companion(name, len(data)) for name, data in self._files_by_name.items()]
        manifest = replace(
            first,
            tensors={**first.tensors, **{spec.path: spec for spec in added}},
            companions=(*kept, *new),
            origin={**first.origin, "merge": dict(merge)},
            digests={},
        )
        reader = self.reader_over(DecodedReader(joined.reader))
        super().__init__(Opened(joined.detection, manifest, reader, joined.ignored))
        self.notes = notes

    @property
    def original(self) -> Checkpoint:
        """The joined sources."""
        return self._joined

    def made_of(self, path: KeyPath) -> Collection[KeyPath]:
        """The tensors of the joined sources of which a tensor is made."""
        return self.recipes[path].sources

    def reader_over(self, reader: Contents) -> Contents:
        """A reader of the merge over one of the joined sources."""
        merged = MergedReader(self._joined, reader, self.recipes)
        return CompanionsReader(merged, self._files_by_name) if self._files_by_name else merged


class MergedReader(ContentsOver):
    """Computes regions of merged tensors."""

    def __init__(self, joined: JoinedCheckpoint, reader: Contents, recipes: Mapping[KeyPath, Recipe]) -> None:
        """Nothing is read yet.

        Args:
            joined: the sources.
            reader: their contents, decoded where they must be; closed together with this reader.
            recipes: how each tensor is computed.
        """
        self._joined = joined
        self._specs = joined.manifest.tensors
        self.base = reader
        self._recipes = recipes

    def access(self, spec: TensorSpec) -> Access:
        """Any region is computed from the same region of the sources, or from a few rows of them; others are copied."""
        if len(self._recipes[spec.path].sources) == 1:
            (source,) = self._recipes[spec.path].sources
            return self.base.access(self._specs[source])
        return Computed(partial(self._fill, spec), partial(self._memory, spec))

    def _fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Compute the elements of a region, rounded to the tensor's element type."""
        out = as_array(buffer, spec.dtype, region_shape(region))
        values = self._recipes[spec.path].values(region, self._part)
        made = values.astype(out.dtype, copy=False)
        note(values, made)
        out[...] = made

    def _memory(self, spec: TensorSpec, region: Region) -> int:
        """The memory of the arithmetic."""
        own = dtypes.canonical_size(spec.dtype, math.prod(region_shape(region)))
        return self._recipes[spec.path].memory(region, self._specs) + own

    def absent(self) -> Iterator[Absent]:
        """The missing chunks of the sources, each for the merged tensors that need it."""
        missing = {piece.path: piece for piece in self._joined.reader.absent()}
        for path, recipe in self._recipes.items():
            for source in recipe.sources:
                if source in missing:
                    yield replace(missing[source], path=path)

    def _part(self, path: KeyPath, region: Region) -> np.ndarray:
        return read_array(self.base, self._specs[path], region)
