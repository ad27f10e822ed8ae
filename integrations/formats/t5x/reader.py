"""The reader of T5X checkpoints: arrays in zarr and in the msgpack tree, and companions.

The arrays themselves are read like Orbax's. T5X adds a folder around them (the step) and more files next to them (the
dataset iterator).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.formats.contents import ContentsOver
from wherry.integrations.containers.flat.reader import companion_location
from wherry.integrations.containers.zarr.shortfall import shortfall
from wherry.storage.sidecar import FOLDER_NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Sharding
    from wherry.integrations.containers.zarr.reader import ArrayReader
    from wherry.storage.location import Location
    from wherry.store.store import Entry


class T5xReader(ContentsOver):
    """Reads one checkpoint.

    Attributes:
        home: the checkpoint: its folder, or its one file.
        arrays: reads the tensors.
        companions: names of the files without tensors.
        shardings: the writer's sharding of the arrays over devices, if known.
    """

    def __init__(
        self,
        home: Location,
        arrays: ArrayReader,
        companions: frozenset[str],
        shardings: Mapping[KeyPath, Sharding] | None = None,
    ) -> None:
        self.home = home
        self.base = self.arrays = arrays
        self.companions = companions
        self.shardings = shardings or {}

    def shortfall(self) -> str | None:
        """A text about missing parts, with the hosts that held them."""
        return shortfall(self.arrays, self.shardings)

    def companion(self, name: str) -> Location:
        """The location of a companion: in the folder.

        Raises:
            NotFoundError: the checkpoint does not have the companion.
        """
        return companion_location(self.home, name, self.companions)

    def members(self) -> Iterator[Entry]:
        """The files of the folder, or the file and its arrays; sidecar and signature are not part of the checkpoint."""
        entry = self.home.entry
        if entry is not None and not entry.is_dir:
            yield entry
            for array in self.arrays.arrays.values():
                yield from self.home.parent.join(array.name).walk(f"{array.name}/")
            return
        yield from (found for found in self.home.walk() if found.name not in (FOLDER_NAME, SIGNATURE_NAME))
