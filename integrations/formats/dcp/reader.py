"""Reads the tensors of a DCP checkpoint.

If a tensor's chunks are contiguous and follow each other in C order (row sharding, or one chunk), the mover reads them
as raw extents; any other division is assembled region by region. Items are located when they are first needed. A chunk
that is read whole is compared with the CRC-32 that torch stored with it; extents carry that CRC.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, TensorSpec, region_shape, region_within, shared_region
from wherry.errors import CorruptError, IncompleteError
from wherry.formats.format import Absent, Access, Block, ChunkDecoder, Chunked, Extent, Stored
from wherry.integrations.containers.flat.reader import FilesReader
from wherry.integrations.containers.flat.strides import PlacedTensor, StridedReader
from wherry.integrations.formats.dcp.items import HELD, InflatedItem, Items, PlacedItems
from wherry.integrations.formats.dcp.metadata import (
    Chunk,
    DcpIndex,
    in_order,
    region_of,
    uncovered_regions,
    with_elements,
)
from wherry.mover.output import as_bytes
from wherry.mover.read import read_region
from wherry.store.location import Location
from wherry.store.store import Entry

if TYPE_CHECKING:
    import numpy as np


class ChunkPiece(NamedTuple):
    """A chunk with the location of its bytes."""

    chunk: Chunk
    placed: PlacedTensor


class DcpReader(FilesReader):
    """Reads one checkpoint."""

    def __init__(
        self,
        location: Location,
        index: DcpIndex,
        items: Items | PlacedItems,
        files: tuple[Entry, ...],
        inner: Mapping[KeyPath, PlacedTensor],
        companions: frozenset[str] = frozenset(),
    ) -> None:
        """Take an opened checkpoint.

        Args:
            location: its folder.
            index: its metadata.
            items: its items.
            files: all its files, with names relative to the location.
            inner: tensors inside objects, by key path.
            companions: the names of the files without tensors.
        """
        self.location = location
        self._index = index
        self._items = items
        self.files = files
        self.companions = companions
        self._pieces: dict[KeyPath, tuple[ChunkPiece, ...]] = {
            path: (ChunkPiece(Chunk((0,) * len(placed.shape), placed.shape), placed),)
            for path, placed in inner.items()
        }
        self.made: dict[str, Location] = {}  # companions that are parts of other files

    def companion(self, name: str) -> Location:
        """The location of a companion: next to the files, or made of a part of one."""
        return self.made[name] if name in self.made else super().companion(name)

    def access(self, spec: TensorSpec) -> Access:
        """Stored if the metadata allows it; else chunks, of which those of transformed items are decoded in pieces."""
        if 0 in spec.shape:
            return Stored(())
        small = self._small_extent(spec)
        extents = self._located_extents(spec) if small is None else (small,)
        if extents is not None:
            return Stored(extents)
        decoder = ChunkDecoder(
            partial(self._fill, spec), "dcp", partial(self._held, spec), partial(self._decode, spec)
        )
        return Chunked(spec.chunks or spec.shape, decoder)

    def _located_extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """The extents of the chunks, if they follow one another in the order of the tensor's bytes."""
        only = self._only_piece(spec)
        if only is not None:
            return (_extent(only),) if only.placed.raw else None
        if spec.path not in self._pieces:
            # The metadata may show, before anything is located, that the bytes are not raw or not in order.
            described = self._index.tensors[spec.path[0]]
            chunks = with_elements(described.chunks)
            stored = (self._index.stored.get(spec.path[0], chunk.offsets) for chunk in chunks)
            coded = any(one is not None and one.transforms for one in stored)
            if coded or not in_order(described.shape, chunks):
                return None
        pieces = self._placed_chunks(spec)
        if len(pieces) > 1 and not in_order(spec.shape, [piece.chunk for piece in pieces]):
            return None
        if not all(piece.placed.raw for piece in pieces):
            return None
        return tuple(_extent(piece) for piece in pieces)

    def _held(self, spec: TensorSpec, cell: Region) -> int | None:
        """Memory for decompression: only transformed items are decoded piece by piece."""
        piece = self._cell(spec, cell)
        return HELD if piece is not None and piece.placed.decoded and piece.placed.contiguous else None

    def _decode(self, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        """The bytes of a transformed item, piece by piece."""
        piece = self._cell(spec, cell)
        assert piece is not None
        yield Block(cell, self._inflate(piece.placed, spec))

    def absent(self) -> Iterator[Absent]:
        """Chunks and objects without an item or file, and regions that no chunk covers."""
        for name in self._index.objects:
            reason = self._missing(name, None)
            if reason is not None:
                yield Absent((name,), "(object)", reason)
        for name, described in self._index.tensors.items():
            chunks = with_elements(described.chunks)
            for region in uncovered_regions(described.shape, chunks):
                yield Absent((name,), _text(region), "no chunk covers it")
            for chunk in chunks:
                reason = self._missing(name, chunk.offsets)
                if reason is not None:
                    yield Absent((name,), _text(region_of(chunk)), reason)

    def _cell(self, spec: TensorSpec, cell: Region) -> ChunkPiece | None:
        """The chunk that is one cell of a tensor's grid."""
        return next((piece for piece in self._placed_chunks(spec) if region_of(piece.chunk) == cell), None)

    def _inflate(self, placed: PlacedTensor, spec: TensorSpec) -> Iterator[memoryview]:
        """The bytes of a contiguous tensor of a transformed item, compared with their CRC at the end."""
        store = placed.file.store
        assert isinstance(store, InflatedItem)
        width = dtypes.bits(placed.dtype) // 8
        start, left = placed.start + placed.offset * width, math.prod(placed.shape) * width
        crc = 0
        for piece in store.between(start, start + left):
            left -= len(piece)
            crc = crc32(piece, crc)
            yield memoryview(piece)
        if left or (placed.whole and placed.crc not in (0, crc)):
            raise _damage_error(placed, spec)

    def _small_extent(self, spec: TensorSpec) -> Extent | None:
        """The bytes of a small tensor that is one plain chunk, as most tensors of a large checkpoint are; else None."""
        described = self._index.tensors.get(spec.path[0]) if len(spec.path) == 1 else None
        if described is None or len(described.chunks) != 1 or spec.path in self._pieces:
            return None
        (chunk,) = described.chunks
        stored = self._index.stored.get(spec.path[0], chunk.offsets)
        if stored is None or chunk.sizes != spec.shape or not isinstance(self._items, Items):
            return None
        return self._items.small_extent(stored, spec.shape, spec.dtype)

    def _only_piece(self, spec: TensorSpec) -> ChunkPiece | None:
        """The chunk of a tensor that is one plain chunk, as tensors that were not sharded are; else None.

        The result is not cached: most tensors are of this kind, and each is located once.
        """
        described = self._index.tensors.get(spec.path[0]) if spec.path not in self._pieces else None
        if described is None or len(described.chunks) != 1 or described.chunks[0].sizes != described.shape:
            return None
        chunk = described.chunks[0]
        stored = self._index.stored.get(spec.path[0], chunk.offsets)
        return (
            None if stored is not None and stored.transforms else ChunkPiece(chunk, self._find(spec, chunk))
        )

    def _missing(self, name: str, offsets: tuple[int, ...] | None) -> str | None:
        stored = self._index.stored.get(name, offsets)
        if stored is None:
            return "no item recorded"
        return None if self._items.there(stored) else f"file not found: {stored.file}"

    def _placed_chunks(self, spec: TensorSpec) -> tuple[ChunkPiece, ...]:
        """The chunks of a tensor that have elements, in the order of their offsets."""
        if spec.path not in self._pieces:
            described = self._index.tensors[spec.path[0]]
            self._pieces[spec.path] = tuple(
                ChunkPiece(chunk, self._find(spec, chunk)) for chunk in with_elements(described.chunks)
            )
        return self._pieces[spec.path]

    def _find(self, spec: TensorSpec, chunk: Chunk) -> PlacedTensor:
        stored = self._index.stored.get(spec.path[0], chunk.offsets)
        if stored is None:
            raise IncompleteError(f"no item recorded for the chunk at {chunk.offsets}", path=spec.name)
        placed = self._items.tensor(
            stored, spec.name, dtypes.canonical_size(spec.dtype, math.prod(chunk.sizes))
        )
        if (placed.shape, placed.dtype) != (chunk.sizes, spec.dtype):
            raise CorruptError(
                f"chunk at {chunk.offsets} in {stored.file}: expected {spec.dtype}{list(chunk.sizes)}, got "
                f"{placed.dtype}{list(placed.shape)}: the folder mixes files of two saves",
                uri=self.location.uri,
                path=spec.name,
                cure="use another checkpoint",
            )
        return placed

    def _fill(self, spec: TensorSpec, region: Region, out: memoryview) -> None:
        """Fill a buffer with a region, assembled from the chunks that intersect it."""
        import numpy as np

        dtype = np.dtype(f"V{dtypes.bits(spec.dtype) // 8}")
        result = np.frombuffer(out, dtype).reshape(region_shape(region))
        filled = sum(self._copy(result, region, piece, spec) for piece in self._placed_chunks(spec))
        if filled != result.size:
            raise IncompleteError(
                "no chunk covers a part of the tensor", uri=self.location.uri, path=spec.name
            )

    def _copy(self, result: np.ndarray, region: Region, piece: ChunkPiece, spec: TensorSpec) -> int:
        """Copy the intersection of a chunk with a region; return the number of elements."""
        import numpy as np

        box = region_of(piece.chunk)
        shared = shared_region(region, box)
        if shared is None:
            return 0
        inside = region_within(shared, box)
        chunk, placed = TensorSpec(spec.path, piece.chunk.sizes, spec.dtype), piece.placed
        data = np.empty(region_shape(inside), result.dtype)
        read_region(StridedReader(self.location, {spec.path: placed}, ()), chunk, inside, as_bytes(data))
        # A whole chunk of a transformed item is compared with its CRC, if its bytes are the storage; 0 means no CRC.
        if (
            inside == chunk.whole
            and placed.whole
            and placed.decoded
            and not placed.big_endian
            and placed.crc not in (0, crc32(as_bytes(data)))
        ):
            raise _damage_error(placed, spec)
        result[region_within(shared, region)] = data
        return data.size


def _damage_error(placed: PlacedTensor, spec: TensorSpec) -> CorruptError:
    return CorruptError(
        f"checksum mismatch: the bytes at {placed.start} differ from the CRC that torch stored",
        uri=placed.file.uri,
        path=spec.name,
        cure="restore the file, or use another checkpoint",
    )


def _extent(piece: ChunkPiece) -> Extent:
    placed = piece.placed
    width = dtypes.bits(placed.dtype) // 8
    length = width
    for extent in placed.shape:
        length *= extent
    crc = placed.crc if placed.crc and placed.whole else None
    return Extent(placed.file, placed.start + placed.offset * width, length, crc)


def _text(region: Region) -> str:
    return f"[{', '.join(f'{part.start}:{part.stop}' for part in region)}]"
