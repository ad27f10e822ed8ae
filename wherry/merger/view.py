"""MergedView: joined checkpoints as the one checkpoint that a merge makes of them.

It has the tree, the companions and the format of the first, so that plan, mover, journal and verification treat it as
any source; a layout of another system may lie over it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.manifest import Companion
from wherry.core.tensorspec import region_shape
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.companions_reader import CompanionsReader
from wherry.formats.format import Opened
from wherry.formats.reader import Absent, Access, Reader
from wherry.layout.losses import note
from wherry.mover.decode import DecodedReader
from wherry.mover.output import as_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.merger.join import JoinedCheckpoint
    from wherry.merger.recipes import Recipe
    from wherry.storage.location import Entry, Location


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

    def reader_over(self, reader: Reader) -> Reader:
        """A reader of the merge over one of the joined sources."""
        merged = MergedReader(self._joined, reader, self.recipes)
        return CompanionsReader(merged, self._files_by_name) if self._files_by_name else merged


class MergedReader(Reader):
    """Computes regions of merged tensors."""

    def __init__(self, joined: JoinedCheckpoint, reader: Reader, recipes: Mapping[KeyPath, Recipe]) -> None:
        """Nothing is read yet.

        Args:
            joined: the sources.
            reader: reads them; it is closed together with this reader.
            recipes: how each tensor is computed.
        """
        self._joined = joined
        self._specs = joined.manifest.tensors
        self._reader = reader
        self._recipes = recipes

    def access(self, spec: TensorSpec) -> Access:
        """Any region is computed from the same region of the sources, or from a few rows of them."""
        if len(self._recipes[spec.path].sources) == 1:
            (source,) = self._recipes[spec.path].sources
            return self._reader.access(self._specs[source])
        return Access("regions", gridded=False, computes=True)

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """The elements of a region, rounded to the tensor's element type."""
        values = self._recipes[spec.path].values(region, self._part)
        made = values.astype(dtypes.numpy_dtype(spec.dtype), copy=False)
        note(values, made)
        return made

    def extents(self, spec: TensorSpec) -> Any:
        """The extents of a tensor that is copied."""
        sources = self._recipes[spec.path].sources
        return self._reader.extents(self._specs[sources[0]]) if len(sources) == 1 else None

    def overhead(self, spec: TensorSpec, region: Region) -> int:
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

    def shortfall(self) -> str | None:
        """What is missing in the sources."""
        return self._joined.reader.shortfall()

    def companion(self, name: str) -> Location:
        """The location of a companion of the first source."""
        return self._joined.reader.companion(name)

    def members(self) -> Iterable[Entry]:
        """The files of the first source."""
        return self._joined.reader.members()

    def close(self) -> None:
        """Remove decoded data; the owner of the sources closes them."""
        self._reader.close()

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """Canonical bytes; of a tensor that is copied those of its source, whatever its element type."""
        sources = self._recipes[spec.path].sources
        return (
            self._reader.read_bytes(self._specs[sources[0]])
            if len(sources) == 1
            else super().read_bytes(spec)
        )

    def _part(self, path: KeyPath, region: Region) -> np.ndarray:
        import numpy as np

        spec = self._specs[path]
        if self._reader.access(spec).kind != "regions":
            return self._reader.read(spec, region)
        found = np.empty(region_shape(region), dtypes.numpy_dtype(spec.dtype))
        self._reader.fill(spec, region, as_bytes(found))
        return found
