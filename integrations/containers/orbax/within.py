"""Reads an Orbax item that is part of a larger checkpoint, such as a step folder of MaxText or PaxML.

It adds files outside the item, arrays whose padding for devices must be removed, and a description of what is missing.
Everything else is left to the reader of the item.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.formats.contents import Access, ContentsOver
from wherry.integrations.containers.zarr.shortfall import shortfall

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Sharding, TensorSpec
    from wherry.integrations.containers.zarr.reader import ArrayReader
    from wherry.storage.location import Location
    from wherry.store.store import Entry


class WithinReader(ContentsOver):
    """Reads one item within a checkpoint."""

    def __init__(
        self,
        inner: ArrayReader,
        home: Location,
        *,
        shardings: Mapping[KeyPath, Sharding],
        extra_files: Iterable[str] = (),
        padded: Mapping[KeyPath, TensorSpec] | None = None,
    ) -> None:
        """Take over an opened item.

        Args:
            inner: its reader.
            home: the checkpoint that contains it: the item itself, or a folder above it.
            shardings: how the writer sharded the arrays over devices.
            extra_files: files of the checkpoint outside the item, relative to `home`; missing ones are ignored.
            padded: the stored specs of arrays that are larger on disk than the tensors.
        """
        self.base = self._inner = inner
        self._home = home
        self._shardings = shardings
        self._extra_files = tuple(extra_files)
        self._padded = padded or {}
        self._prefix = inner.location.path[len(home.path.rstrip("/")) :].strip("/")

    def access(self, spec: TensorSpec) -> Access:
        """As in the item's reader, except that the bytes of a padded array are not those of the tensor."""
        stored = self._padded.get(spec.path)
        return self._inner.access(spec) if stored is None else self._inner.access_in_chunks(stored)

    def shortfall(self) -> str | None:
        """A description of what is missing from the item."""
        return shortfall(self._inner, self._shardings)

    def members(self) -> Iterator[Entry]:
        """The item's files, and the extra files outside it."""
        prefix = f"{self._prefix}/" if self._prefix else ""
        for entry in self._inner.members():
            yield replace(entry, name=f"{prefix}{entry.name}")
        for name in self._extra_files:
            entry = self._home.join(name).stat()
            if entry is not None and not entry.is_dir:
                yield replace(entry, name=name)
