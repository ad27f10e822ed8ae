"""Decodes a stored zarr chunk piece by piece, in memory that does not grow with the chunk.

tensorstore decodes whole chunks only: reading 8 MiB of a zstd chunk of 512 MiB took 963 MB. Here the compressed
bytes are read in pieces, and the elements are decoded in pieces, in stored order. Memory holds two
pieces and the codec's window (zstd: from the frame header; deflate: 32 KiB).

libdeflate inflates much faster, but only a whole chunk at once, so it decodes those that are no larger than 8 MiB.

A chunk must decode to exactly the size in its metadata: excess bytes are never decoded; missing bytes are an error, and
so is a frame without its end. python-zstandard does not report the latter; a second frame that is added after the
chunk's bytes shows it, because it is decoded only if the first one ended.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, TYPE_CHECKING, NoReturn, cast

import deflate
import zstandard
from google_crc32c import value as crc32c
from isal import isal_zlib as zlib

from wherry.core import dtypes
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import CorruptError, IncompleteError
from wherry.formats.format import Block
from wherry.store.ranges import STEP, ReadAhead

if TYPE_CHECKING:
    from wherry.core.tensorspec import Region
    from wherry.integrations.containers.zarr.metadata import ZarrArray
    from wherry.store.location import Location

PIECE = 1 << 19
# Bytes of a decoded deflate chunk that is inflated at once: as much as the mover decodes whole in any budget. The
# chunks inside a shard are decoded in pieces, since a shard may be too large for that.
AT_ONCE = 8 << 20
_CODEC_BYTES = 1 << 18  # zstd's tables and one block; deflate's window is smaller
_FRAME_HEADER = 18
_MOST_WINDOW = 1 << 31  # bytes; ZSTD_WINDOWLOG_MAX of 64-bit machines
_ENTRY, _CRC = 16, 4
_ABSENT = (1 << 64) - 1
_WBITS = {"zlib": 15, "gzip": 31}
_GZIP_END = struct.Struct("<II")  # CRC-32 and size of the decoded bytes
_END = b"end of chunk"
_END_FRAME = zstandard.ZstdCompressor().compress(_END)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """The stored bytes of one chunk, or of one inner chunk of a shard.

    Attributes:
        place: the file; None if the bytes are in `inline`.
        offset: offset of the bytes.
        length: number of bytes.
        name: the name in errors.
        inline: the bytes, or empty.
        ahead: reads them in order from a remote store.
    """

    place: Location | None
    offset: int
    length: int
    name: str
    inline: bytes = b""
    ahead: ReadAhead | None = None

    @property
    def uri(self) -> str | None:
        """The file."""
        return self.place.uri if self.place else None

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fewer at the end."""
        stop = min(stop, self.length)
        if self.ahead is not None:
            return self.ahead.read(start, stop)
        if self.place is None:
            return self.inline[self.offset + start : self.offset + stop]
        return self.place.read(self.offset + start, self.offset + stop) if start < stop else b""

    def part(self, offset: int, length: int) -> StoredChunk:
        """A part of the chunk; the caller has checked the range."""
        return StoredChunk(self.place, self.offset + offset, length, self.name, self.inline)

    def in_order(self) -> StoredChunk:
        """The same bytes, for reading them in order in small pieces."""
        if self.place is None or self.place.store.capabilities.local:
            return self
        return replace(self, ahead=ReadAhead(self.place, self.offset, self.length))

    def corrupt(self, reason: str) -> NoReturn:
        """Raise the error for invalid bytes."""
        raise self.error(reason)

    def error(self, reason: str) -> CorruptError:
        """The error for invalid bytes."""
        cure = "copy the checkpoint again, or use another step"
        return CorruptError(f"chunk {self.name} {reason}", uri=self.uri, cure=cure)


def held_bytes(array: ZarrArray, stored: StoredChunk) -> int:
    """Bytes of memory for decoding one chunk; of zstd, from the header of its first frame."""
    extents, state = array.chunks, 0
    if array.inner is not None:
        first = next((entry for entry in _index(array, stored) if _ABSENT not in entry), (0, 0))
        stored, extents = stored.part(*first), array.inner
    nbytes = dtypes.canonical_size(array.dtype, math.prod(extents))
    if array.inner is None and array.codec in _WBITS and nbytes <= AT_ONCE:
        return nbytes + stored.length
    if array.codec == "zstd" and stored.length:  # a window larger than the chunk is not fully used
        state = min(_window(stored), nbytes)
    ahead = 0 if stored.in_order() is stored else 2 * min(2 * STEP, stored.length)  # of a remote store
    return 2 * PIECE + _CODEC_BYTES + state + ahead


def codec_of(array: ZarrArray) -> tuple[object, ...]:
    """Everything besides the stored bytes that the elements of an array's chunks depend on."""
    return array.codec, array.dtype, array.shape, array.chunks, array.inner


def blocks(array: ZarrArray, region: Region, stored: StoredChunk) -> Iterator[Block]:
    """The elements of one chunk: one block, or one for each inner chunk of a shard.

    Args:
        array: its array.
        region: the region of the tensor that it holds.
        stored: its bytes.

    Raises:
        CorruptError: it does not decode to the size in the metadata.
        IncompleteError: an inner chunk is missing.
    """
    start = tuple(part.start for part in region)
    if array.inner is None:
        yield _block(start, array.chunks, _pieces(array.codec, stored, array.chunk_nbytes))
        return
    nbytes = dtypes.canonical_size(array.dtype, math.prod(array.inner))
    for place, (offset, length) in zip(_places(array, start), _index(array, stored), strict=True):
        if any(first >= extent for first, extent in zip(place, array.shape, strict=True)):
            continue  # outside the tensor: never stored
        if offset == length == _ABSENT:
            raise IncompleteError(f"missing inner chunk at {place} in chunk {stored.name}", uri=stored.uri)
        inside = stored.part(offset, length)
        yield _block(place, array.inner, _pieces(array.codec, inside, nbytes, at_once=0))


def _block(start: tuple[int, ...], extents: tuple[int, ...], pieces: Iterator[memoryview]) -> Block:
    return Block(
        tuple(slice(first, first + extent) for first, extent in zip(start, extents, strict=True)), pieces
    )


def _places(array: ZarrArray, start: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Start of each inner chunk of a shard, in C order."""
    assert array.inner is not None
    counts = [chunk // inner for chunk, inner in zip(array.chunks, array.inner, strict=True)]
    for number in range(math.prod(counts)):
        place: list[int] = []
        rest = number
        for count, inner in zip(reversed(counts), reversed(array.inner), strict=True):
            rest, index = divmod(rest, count)
            place.append(index * inner)
        yield tuple(first + step for first, step in zip(start, reversed(place), strict=True))


def _index(array: ZarrArray, stored: StoredChunk) -> Iterator[tuple[int, int]]:
    """Offset and length of each inner chunk, from the index at the shard's end; `_ABSENT` for missing ones."""
    assert array.inner is not None
    size = _ENTRY * (math.prod(array.chunks) // math.prod(array.inner))
    if stored.length < size + _CRC:
        stored.corrupt(f"is truncated: expected an index of {size + _CRC} bytes, got {stored.length}")
    data = stored.read(stored.length - size - _CRC, stored.length)
    if len(data) != size + _CRC or crc32c(data[:size]) != int.from_bytes(data[size:], "little"):
        stored.corrupt("has a checksum mismatch in its index")
    for offset, length in struct.iter_unpack("<QQ", data[:size]):
        if (offset, length) != (_ABSENT, _ABSENT) and offset + length > stored.length:
            stored.corrupt(
                f"has an invalid index: bytes {offset} to {offset + length} out of range for {stored.length}"
            )
        yield offset, length


def _pieces(codec: str, stored: StoredChunk, nbytes: int, at_once: int = AT_ONCE) -> Iterator[memoryview]:
    """Exactly `nbytes` decoded bytes; each piece is valid until the next is requested.

    A deflate chunk of at most `at_once` bytes is inflated at once.
    """
    stored = stored.in_order()
    if codec == "none":
        return _copy(stored, nbytes)
    if codec not in _WBITS:
        return _unpack(stored, nbytes)
    return _inflated_at_once(codec, stored, nbytes) if nbytes <= at_once else _inflate(codec, stored, nbytes)


def _copy(stored: StoredChunk, nbytes: int) -> Iterator[memoryview]:
    if stored.length != nbytes:
        stored.corrupt(f"has a size mismatch: expected {nbytes} bytes, got {stored.length}")
    for start in range(0, nbytes, PIECE):
        data = stored.read(start, start + PIECE)
        if len(data) != min(PIECE, nbytes - start):
            stored.corrupt("is truncated")
        yield memoryview(data)


def _unpack(stored: StoredChunk, nbytes: int) -> Iterator[memoryview]:
    window = max(_window(stored), 1 << 10)
    if window > _MOST_WINDOW:
        stored.corrupt(f"cannot be decoded: a window of {window} bytes; zstd has {_MOST_WINDOW} at most")
    decoder = zstandard.ZstdDecompressor(max_window_size=window)
    source = decoder.stream_reader(cast("IO[bytes]", _File(stored)), read_size=PIECE, read_across_frames=True)
    buffer, left = memoryview(bytearray(min(PIECE, max(nbytes, 1)))), nbytes
    try:
        while left:
            count = source.readinto(buffer[: min(left, len(buffer))])
            if not count:
                stored.corrupt(f"decodes to fewer than {nbytes} bytes")
            left -= count
            yield buffer[:count]
        tail = source.read(len(_END) + 1)
    except zstandard.ZstdError as error:
        raise stored.error(f"cannot be decoded: {error}") from error
    if tail != _END:
        word = "fewer" if len(tail) < len(_END) else "more"
        stored.corrupt(f"decodes to {word} than {nbytes} bytes")


def _inflated_at_once(codec: str, stored: StoredChunk, nbytes: int) -> Iterator[memoryview]:
    """The whole chunk; where libdeflate cannot decode it, piece by piece, which tells the reason."""
    data = stored.read(0, stored.length)
    inflate = deflate.gzip_decompress if codec == "gzip" else deflate.zlib_decompress
    try:
        whole = inflate(data, nbytes)
    except deflate.DeflateError:
        whole = b""
    if len(whole) == nbytes and len(data) == stored.length:
        # libdeflate does not say whether others follow the last bytes of the stream.
        if codec == "gzip":
            ending = _GZIP_END.pack(zlib.crc32(whole), len(whole))
        else:
            ending = zlib.adler32(whole).to_bytes(4, "big")
        if data.endswith(ending):
            return iter([memoryview(whole)])
    return _inflate(codec, stored, nbytes)


def _inflate(codec: str, stored: StoredChunk, nbytes: int) -> Iterator[memoryview]:
    engine, left, position, data = zlib.decompressobj(_WBITS[codec]), nbytes, 0, b""
    try:
        while not engine.eof:
            if not data:
                data = stored.read(position, position + PIECE)
                position += len(data)
                if not data:
                    stored.corrupt("is truncated")
            piece = engine.decompress(data, min(left, PIECE) or 1)
            data = engine.unconsumed_tail
            if len(piece) > left:
                stored.corrupt(f"decodes to more than {nbytes} bytes")
            left -= len(piece)
            yield memoryview(piece)
    except zlib.error as error:  # pyright: ignore[reportGeneralTypeIssues]  its stub says Any
        raise stored.error(f"cannot be decoded: {error}") from error
    if left:
        stored.corrupt(f"decodes to {nbytes - left} bytes; expected {nbytes}")
    if engine.unused_data or position != stored.length:
        stored.corrupt("has trailing bytes")


def _window(stored: StoredChunk) -> int:
    try:
        return zstandard.get_frame_parameters(stored.read(0, _FRAME_HEADER)).window_size
    except zstandard.ZstdError as error:
        raise stored.error(f"cannot be decoded: {error}") from error


class _File:
    """Stored bytes as a file for zstandard, followed by the frame that shows whether they ended."""

    def __init__(self, stored: StoredChunk) -> None:
        self._stored = stored
        self._position = 0

    def read(self, size: int) -> bytes:
        """The next bytes; empty at the end."""
        data = self._stored.read(self._position, self._position + size)
        if not data and self._position < self._stored.length:
            self._stored.corrupt("is truncated")
        if not data:
            over = self._position - self._stored.length
            data = _END_FRAME[over : over + size]
        self._position += len(data)
        return data
