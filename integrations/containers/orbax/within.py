"""A reader of an Orbax item that is a part of a larger checkpoint: MaxText's step folder, PaxML's.

What such a checkpoint adds is here once: files beside the item, arrays that were padded for their devices and are
to be cut, and what is missing in words. Everything else is the item's own reader's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.formats.reader import ReaderOver
from wherry.integrations.containers.zarr.shortfall import shortfall

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Sharding, TensorSpec
    from wherry.formats.reader import Absent, Access, Extent
    from wherry.integrations.containers.zarr.reader import ArrayReader
    from wherry.storage.location import Entry, Location


class WithinReader(ReaderOver):
    """Reads one item within a checkpoint."""

    def __init__(
        self,
        inner: ArrayReader,
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

    def inner(self, spec: TensorSpec) -> tuple[ArrayReader, TensorSpec]:
        """The item's reader; what lies beyond a padded tensor's edge is padding there and here."""
        return self._inner, self._padded.get(spec.path, spec)

    def access(self, spec: TensorSpec) -> Access:
        """As the item's reader says; a padded array's bytes are not the tensor's."""
        reader, stored = self.inner(spec)
        return reader.access_in_chunks(stored) if spec.path in self._padded else reader.access(stored)

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """As the item's reader says; a padded array's bytes are not the tensor's."""
        return None if spec.path in self._padded else self._inner.extents(spec)

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """Canonical bytes without the padding."""
        return self.read(spec, spec.whole).tobytes()

    def absent(self) -> Iterable[Absent]:
        """Chunks of the item that are not there."""
        return self._inner.absent()

    def shortfall(self) -> str | None:
        """What is missing of the item, and whose share it is."""
        return shortfall(self._inner, self._shardings)

    def companion(self, name: str) -> Location:
        """Where a companion of the item lies."""
        return self._inner.companion(name)

    def members(self) -> Iterator[Entry]:
        """The item's files, and those beside it."""
        prefix = f"{self._prefix}/" if self._prefix else ""
        for entry in self._inner.members():
            yield replace(entry, name=f"{prefix}{entry.name}")
        for name in self._beside:
            entry = self._home.join(name).stat()
            if entry is not None and not entry.is_dir:
                yield replace(entry, name=name)

    def close(self) -> None:
        """Close the item's reader."""
        self._inner.close()
