"""A reader of an Orbax item that is a part of a larger checkpoint: MaxText's step folder, PaxML's.

What such a checkpoint adds is here once: files beside the item, arrays that were padded for their devices and are
to be cut, and what is missing in words. Everything else is the item's own reader's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.integrations.containers.zarr.shortfall import shortfall

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, Sharding, TensorSpec
    from wherry.formats.format import Absent, Block, Extent
    from wherry.integrations.containers.zarr.reader import OrbaxReader
    from wherry.storage.location import Entry, Location


class WithinReader:
    """Reads one item within a checkpoint; see Reader and StreamingReader."""

    def __init__(
        self,
        inner: OrbaxReader,
        home: Location,
        *,
        shardings: Mapping[KeyPath, Sharding],
        beside: Iterable[str] = (),
        padded: Mapping[KeyPath, TensorSpec] | None = None,
    ) -> None:
        """Take over an opened item.

        Args:
            inner: its reader.
            home: the checkpoint that it belongs to; the item itself, or a folder above it.
            shardings: how the writer had laid the arrays over devices.
            beside: files of the checkpoint outside the item, relative to `home`; those that are there count.
            padded: the stored specs of arrays that are larger on disk than the tensors.
        """
        self._inner = inner
        self._home = home
        self._shardings = shardings
        self._beside = tuple(beside)
        self._padded = padded or {}
        self._prefix = inner.location.path[len(home.path.rstrip("/")) :].strip("/")

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """See Reader."""
        return self._inner.read(self._stored(spec), region)

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """See Reader."""
        return self.read(spec, spec.whole).tobytes()

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """See Reader; a padded array's bytes are not the tensor's."""
        return None if spec.path in self._padded else self._inner.extents(spec)

    def cheap(self, spec: TensorSpec) -> bool:
        """See RegionReader."""
        return self._inner.cheap(self._stored(spec))

    def region(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """See RegionReader."""
        self._inner.region(self._stored(spec), region, buffer)

    def held(self, spec: TensorSpec, cell: Region) -> int | None:
        """See StreamingReader."""
        return self._inner.held(self._stored(spec), cell)

    def stream(self, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        """See StreamingReader; what lies beyond the tensor's edge is padding there and here."""
        return self._inner.stream(self._stored(spec), cell)

    def absent(self) -> Iterable[Absent]:
        """See Reader."""
        return self._inner.absent()

    def shortfall(self) -> str | None:
        """See ReckoningReader."""
        return shortfall(self._inner, self._shardings)

    def companion(self, name: str) -> Location:
        """See Reader."""
        return self._inner.companion(name)

    def members(self) -> Iterator[Entry]:
        """See Reader."""
        prefix = f"{self._prefix}/" if self._prefix else ""
        for entry in self._inner.members():
            yield replace(entry, name=f"{prefix}{entry.name}")
        for name in self._beside:
            entry = self._home.join(name).stat()
            if entry is not None and not entry.is_dir:
                yield replace(entry, name=name)

    def close(self) -> None:
        """See Reader."""
        self._inner.close()

    def _stored(self, spec: TensorSpec) -> TensorSpec:
        return self._padded.get(spec.path, spec)
