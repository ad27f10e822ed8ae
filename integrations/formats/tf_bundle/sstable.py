"""Sorted string tables of LevelDB, as TensorFlow writes them: the keys and values of a small file.

On disk: blocks, each followed by a compression byte and a masked CRC-32C, and a footer of 48 bytes: the handles
(offset and length as varints) of a meta index and of the index block, padding, and a magic number. A block is a
sequence of entries (bytes shared with the previous key, new bytes, bytes of the value, all varints; then the new bytes
and the value), an array of restart offsets, and their number. Values of the index block are handles of the data blocks.
Source: leveldb's doc/table_format.md; tensorflow/core/lib/io/{format,table_builder}.cc.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from google_crc32c import value as crc32c

from wherry.errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.storage.location import Location

FOOTER = 48
MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_TRAILER = 5
_LARGEST_BLOCK = 1 << 28
_MASK_DELTA = 0xA282EAD8
_LONGEST_VARINT = 10


class Bytes:
    """Reads consecutive varints and byte strings."""

    def __init__(self, data: bytes, uri: str) -> None:
        self.data = data
        self.at = 0
        self._uri = uri

    def varint(self) -> int:
        """The next varint.

        Raises:
            CorruptError: the varint is not terminated.
        """
        value = 0
        for shift in range(0, 7 * _LONGEST_VARINT, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004  the continuation bit
                return value
        raise corrupt("unterminated varint", self._uri)

    def take(self, count: int) -> bytes:
        """The next `count` bytes.

        Raises:
            CorruptError: fewer bytes are left.
        """
        data = self.data[self.at : self.at + count]
        if len(data) != count:
            raise corrupt("truncated entry", self._uri)
        self.at += count
        return data


def read_table(location: Location) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of a table, in order.

    Raises:
        CorruptError: the table is truncated, or the checksum of a block does not match.
        UnsupportedError: a compressed block.
    """
    entry = location.stat()
    size = entry.size if entry else 0
    footer = Bytes(location.read(max(size - FOOTER, 0), size), location.uri)
    if len(footer.data) != FOOTER or not footer.data.endswith(MAGIC):
        raise corrupt("missing magic number at its end", location.uri)
    _handle(footer)  # handle of the meta index, which is empty
    index = _block(location, size, _handle(footer))
    for _key, value in _entries(index, location.uri):
        handle = _handle(Bytes(value, location.uri))
        yield from _entries(_block(location, size, handle), location.uri)


def _handle(data: Bytes) -> tuple[int, int]:
    return data.varint(), data.varint()


def _block(location: Location, size: int, handle: tuple[int, int]) -> bytes:
    offset, length = handle
    if length > _LARGEST_BLOCK or offset + length + _TRAILER > size:
        raise corrupt(f"block of {length} bytes at {offset} exceeds the file", location.uri)
    data = location.read(offset, offset + length + _TRAILER)
    if data[length]:
        raise UnsupportedError(
            "unsupported compressed table", uri=location.uri, cure="save it with TensorFlow again"
        )
    if mask_crc(crc32c(data[: length + 1])) != int.from_bytes(data[length + 1 :], "little"):
        raise corrupt(f"checksum mismatch in the block at {offset}", location.uri)
    return data[:length]


def _entries(block: bytes, uri: str) -> Iterator[tuple[bytes, bytes]]:
    count = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (count + 1)
    if end < 0:
        raise corrupt("a block has no restart offsets", uri)
    rest, key = Bytes(block[:end], uri), b""
    while rest.at < end:
        shared, fresh, length = rest.varint(), rest.varint(), rest.varint()
        if shared > len(key):
            raise corrupt("a key shares more bytes than the previous key has", uri)
        key = key[:shared] + rest.take(fresh)
        yield key, rest.take(length)


def mask_crc(crc: int) -> int:
    """A CRC in its stored form, so that the CRC of bytes that contain CRCs is not degenerate."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def unmask_crc(stored: int) -> int:
    """The CRC of its stored form."""
    rotated = (stored - _MASK_DELTA) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def corrupt(reason: str, uri: str) -> CorruptError:
    """An error about invalid contents of a table."""
    return CorruptError(f"invalid index: {reason}", uri=uri, cure="restore the file")
