"""The reader of T5X checkpoints: arrays in zarr and in the msgpack tree, and what beside them belongs to it.

The arrays themselves are read as Orbax's are. T5X adds a folder around them (the step), files of its own beside them
(the dataset iterator).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.errors import NotFoundError
from wherry.integrations.containers.zarr.shortfall import shortfall
from wherry.storage.sidecar import FOLDER_NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, Sharding, TensorSpec
    from wherry.formats.format import Absent, Block, Extent
    from wherry.integrations.containers.zarr.reader import OrbaxReader
    from wherry.storage.location import Entry, Location


class T5xReader:
    """Reads one checkpoint; see Reader and StreamingReader.

    Attributes:
        home: the checkpoint: its folder, or its one file.
        arrays: reads the tensors.
        companions: names of the files that hold no tensors.
        shardings: how the writer had laid the arrays over devices, where that is known.
    """

    def __init__(
        self,
        home: Location,
        arrays: OrbaxReader,
        companions: frozenset[str],
        shardings: Mapping[KeyPath, Sharding] | None = None,
    ) -> None:
        self.home = home
        self.arrays = arrays
        self.companions = companions
        self.shardings = shardings or {}

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """See Reader."""
        return self.arrays.read(spec, region)

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """See Reader."""
        return self.arrays.read_bytes(spec)

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """See Reader."""
        return self.arrays.extents(spec)

    def cheap(self, spec: TensorSpec) -> bool:
        """See RegionReader."""
        return self.arrays.cheap(spec)

    def region(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """See RegionReader."""
        self.arrays.region(spec, region, buffer)

    def held(self, spec: TensorSpec, cell: Region) -> int | None:
        """See StreamingReader."""
        return self.arrays.held(spec, cell)

    def stream(self, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        """See StreamingReader."""
        return self.arrays.stream(spec, cell)

    def absent(self) -> Iterator[Absent]:
        """See Reader."""
        return self.arrays.absent()

    def shortfall(self) -> str | None:
        """See ReckoningReader."""
        return shortfall(self.arrays, self.shardings)

    def companion(self, name: str) -> Location:
        """See Reader.

        Raises:
            NotFoundError: the checkpoint has no such companion.
        """
        if name not in self.companions:
            raise NotFoundError(
                f"no companion file {name!r}", uri=self.home.uri, cure="`wherry inspect` lists them"
            )
        return self.home.member(name)

    def members(self) -> Iterator[Entry]:
        """See Reader; sidecar and signature are not part of the checkpoint."""
        entry = self.home.entry
        if entry is not None and not entry.is_dir:
            yield entry
            for array in self.arrays.arrays.values():
                yield from self.home.parent.join(array.name).walk(f"{array.name}/")
            return
        yield from (found for found in self.home.walk() if found.name not in (FOLDER_NAME, SIGNATURE_NAME))

    def close(self) -> None:
        """See Reader."""
        self.arrays.close()
