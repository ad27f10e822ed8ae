"""Reads an Orbax item whose processes never merged their databases: each chunk from the database that has it.

Every process writes a complete OCDBT database with the metadata of its arrays and its share of the chunks; the merge
combines them. If two databases have the same key, the later one counts, as in a merge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.tensorspec import Region, TensorSpec, region_shape, region_within
from wherry.integrations.containers.zarr.listing import Listing, list_ocdbt
from wherry.integrations.containers.zarr.reader import ArrayReader, StoredArray
from wherry.mover.move import cells
from wherry.mover.output import as_array
from wherry.mover.read import read_array, read_region

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.formats.contents import Block
    from wherry.integrations.containers.msgpack.contents import PlacedReader
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

    def _fill(self, array: StoredArray, spec: TensorSpec, region: Region, out: memoryview) -> None:
        """Fill a buffer with a region, each chunk from the database that has it."""
        part = self._part(array, region)
        chunks = array.zarr.chunks
        if part is not None or not chunks:
            read_region(part or self._parts[0], spec, region, out)
            return
        result = as_array(out, spec.dtype, region_shape(region))
        for cell in cells(region, chunks):
            reader = self._part(array, cell) or self._parts[0]
            result[region_within(cell, region)] = read_array(reader, spec, cell)

    def _held(self, array: StoredArray, spec: TensorSpec, cell: Region) -> int | None:
        part = self._part(array, cell)
        return part and part._held(array, spec, cell)  # noqa: SLF001  of the same class

    def _decode(self, array: StoredArray, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        part = self._part(array, cell) or self._parts[0]
        return part._decode(array, spec, cell)  # noqa: SLF001  of the same class

    def close(self) -> None:
        """Close the open arrays of all databases."""
        super().close()
        for part in self._parts:
            part.close()

    def _part(self, array: StoredArray, region: Region) -> ArrayReader | None:
        """The database that has every chunk of a region; None if no single one has."""
        keys = list(array.chunk_keys(region))
        return next(
            (part for part in self._parts if part.listing and part.listing.values.keys() >= set(keys)), None
        )
