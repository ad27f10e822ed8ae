"""Writes safetensors files: one, or the shards of a Hugging Face folder.

Every header is written, and so every offset fixed, before the first tensor byte; after that any span of any
tensor can be written at any time from any thread, any number of times. Four-bit floats come one byte per
element and are packed here, so their spans must begin and end at even elements. `finish` writes the index of a
sharded checkpoint last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import UsageError, storage_error
from wherry.formats.format import Option
from wherry.formats.reader import Extent
from wherry.integrations.containers.flat.files import FlatFilesWriter, open_files
from wherry.integrations.containers.flat.pack import PACKED, pack_nibbles
from wherry.integrations.containers.safetensors import header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region
    from wherry.storage.location import Location

METADATA_FORMAT = Option("pt", "value of `format` in `__metadata__`", ("pt", "np", "flax", "tf", "mlx"))


class _TensorPlace(NamedTuple):
    file: str
    start: int
    stop: int
    packed: bool


class SafetensorsWriter(FlatFilesWriter):
    """A writer of the engine's protocol over one or several safetensors files in a folder."""

    def __init__(
        self,
        folder: Location,
        shards: Mapping[str, Sequence[TensorSpec]],
        metadata: Mapping[str, str],
        index: tuple[str, bytes] | None = None,
    ) -> None:
        """Create the files and write their headers.

        Args:
            folder: an existing local folder, or one in the staged objects of a run.
            shards: file name → the tensors that it will hold.
            metadata: `__metadata__` of every file.
            index: name and contents of the index file, written by `finish`.

        Raises:
            UnrepresentableError: safetensors cannot hold one of the tensors.
            UnsupportedError: the folder is neither.
            StorageError: the storage is full or failed.
        """
        headers = {name: header.build(specs, metadata, folder.uri) for name, specs in shards.items()}
        self._folder = folder
        self._index = index
        self._places = {
            spec.path: _TensorPlace(name, slot.start, slot.stop, spec.dtype == PACKED)
            for name, specs in shards.items()
            for spec in specs
            for slot in (headers[name][1][spec.path[0]],)
        }
        sizes = {
            name: max((slot.stop for slot in slots.values()), default=len(head))
            for name, (head, slots) in headers.items()
        }
        self._files = open_files(folder, sizes)
        for name, (head, _) in headers.items():
            self._files.write(name, 0, head)

    def place(self, path: KeyPath, where: Region | Span) -> int:
        """The offset of a span in its file; 0 if the span is packed before it is written."""
        place = self._places[path]
        return place.start + where.start if isinstance(where, Span) and not place.packed else 0

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """The byte range of a span; None if it is packed before it is written."""
        place = self._places[path]
        if place.packed or not isinstance(where, Span):
            return None
        return (Extent(self._folder.join(place.file), place.start + where.start, where.nbytes),)

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write a span.

        Raises:
            UsageError: `where` is not a span of this tensor, or does not agree with the data.
            StorageError: the storage failed.
        """
        place, name = self._places[path], path[0]
        if not isinstance(where, Span) or where.nbytes != len(data):
            raise UsageError(f"{where} is not a span of {len(data)} bytes", path=name)
        start, stop = where
        if place.packed:
            if start % 2:
                raise UsageError(
                    f"span of four-bit elements must begin at an even element, got {start}", path=name
                )
            start, stop, data = start // 2, (stop + 1) // 2, pack_nibbles(data, name)
        if not 0 <= start <= stop <= place.stop - place.start:
            raise UsageError(f"span {where} is not inside the tensor", path=name)
        self._files.write(place.file, place.start + start, data)

    def finish(self) -> None:
        """Write the index after everything that it names is durable."""
        self._files.sync()
        if self._index is not None:
            self._put_index(*self._index)
        self._files.finish()

    def _put_index(self, name: str, data: bytes) -> None:
        place = self._folder.join(name)
        try:
            place.store.put(place.path, data)
        except OSError as error:
            raise storage_error(error, place.uri) from error


def kept_metadata(custom: Mapping[str, object], metadata_format: str) -> dict[str, str]:
    """The `__metadata__` of a target: the source's own strings, and the framework name that readers require.

    The shard descriptions of torch's HuggingFaceStorageWriter are left out: they say how its files were sharded,
    and would be wrong for ours.
    """
    strings = {key: value for key, value in custom.items() if isinstance(value, str)}
    kept = {key: value for key, value in strings.items() if not key.startswith("DCP_")}
    return {**kept, "format": metadata_format}
