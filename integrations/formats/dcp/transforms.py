"""Items with a stream transform: `stream.zstd/1`, the only one in torch (2.7 and later).

The transform compresses the item as a whole, so reading at an offset requires decompressing all bytes before it. An
item is read as a store: reads near its two ends come from memory after one pass, all others decompress piece by piece
up to their end. The metadata determines the largest size of an item; an item that grows beyond it is hostile. Source:
torch/distributed/checkpoint/_extension.py of torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.errors import CorruptError, HostileError
from wherry.store.store import READ_ONLY, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.integrations.formats.dcp.metadata import StoredItem
    from wherry.storage.location import Location
    from wherry.store.store import Entry

HELD = 12 << 20  # memory for decompression: zstd's window at its usual levels, and a few pieces
_PIECE = 1 << 20
_END = 1 << 12


class InflatedItem(Store):
    """A store that holds one transformed item."""

    def __init__(self, file: Location, stored: StoredItem, most: int) -> None:
        """Decompress once, to get the two ends.

        Args:
            file: the file with the item.
            stored: location of the item in the file.
            most: largest plausible size after decompression.

        Raises:
            HostileError: the item exceeds `most`.
            CorruptError: the item cannot be decompressed.
        """
        self.protocol = file.store.protocol
        self.capabilities = READ_ONLY
        self._file, self._stored = file, stored
        self._head, self._tail, self.size = b"", b"", 0
        for piece in self.pieces():
            self.size += len(piece)
            if self.size > most:
                raise HostileError(
                    f"decompressed item of {stored.length} bytes exceeds the limit of {most} bytes",
                    uri=file.uri,
                    cure="do not use this checkpoint",
                )
            if len(self._head) < _END:
                self._head += piece[: _END - len(self._head)]
            self._tail = (self._tail + piece[-_END:])[-_END:]

    def pieces(self) -> Iterator[bytes]:
        """The decompressed item from its beginning.

        Raises:
            CorruptError: the item cannot be decompressed, or is truncated.
        """
        from zstandard import ZstdError  # loading it takes a tenth of the time of `wherry --help`

        stream = self._compressed_bytes()
        for _ in self._stored.transforms:
            stream = _unzstd(stream)
        try:
            yield from stream
        except ZstdError as error:
            raise CorruptError(
                f"cannot decompress an item: {error}", uri=self._file.uri, cure="restore the file"
            ) from error

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        return self._file.store.stat(path)

    def entries(self, path: str) -> list[Entry]:
        """See Store."""
        return self._file.store.entries(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store; offsets are those of the decompressed item."""
        del path
        stop = min(stop, self.size)
        for at, held in ((0, self._head), (self.size - len(self._tail), self._tail)):
            if at <= start and stop <= at + len(held):
                return held[start - at : stop - at]
        return b"".join(self.between(start, stop))

    def between(self, start: int, stop: int) -> Iterator[bytes]:
        """The decompressed bytes [start, stop), piece by piece; fewer if the item ends earlier."""
        position = 0
        for piece in self.pieces():
            if position >= stop:
                return
            if position + len(piece) > start:
                yield piece[max(start - position, 0) : stop - position]
            position += len(piece)

    def _compressed_bytes(self) -> Iterator[bytes]:
        position, end = self._stored.offset, self._stored.offset + self._stored.length
        while position < end:
            piece = self._file.read(position, min(position + _PIECE, end))
            if not piece:
                raise CorruptError(
                    "the file is truncated inside an item", uri=self._file.uri, cure="restore the file"
                )
            yield piece
            position += len(piece)


def _unzstd(source: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress consecutive zstd frames in pieces."""
    from zstandard import ZstdDecompressor

    reader = ZstdDecompressor().stream_reader(_PieceFile(source), read_across_frames=True)  # pyright: ignore[reportArgumentType]
    while piece := reader.read(_PIECE):
        yield piece


class _PieceFile:
    """A file over pieces, with the one method that zstandard needs."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self._left = b""

    def read(self, size: int) -> bytes:
        """At most `size` bytes; empty at the end."""
        if not self._left:
            self._left = next(self._source, b"")
        piece, self._left = self._left[:size], self._left[size:]
        return piece
