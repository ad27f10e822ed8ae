"""Reads an Orbax item whose processes never merged their databases: each chunk from the database that has it.

Every process writes a complete OCDBT database with the metadata of its arrays and its share of the chunks; the merge
combines them. If two databases have the same key, the later one counts, as in a merge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import region_shape
from wherry.integrations.containers.zarr.listing import Listing, list_ocdbt
from wherry.integrations.containers.zarr.reader import ArrayReader
from wherry.mover.move import cells

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.reader import Block
    from wherry.integrations.containers.msgpack.contents import PlacedReader
    from wherry.integrations.containers.zarr.reader import StoredArray
    from wherry.storage.location import Location


def list_processes(folder: Location, databases: Iterable[str]) -> dict[str, Listing]:
    """The contents of the database of each process.

    Raises:
        DamagedError, HostileError, StorageError: see `list_ocdbt`.
    """
    return {name: list_ocdbt(folder.join(name)) for name in databases}


def merge_listings(folder: Location, listings: Mapping[str, Listing]) -> Listing:
    """Their contents together, with files relative to the folder above them."""
    together = Listing(folder, {})
    for name, listing in listings.items():
        for key, value in listing.values.items():
            together.values[key] = value._replace(file=value.file and f"{name}/{value.file}")
    return together


class UnmergedReader(ArrayReader):
    """A reader of the databases of several processes; a missing chunk is never taken for zeros."""

    def __init__(
        self,
        location: Location,
        arrays: Mapping[KeyPath, StoredArray],
        listings: Mapping[str, Listing],
        inline: PlacedReader | None,
    ) -> None:
        """See ArrayReader; `listings` as `list_processes` gives them."""
        together = merge_listings(location, listings)
        super().__init__(location, arrays, together, None, ocdbt=True, zeros_stored=True, inline=inline)
        self._parts = [
            ArrayReader(location.join(name), arrays, listing, None, ocdbt=True, zeros_stored=True)
            for name, listing in reversed(list(listings.items()))
        ]

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """The elements of a region, each chunk from the database that has it."""
        import numpy  # noqa: ICN001  as in ArrayReader

        if self.inline is not None and spec.path in self.inline.places:
            return self.inline.read(spec, region)
        part = self._part(spec, region)
        chunks = self.arrays[spec.path].zarr.chunks
        if part is not None or not chunks:
            return (part or self._parts[0]).read(spec, region)
        result = numpy.empty(region_shape(region), dtypes.numpy_dtype(spec.dtype))
        for cell in cells(region, chunks):
            inside = tuple(
                slice(one.start - whole.start, one.stop - whole.start)
                for one, whole in zip(cell, region, strict=True)
            )
            result[inside] = (self._part(spec, cell) or self._parts[0]).read(spec, cell)
        return result

    def held(self, spec: TensorSpec, cell: Region) -> int | None:
        """The same, from the database that has the chunk."""
        part = self._part(spec, cell) if spec.path in self.arrays else None
        return part and part.held(spec, cell)

    def stream(self, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        """The chunk, from the database that has it."""
        return (self._part(spec, cell) or self._parts[0]).stream(spec, cell)

    def close(self) -> None:
        """Close the open arrays of all databases."""
        super().close()
        for part in self._parts:
            part.close()

    def _part(self, spec: TensorSpec, region: Region) -> ArrayReader | None:
        """The database that has every chunk of a region; None if no single one has."""
        keys = list(self.arrays[spec.path].chunk_keys(region))
        return next(
            (part for part in self._parts if part.listing and part.listing.values.keys() >= set(keys)), None
        )
