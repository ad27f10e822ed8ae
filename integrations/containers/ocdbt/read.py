"""Reads the B+tree of an OCDBT database: its keys, and the locations of their values. `write.py` describes the layout.

The input is not trusted: checksums are verified, counts and lengths are checked against the bytes that exist, keys
must be in ascending order, and the height must decrease from node to node. Values are not read.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import zstandard
from google_crc32c import value as crc32c

from wherry.core.limits import MOST_CHUNKS, beyond, exceeds, scale_limit
from wherry.errors import CorruptError, HostileError, IncompleteError, UnsupportedError
from wherry.integrations.containers.ocdbt.write import MANIFEST_MAGIC, NODE_MAGIC, Reference, Value

if TYPE_CHECKING:
    from wherry.store.location import Location

MANIFEST = "manifest.ocdbt"
_NUMBERED = re.compile(r"manifest\.[0-9a-f]{16}")
_MOST_BYTES = 104 << 20  # of a decoded node; Orbax's limit is 100 MB
_MOST_ENTRIES = 400_000  # of one node: it has a key, a place and a number for each
_MOST_KEY_BYTES = 64 << 20  # of one node: keys share prefixes, so that a few bytes can be a long key
_MOST_HEIGHT = 16
_UNCOMPRESSED, _ZSTD = 0, 1
_LONG = 0x80  # set in every byte of a number but the last
_CURE = "copy the checkpoint again, or use another step"


class _Body:
    """The decoded body of a node or manifest, read from front to back."""

    def __init__(self, data: bytes, uri: str) -> None:
        self._data = data
        self._at = 0
        self.uri = uri

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if not 0 <= count <= len(self._data) - self._at:
            raise CorruptError(
                f"OCDBT node is truncated: expected {count} bytes, got {len(self._data) - self._at}",
                uri=self.uri,
                cure=_CURE,
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def varint(self) -> int:
        """The next number."""
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < _LONG:  # the last byte of a number
                return value
            shift += 7

    def column(self, count: int) -> list[int]:
        """The next `count` numbers."""
        if count > len(self._data) - self._at:
            raise CorruptError(
                f"OCDBT node is truncated: expected {count} numbers, got {len(self._data) - self._at} bytes",
                uri=self.uri,
                cure=_CURE,
            )
        numbers: list[int] = []
        for _ in range(count):
            byte = self._data[self._at] if self._at < len(self._data) else _LONG
            if byte < _LONG:  # almost all numbers
                self._at += 1
                numbers.append(byte)
            else:
                numbers.append(self.varint())
        return numbers


def read_database(location: Location, check: Callable[[Reference], None]) -> Iterator[tuple[bytes, Value]]:
    """Yield every key of the newest version with its value, or the location of the value.

    Args:
        location: the folder of the database.
        check: called with the location of each node before it is read; raises if its file is missing or truncated.

    Raises:
        IncompleteError: the manifest is missing or empty.
        CorruptError: a checksum does not match, or a node is invalid.
        HostileError: a node exceeds a limit, or a file name points outside the folder.
        UnsupportedError: the version or the compression is unknown.
    """
    manifest = _Body(_unseal(location.join(MANIFEST), None, MANIFEST_MAGIC), location.uri)
    if _configuration(manifest):
        numbered = sorted(entry.name for entry in location.entries() if _NUMBERED.fullmatch(entry.name))
        if not numbered:
            raise IncompleteError("file not found: manifest.<16 hex digits>", uri=location.uri, cure=_CURE)
        manifest = _Body(_unseal(location.join(numbered[-1]), None, MANIFEST_MAGIC), location.uri)
        _configuration(manifest)
    files = _files(manifest, "")
    count = manifest.varint()
    manifest.column(count)
    heights = manifest.take(count)
    places = _references(manifest, count, files)
    if not count or not places[-1][0].length:
        return
    most = scale_limit(MOST_CHUNKS)
    for number, entry in enumerate(_walk(location, check, places[-1], b"", b"", heights[-1])):
        if number >= most:
            raise beyond("the OCDBT database", most, "entries", uri=location.uri)
        yield entry


def _walk(
    location: Location, check: Callable[[Reference], None], node: tuple[Reference, str],
    prefix: bytes, least: bytes, height: int,
) -> Iterator[tuple[bytes, Value]]:  # fmt: skip
    """The entries below a node.

    Args:
        location: the database.
        check: see `read_database`.
        node: its location, and the base path of the files that it names.
        prefix: the common prefix that its stored keys omit.
        least: the smallest key that it may hold.
        height: its expected height.
    """
    place, base = node
    check(place)
    body = _Body(_unseal(location.member(place.file), place, NODE_MAGIC), location.uri)
    found = body.take(1)[0]
    if found != height or height > _MOST_HEIGHT:
        raise CorruptError(
            f"invalid height of an OCDBT node: expected {height} (at most {_MOST_HEIGHT}), got {found}",
            uri=location.uri,
            cure=_CURE,
        )
    files = _files(body, base)
    count = body.varint()
    if exceeds(count, _MOST_ENTRIES):
        raise beyond("an OCDBT node", scale_limit(_MOST_ENTRIES), "entries", uri=location.uri)
    keys, subtrees = _keys(body, count, prefix, interior=height > 0)
    if not keys or keys[0] < least or any(one >= other for one, other in pairwise(keys)):
        raise CorruptError(
            "the keys of an OCDBT node are not in ascending order", uri=location.uri, cure=_CURE
        )
    if height == 0:
        yield from zip(keys, _values(body, count, files), strict=True)
        return
    children = _references(body, count, files)
    for key, cut, child in zip(keys, subtrees, children, strict=True):
        yield from _walk(location, check, child, key[: len(prefix) + cut], key, height - 1)


def _unseal(location: Location, place: Reference | None, magic: int) -> bytes:
    """The body of a node or manifest, verified and decompressed."""
    if location.entry is None:
        raise IncompleteError(f"file not found: {location.name}", uri=location.uri, cure=_CURE)
    if place is None:
        data = location.read_whole(_MOST_BYTES)
    elif place.length > _MOST_BYTES:
        raise HostileError(
            f"OCDBT node of {place.length} bytes exceeds the limit of 104 MiB", uri=location.uri, cure=_CURE
        )
    else:
        data = location.read(place.offset, place.offset + place.length)
    if not data:
        raise IncompleteError(f"file is empty: {location.name}", uri=location.uri, cure=_CURE)
    whole = len(data) >= 18 and struct.unpack_from(">IxxxxxxxxBB", data)  # noqa: PLR2004  the smallest
    if not whole or whole[0] != magic or struct.unpack_from("<Q", data, 4) != (len(data),):
        raise CorruptError(
            f"invalid OCDBT node in {location.name}: wrong magic number or length",
            uri=location.uri,
            cure=_CURE,
        )
    if crc32c(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
        raise CorruptError(
            f"checksum mismatch in an OCDBT node of {location.name}", uri=location.uri, cure=_CURE
        )
    _, version, compression = whole
    if version != 0 or compression not in (_UNCOMPRESSED, _ZSTD):
        raise UnsupportedError(
            f"unsupported OCDBT node: version {version}, compression {compression}", uri=location.uri
        )
    return data[14:-4] if compression == _UNCOMPRESSED else _decompress(data[14:-4], location.uri)


def _decompress(data: bytes, uri: str) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as reader:
            body = reader.read(_MOST_BYTES + 1)
    except zstandard.ZstdError as error:
        raise CorruptError(f"cannot decompress an OCDBT node: {error}", uri=uri, cure=_CURE) from error
    if len(body) > _MOST_BYTES:
        raise beyond("a decompressed OCDBT node", _MOST_BYTES, "bytes", uri=uri)
    return body


def _configuration(manifest: _Body) -> bool:
    """Skip the configuration; return whether versions are stored in numbered manifests."""
    manifest.take(16)
    numbered = bool(manifest.take(1)[0])
    manifest.column(2)
    manifest.take(1)
    if manifest.varint() == _ZSTD:
        manifest.take(4)
    return numbered


def _files(body: _Body, base: str) -> list[tuple[str, str]]:
    """The data files that a node names: the path relative to the database, and the base path for the nodes below."""
    count = body.varint()
    shared = [0, *body.column(max(count - 1, 0))]
    suffixes, bases = body.column(count), body.column(count)
    names: list[str] = []
    found: list[tuple[str, str]] = []
    path, left = b"", scale_limit(_MOST_KEY_BYTES)
    for cut, length, inner in zip(shared[:count], suffixes, bases, strict=True):
        left -= len(base) + cut + length
        if left < 0:
            raise beyond("an OCDBT node", scale_limit(_MOST_KEY_BYTES), "bytes of file names", uri=body.uri)
        path = path[:cut] + body.take(length)
        names.append(base + path.decode("utf-8", "surrogateescape"))
        found.append((names[-1], base + path[:inner].decode("utf-8", "surrogateescape")))
    return found


def _keys(body: _Body, count: int, prefix: bytes, *, interior: bool) -> tuple[list[bytes], list[int]]:
    shared = [0, *body.column(max(count - 1, 0))]
    suffixes = body.column(count)
    subtrees = body.column(count) if interior else []
    keys: list[bytes] = []
    key, left = b"", scale_limit(_MOST_KEY_BYTES)
    for cut, length in zip(shared[:count], suffixes, strict=True):
        left -= len(prefix) + cut + length
        if left < 0:
            raise beyond("an OCDBT node", scale_limit(_MOST_KEY_BYTES), "bytes of keys", uri=body.uri)
        key = key[:cut] + body.take(length)
        keys.append(prefix + key)
    return keys, subtrees


def _values(body: _Body, count: int, files: list[tuple[str, str]]) -> list[Value]:
    lengths = body.column(count)
    kinds = body.take(count)
    outside = sum(kind != 0 for kind in kinds)
    numbers, offsets = body.column(outside), body.column(outside)
    places = iter(zip(numbers, offsets, strict=True))
    found: list[Value] = []
    for length, kind in zip(lengths, kinds, strict=True):
        if kind:
            number, offset = next(places)
            found.append(Reference(_file(files, number, body)[0], offset, length))
        else:
            found.append(body.take(length))
    return found


def _references(body: _Body, count: int, files: list[tuple[str, str]]) -> list[tuple[Reference, str]]:
    """The locations of the children, and the base path below each; the statistics after them are skipped."""
    numbers, offsets, lengths = body.column(count), body.column(count), body.column(count)
    body.column(3 * count)
    rows: list[tuple[Reference, str]] = []
    for number, offset, length in zip(numbers, offsets, lengths, strict=True):
        file, base = _file(files, number, body) if length else ("", "")
        rows.append((Reference(file, offset, length), base))
    return rows


def _file(files: list[tuple[str, str]], number: int, body: _Body) -> tuple[str, str]:
    if number >= len(files):
        raise CorruptError(
            f"data file {number} out of range for the {len(files)} data files of an OCDBT node",
            uri=body.uri,
            cure=_CURE,
        )
    return files[number]


PROCESS_PREFIX = "ocdbt.process_"
