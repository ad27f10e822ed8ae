"""Encodes chunks of zarr arrays as tensorstore would: whole chunks, padded at the edge, then compressed; and decodes.

Output goes into a buffer that each thread reuses, because fresh memory costs more than the compression.
"""

from __future__ import annotations

import mmap
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from wherry.core import dtypes
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.integrations.containers.zarr import new
from wherry.integrations.containers.zarr.metadata import ZarrArray, parse
from wherry.integrations.containers.zarr.stream import StoredChunk, blocks, codec_of
from wherry.mover.output import as_array, as_bytes

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from wherry.formats.contents import Block
    from wherry.integrations.containers.zarr.new import Compression

_LEVEL = 1
_GZIP = 31  # window bits that mean a gzip header
_SLACK = 1 << 16


class _Compress(Protocol):
    def __call__(self, data: memoryview, into: memoryview) -> memoryview:
        """The compressed data, in `into` or in new memory."""
        ...


class ChunkEncoder:
    """Encodes the chunks of one checkpoint; see ChunkCodec."""

    def __init__(self, compression: Compression, version: int) -> None:
        """Set up.

        Args:
            compression: how chunks are compressed.
            version: of zarr; in version 3, zstd frames have a checksum.
        """
        self.plain = compression == "none"
        self._compression: Compression = compression
        self._version, self._checksum = version, version == 3  # noqa: PLR2004  zarr 3
        self._own = threading.local()

    def unchanged(self, region: Region, spec: TensorSpec) -> bool:
        """See ChunkCodec."""
        if not self.plain:
            return False
        # Whether it is a prefix of the chunk's elements: only the first axis that is cut may be shorter.
        shape, chunks = region_shape(region), spec.chunks or ()
        cut = next((axis for axis, chunk in enumerate(chunks) if chunk > 1), 0)
        return shape[cut + 1 :] == chunks[cut + 1 :]

    def encode(self, data: memoryview, region: Region, spec: TensorSpec) -> memoryview:
        """See ChunkCodec."""
        if self.unchanged(region, spec):
            return data
        whole = pad_chunk(data, region, spec.chunks or (), spec.dtype)
        if self.plain:
            return whole
        own = self._own
        if not hasattr(own, "compress"):
            own.compress = _zstd(checksum=self._checksum) if self._compression == "zstd" else _gzip
            own.buffer = memoryview(b"")
        bound = len(whole) + len(whole) // 8 + _SLACK
        if len(own.buffer) < bound:
            own.buffer = memoryview(mmap.mmap(-1, bound))  # page-aligned, for direct I/O
        return own.compress(whole, own.buffer)

    def decoding(self, spec: TensorSpec) -> Hashable:
        """See ChunkCodec."""
        return codec_of(self._array(spec))

    def decode(self, data: memoryview, region: Region, spec: TensorSpec, name: str) -> Iterator[Block]:
        """See ChunkCodec."""
        return blocks(self._array(spec), region, StoredChunk(None, 0, len(data), name, bytes(data)))

    def _array(self, spec: TensorSpec) -> ZarrArray:
        return array_of(spec.dtype, spec.shape, spec.chunks or (), self._version, self._compression)


@lru_cache(1 << 12)
def array_of(
    dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], version: int, compression: Compression
) -> ZarrArray:
    """A new array, as its metadata describes it."""
    return parse(new.text(dtype, shape, chunks, version, compression), version, "")


def pad_chunk(data: memoryview, region: Region, chunks: tuple[int, ...], dtype: str) -> memoryview:
    """A chunk as it is stored: at the edge of the tensor it is padded with zeros."""
    shape = region_shape(region)
    if shape == chunks:
        return data
    import numpy as np

    whole = np.zeros(chunks, dtypes.numpy_dtype(dtype))
    whole[tuple(slice(0, extent) for extent in shape)] = as_array(data, dtype, shape)
    return as_bytes(whole)


def _zstd(*, checksum: bool) -> _Compress:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=checksum)

    def compress(data: memoryview, into: memoryview) -> memoryview:
        reader, done = compressor.stream_reader(data, size=len(data)), 0
        while got := reader.readinto(into[done:]):  # pyright: ignore[reportArgumentType]
            done += got
        return into[:done]

    return compress


def _gzip(data: memoryview, into: memoryview) -> memoryview:
    from isal import isal_zlib

    engine, done = isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, _GZIP), 0
    for start in range(0, len(data) + 1, _SLACK):
        part = engine.compress(data[start : start + _SLACK]) if start < len(data) else engine.flush()
        into[done : done + len(part)] = part
        done += len(part)
    tail = engine.flush() if len(data) % _SLACK else b""
    into[done : done + len(tail)] = tail
    return into[: done + len(tail)]
