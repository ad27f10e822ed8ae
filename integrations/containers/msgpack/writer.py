"""Writes flax msgpack files: any span of any tensor at any time, because every offset is known in advance."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from wherry.core.keypath import render
from wherry.core.tensorspec import Span
from wherry.errors import UsageError, storage_error
from wherry.formats.reader import Extent
from wherry.integrations.containers.flat.files import FlatFilesWriter, open_files
from wherry.integrations.containers.msgpack.layout import lay_out

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import Region
    from wherry.integrations.containers.msgpack.layout import FilePlan
    from wherry.storage.location import Location


class MsgpackFilesWriter(FlatFilesWriter):
    """Writes the msgpack files of a folder."""

    def __init__(
        self, folder: Location, plans: Mapping[str, FilePlan], index: tuple[str, bytes] | None = None
    ) -> None:
        """Create the files and write everything but the tensors.

        Args:
            folder: an existing local folder, or the staged objects of a run.
            plans: file name → its layout.
            index: name and contents of the index of several files, written by `finish`.

        Raises:
            UnsupportedError: the folder is neither.
            StorageError: the storage is full or failed.
        """
        self._folder = folder
        self._index = index
        self._slots = {path: slots for plan in plans.values() for path, slots in plan.slots.items()}
        self._names = {path: name for name, plan in plans.items() for path in plan.slots}
        self._files = open_files(folder, {name: plan.size for name, plan in plans.items()})
        for name, plan in plans.items():
            for offset, run in plan.runs:
                self._files.write(name, offset, run)

    def place(self, path: KeyPath, where: Region | Span) -> int:
        """The offset of a span in its file; for a span across chunks, that of its first part."""
        slots = self._slots[path]
        if not slots or not isinstance(where, Span):
            return 0
        slot = slots[self._first(path, where.start)]
        return slot.offset + where.start - slot.start

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """The byte ranges of a span, one for each chunk of the array that it crosses."""
        if not isinstance(where, Span):
            return None
        file = self._folder.join(self._names[path])
        return tuple(
            Extent(file, slot.offset + part.start - slot.start, part.nbytes)
            for slot in self._slots[path]
            for part in (Span(max(slot.start, where.start), min(slot.stop, where.stop)),)
            if part.start < part.stop
        )

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write a span, which may cross the chunks of an array.

        Raises:
            UsageError: `where` is not a span of this tensor, or does not agree with the data.
            StorageError: the storage failed.
        """
        slots = self._slots[path]
        if not isinstance(where, Span) or where.nbytes != len(data):
            raise UsageError(f"{where} is not a span of {len(data)} bytes", path=render(path))
        start, stop = where
        if not 0 <= start <= stop <= slots[-1].stop:
            raise UsageError(f"span {where} is not inside the tensor", path=render(path))
        position = start
        for slot in slots[self._first(path, start) :]:
            if position >= stop:
                break
            end = min(slot.stop, stop)
            self._files.write(
                self._names[path], slot.offset + position - slot.start, data[position - start : end - start]
            )
            position = end

    def finish(self) -> None:
        """Write the index after everything that it names is durable.

        Raises:
            StorageError: the storage failed.
        """
        self._files.sync()
        if self._index is not None:
            name, data = self._index
            place = self._folder.join(name)
            try:
                place.store.put(place.path, data)
            except OSError as error:
                raise storage_error(error, place.uri) from error
        self._files.finish()

    def _first(self, path: KeyPath, start: int) -> int:
        """The number of the chunk that holds the byte at an offset."""
        return max(bisect_right(self._slots[path], start, key=lambda slot: slot.start) - 1, 0)


class MsgpackWriter(MsgpackFilesWriter):
    """Writes one msgpack file."""

    def __init__(
        self, staging: Location, manifest: Manifest, encoded: Mapping[KeyPath, bytes] | None = None
    ) -> None:
        """Create the file and write everything but the tensors.

        Args:
            staging: the file, in an existing local folder or in the staged objects of a run.
            manifest: the contents.
            encoded: further leaves, as msgpack.

        Raises:
            UnrepresentableError: flax cannot hold part of the manifest.
            UnsupportedError: the folder is neither.
            StorageError: the storage is full or failed.
        """
        super().__init__(staging.parent, {staging.name: lay_out(manifest, staging.uri, encoded)})
