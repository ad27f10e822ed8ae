"""ChunkWriter: the part of MapWriter that writes the tensors with grids, a whole chunk at a time."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, cast

from wherry.core import dtypes
from wherry.core.tensorspec import region_shape
from wherry.formats.contents import EncodedChunk, Extent
from wherry.mover.chunk_files import open_chunks
from wherry.runtime.threads import carrier_count
from wherry.target.grids import chunk_bytes
from wherry.target.staged_objects import is_staged, run_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region
    from wherry.formats.contents import Block
    from wherry.storage.location import Location
    from wherry.target.file_map import Chunks
    from wherry.target.files import Slice
    from wherry.target.grids import ChunkPlace


class ChunkWriter:
    """Encodes chunks, and puts them where the map says; used from several threads."""

    def __init__(self, target: Location, chunks: Chunks, part: Slice | None = None) -> None:
        """Open their files.

        Args:
            target: a folder in a staging area.
            chunks: its chunks.
            part: what is written of the target; all of it by default.

        Raises:
            UnsupportedError: the target is neither on a local disk nor in the staged objects of a run, or the chunks of
                a unit have no known sizes.
            StorageError: the storage is full or failed.
        """
        self._folder = target.join(chunks.folder) if chunks.folder else target
        self._chunks, self._grids, self._codec = chunks, chunks.grids, chunks.codec
        if is_staged(target) and not self._codec.plain:
            most = max(map(chunk_bytes, self._grids.specs), default=0)
            run_of(target).using.sender.set_aside(carrier_count() * most)
        self._part = part
        self._store = open_chunks(self._folder, chunks, part.within(chunks.folder) if part else None)

    def __contains__(self, path: KeyPath) -> bool:
        """Whether a tensor is written in chunks."""
        return path in self._grids

    @property
    def plain(self) -> bool:
        """Whether chunks are stored as they are, with padding."""
        return self._codec.plain

    def grid(self, path: KeyPath) -> tuple[int, ...] | None:
        """Extents of a tensor's chunk."""
        return self._grids.spec(path).chunks

    def extents(self, path: KeyPath, region: Region) -> tuple[Extent, ...] | None:
        """The byte range of a chunk that is stored as it is; None for an encoded one, or one with padding inside."""
        spec = self._grids.spec(path)
        if not self._codec.unchanged(region, spec):
            return None
        place = self._store.place(self._grids.number(path, region))
        assert place is not None, "plain chunks have known places"
        nbytes = dtypes.canonical_size(spec.dtype, math.prod(region_shape(region)))
        return (Extent(self._folder.join(place.file), place.offset, nbytes),)

    def encoded(self, path: KeyPath, region: Region) -> EncodedChunk | None:
        """An encoded chunk; None for one that is stored as it is, or of which no run knows the place any more."""
        if self._codec.plain:
            return None
        spec, number = self._grids.spec(path), self._grids.number(path, region)
        place = self._store.place(number)
        if place is None:
            return None
        copies = 1 if self._folder.store.capabilities.local else 2  # a client holds the pieces and their sum
        decode = partial(self._codec.decode, region=region, spec=spec, name=self._chunks.name(number))
        return EncodedChunk(
            Extent(self._folder.join(place.file), place.offset, place.nbytes),
            self._codec.decoding(spec),
            copies * place.nbytes + chunk_bytes(spec),
            cast("Callable[[memoryview], Iterator[Block]]", decode),
        )

    def write(self, path: KeyPath, region: Region, data: memoryview) -> None:
        """Write one chunk.

        Raises:
            UsageError: the region is not one whole chunk (shorter at the edge).
            StorageError: the storage failed.
        """
        number, spec = self._grids.number(path, region), self._grids.spec(path)
        if not (self._codec.plain and len(data) == chunk_bytes(spec)):  # else nothing is encoded or padded
            data = self._codec.encode(data, region, spec)
        self._store.put(number, data)

    def stored(self, path: KeyPath, region: Region) -> bool:
        """Whether a chunk that was written is durable after a `sync`."""
        return self._store.stored(self._grids.number(path, region))

    def sync(self) -> None:
        """Make every chunk durable whose `write` has returned."""
        self._store.sync()

    def finish(self) -> None:
        """Make all chunks durable, then write the files that describe them; a slice has none of these."""

        def place(number: int) -> ChunkPlace:
            found = self._store.place(number)
            assert found is not None, f"chunk {self._chunks.name(number)} was not written"
            return found

        self._store.finish(() if self._part else self._chunks.index(place))

    def close(self) -> None:
        """Close the files."""
        self._store.close()
