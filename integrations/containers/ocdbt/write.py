"""Encodes an OCDBT database: the B+tree over values that are stored in data files, and the manifest.

tensorstore could write the values too, but it buffers them in memory, does not report when they are durable, and
rewrites the tree with every commit. Here values are written into data files by offset, and the tree is built once.

Layout, all numbers little endian, `varint` is unsigned LEB128:

- node and manifest: magic (4 bytes, big endian), length of all of it (8 bytes), varint version 0, varint compression
  (1: zstd), body, CRC-32C of everything before (4 bytes);
- node body: height (1 byte), table of data files, varint count of entries, then columns: key prefix lengths (all but
  the first), key suffix lengths, in interior nodes the subtrees' common prefix lengths, key suffixes; a leaf goes on
  with value lengths, kinds (0 inline, 1 in a file), file numbers, offsets, inline values; an interior node with
  children: file numbers, offsets, lengths, and keys, tree bytes and value bytes below each;
- manifest body: configuration, table of data files, one version (generation, height, root as above, time), and no
  older versions;
- table of data files: count, prefix lengths (all but the first), suffix lengths, base path lengths, suffixes.

Source: the storage format chapter of tensorstore's OCDBT documentation and its format/*.cc, checked against
databases of tensorstore 0.1.8x, which reads these in tests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

import zstandard
from google_crc32c import value as crc32c

NODE_MAGIC, MANIFEST_MAGIC = 0x0CDB20DE, 0x0CDB3A2A
_ZSTD = b"\x01"
_MOST_ENTRIES = 20_000  # of one node: some 10 MB decoded with the longest keys in use
# As Orbax configures its databases: tiny values inline, large nodes, versions in the manifest itself.
_INLINE_BYTES, _NODE_BYTES, _ARITY_LOG2 = 1024, 100_000_000, 4


class Reference(NamedTuple):
    """The location of a value: a file relative to the database, offset and length."""

    file: str
    offset: int
    length: int


Value: TypeAlias = bytes | Reference
_Entry = TypeVar("_Entry")


class _Child(NamedTuple):
    """An encoded node, as its parent describes it."""

    key: bytes
    place: Reference
    keys: int
    tree_bytes: int
    value_bytes: int


def encode_database(
    values: Mapping[str, Value], nodes: str, uuid: bytes, nanoseconds: int
) -> tuple[bytes, bytes]:
    """Encode a database of one version.

    Args:
        values: key → the value itself, or its location.
        nodes: the data file that will hold the tree, relative to the database.
        uuid: 16 bytes that name the database.
        nanoseconds: time of the commit since 1970.

    Returns:
        Contents of `nodes` and of `manifest.ocdbt`.
    """
    data = bytearray()
    entries = sorted((key.encode("utf-8", "surrogateescape"), value) for key, value in values.items())
    level = [_put(data, nodes, *_leaf(part)) for part in _parts(entries)]
    height = 0
    while len(level) > 1:
        height += 1
        level = [_put(data, nodes, *_interior(part, height)) for part in _parts(level)]
    config = b"".join((
        uuid, b"\x00", _varint(_INLINE_BYTES), _varint(_NODE_BYTES), bytes([_ARITY_LOG2]),
        _ZSTD, struct.pack("<i", 0),
    ))  # fmt: skip
    versions = b"".join((
        _varint(1), _varint(1), bytes([height]), _children(level), struct.pack("<Q", nanoseconds),
    ))  # fmt: skip
    manifest = config + _files([root.place.file for root in level]) + versions + _varint(0)
    return bytes(data), _seal(MANIFEST_MAGIC, manifest)


def _parts(entries: Sequence[_Entry]) -> Iterable[Sequence[_Entry]]:
    return (entries[at : at + _MOST_ENTRIES] for at in range(0, len(entries), _MOST_ENTRIES))


def _put(data: bytearray, file: str, body: bytes, child: _Child) -> _Child:
    node = _seal(NODE_MAGIC, body)
    place = Reference(file, len(data), len(node))
    data += node
    return child._replace(place=place, tree_bytes=child.tree_bytes + len(node))


def _leaf(entries: Sequence[tuple[bytes, Value]]) -> tuple[bytes, _Child]:
    """The body of a leaf, and its entry in the parent without the location."""
    outside = [value for _, value in entries if isinstance(value, Reference)]
    files = sorted({value.file for value in outside})
    sizes = [value.length if isinstance(value, Reference) else len(value) for _, value in entries]
    body = b"".join((
        b"\x00", _files(files), _varint(len(entries)), _keys([key for key, _ in entries]),
        _varints(sizes),
        bytes(isinstance(value, Reference) for _, value in entries),
        _varints(files.index(value.file) for value in outside),
        _varints(value.offset for value in outside),
        *(value for _, value in entries if not isinstance(value, Reference)),
    ))  # fmt: skip
    below = sum(value.length for value in outside)
    return body, _Child(entries[0][0], Reference("", 0, 0), len(entries), 0, below)


def _interior(children: Sequence[_Child], height: int) -> tuple[bytes, _Child]:
    """The body of an interior node; the keys of a subtree keep their common prefix."""
    body = b"".join((
        bytes([height]), _files(sorted({child.place.file for child in children})), _varint(len(children)),
        _keys([child.key for child in children], _varints(0 for _ in children)),
        _children(children),
    ))  # fmt: skip
    sums = [sum(numbers) for numbers in zip(*(child[2:] for child in children), strict=True)]
    return body, _Child(children[0].key, Reference("", 0, 0), *sums)


def _children(children: Sequence[_Child]) -> bytes:
    files = sorted({child.place.file for child in children})
    return b"".join((
        _varints(files.index(child.place.file) for child in children),
        _varints(child.place.offset for child in children),
        _varints(child.place.length for child in children),
        _varints(child.keys for child in children),
        _varints(child.tree_bytes for child in children),
        _varints(child.value_bytes for child in children),
    ))  # fmt: skip


def _seal(magic: int, body: bytes) -> bytes:
    packed = b"\x00" + _ZSTD + zstandard.compress(body, 1)
    whole = struct.pack(">I", magic) + struct.pack("<Q", 16 + len(packed)) + packed
    return whole + struct.pack("<I", crc32c(whole))


def _files(files: Sequence[str]) -> bytes:
    """The table of data files; all paths are relative to the database, so no base path is needed."""
    names = [file.encode() for file in files]
    shared = [_common(one, other) for one, other in pairwise(names)]
    suffixes = [name[length:] for name, length in zip(names, [0, *shared], strict=False)]
    return b"".join((
        _varint(len(names)), _varints(shared), _varints(map(len, suffixes)),
        _varints(0 for _ in names), *suffixes,
    ))  # fmt: skip


def _keys(keys: Sequence[bytes], between: bytes = b"") -> bytes:
    shared = [_common(one, other) for one, other in pairwise(keys)]
    suffixes = [key[length:] for key, length in zip(keys, [0, *shared], strict=False)]
    return b"".join((_varints(shared), _varints(map(len, suffixes)), between, *suffixes))


def _common(one: bytes, other: bytes) -> int:
    """Length of the prefix that two keys share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _varints(numbers: Iterable[int]) -> bytes:
    return b"".join([_SHORT[number] if number < _LONG else _varint(number) for number in numbers])


_LONG = 1 << 7  # numbers that take more than one byte
_SHORT = [bytes([number]) for number in range(_LONG)]


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:  # noqa: PLR2004  seven bits a byte
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
