"""The entries of a TensorFlow tensor bundle: `<prefix>.index` and `<prefix>.data-<i>-of-<n>`.

The index is a sorted string table. Its empty key holds a BundleHeaderProto (1 number of shards, 2 byte order, 0 for
little); every other key is a tensor's name and holds a BundleEntryProto: 1 dtype, 2 shape, 3 shard, 4 offset, 5 size,
6 masked CRC-32C of the bytes, 7 slices of a partitioned variable. Numbers are stored raw; strings as a varint length
each, a CRC-32C of the lengths, and the bytes. Source: tensorflow/core/protobuf/tensor_bundle.proto,
tensorflow/core/framework/types.proto, tensorflow/core/util/tensor_bundle/tensor_bundle.cc.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google_crc32c import value as crc32c

from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.contents import Extent, RangeChecksum
from wherry.integrations.formats.tf_bundle.sstable import Bytes, corrupt, mask_crc, read_table, unmask_crc

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Value
    from wherry.storage.location import Location
    from wherry.store.store import Entry

INDEX = ".index"
_STRING = 7
_LONGEST_TEXT = 1 << 24
_MOST_RANK = 254
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# DataType → wherry's name.
_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64", 10: "bool",
    14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2",
    25: "float8_e4m3fn", 26: "float8_e4m3fnuz", 27: "float8_e4m3b11fnuz", 28: "float8_e5m2fnuz",
    29: "int4", 30: "uint4",
}  # fmt: skip


@dataclass(slots=True)
class Bundle:
    """Contents of a bundle.

    Attributes:
        specs: its tensors.
        places: the location of each tensor.
        values: its single strings; bytes that are not text as `base64:...`.
        files: its existing data files, by name.
    """

    specs: dict[KeyPath, TensorSpec] = field(default_factory=dict["KeyPath", TensorSpec])
    places: dict[KeyPath, tuple[Extent, ...]] = field(default_factory=dict["KeyPath", tuple[Extent, ...]])
    values: dict[KeyPath, Value] = field(default_factory=dict["KeyPath", "Value"])
    files: dict[str, Entry] = field(default_factory=dict[str, "Entry"])


def read_bundle(index: Location) -> Bundle:
    """Read the index of a bundle and check its data files.

    Raises:
        CorruptError: the index or an entry is invalid, or does not match the size of a file.
        IncompleteError: a data file is missing.
        UnsupportedError: big-endian bundles, partitioned variables, unsupported tensor types.
    """
    bundle, shards = Bundle(), 0
    for key, data in read_table(index):
        entry = _fields(data, index.uri)
        if not key:
            if _number(entry, 2):
                raise UnsupportedError(
                    "unsupported big-endian bundle", uri=index.uri, cure="save it with TensorFlow again"
                )
            shards = _number(entry, 1)
            _find_files(index, shards, bundle)
        elif not shards:
            raise corrupt("missing header", index.uri)
        else:
            _add(_name(key, index.uri), entry, index, shards, bundle)
    return bundle


def _name(key: bytes, uri: str) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"unsupported key, not valid UTF-8: {key!r:.100}", uri=uri) from error


def _find_files(index: Location, shards: int, bundle: Bundle) -> None:
    there = {entry.name: entry for entry in index.parent.entries()}
    if shards > len(there):
        raise IncompleteError(
            f"missing data files: the index names {shards}, the folder has {len(there)} files", uri=index.uri
        )
    for shard in range(shards):
        name = _file_name(index, shard, shards)
        if name not in there:
            raise IncompleteError(
                f"file not found: {name}", uri=index.uri, cure="copy all files of the bundle"
            )
        bundle.files[name] = there[name]


def _file_name(index: Location, shard: int, shards: int) -> str:
    return f"{index.name.removesuffix(INDEX)}.data-{shard:05d}-of-{shards:05d}"


def _add(
    name: str, entry: dict[int, list[int | bytes]], index: Location, shards: int, bundle: Bundle
) -> None:
    if 7 in entry:  # noqa: PLR2004  field number, see the docstring
        raise UnsupportedError(
            f"unsupported partitioned variable {name}",
            uri=index.uri,
            cure="save it unpartitioned with TensorFlow",
        )
    shard, offset, size = (_number(entry, number) for number in (3, 4, 5))
    if shard >= shards:
        raise corrupt(f"data file {shard} of {name} out of range for {shards} files", index.uri)
    file = bundle.files[_file_name(index, shard, shards)]
    if offset + size > file.size:
        raise CorruptError(
            f"{file.name} is truncated: expected {offset + size} bytes for {name}, got {file.size}",
            uri=index.uri,
            cure="restore the file",
        )
    shape, kind, place = _shape(entry, name, index.uri), _number(entry, 1), index.parent.join(file.name)
    if kind == _STRING and not shape:
        data = place.read(offset, offset + min(size, _LONGEST_TEXT + 1))
        bundle.values[name,] = _text(data, _number(entry, 6), name, index.uri)
        return
    if kind not in _DTYPES:
        what = "array of strings" if kind == _STRING else f"TensorFlow type {kind}"
        raise UnsupportedError(
            f"unsupported {what} of {name}", uri=index.uri, cure="save the checkpoint without it"
        )
    spec = TensorSpec((name,), shape, _DTYPES[kind])
    if spec.nbytes != size:
        raise corrupt(
            f"{name} has {size} bytes; expected {spec.nbytes} for {spec.dtype}{list(shape)}", index.uri
        )
    stored = RangeChecksum(offset, size, unmask_crc(_number(entry, 6)), "CRC-32C")
    crc = stored if 6 in entry else None  # noqa: PLR2004  field number, see the docstring
    bundle.specs[spec.path], bundle.places[spec.path] = spec, (Extent(place, offset, size, within=crc),)


def _text(data: bytes, crc: int, name: str, uri: str) -> str:
    """The one string of an entry: its length, a CRC of the length, and its bytes."""
    stored = Bytes(data, uri)
    length = stored.varint()
    checked = length.to_bytes(4 if length < 1 << 32 else 8, "little")
    found = stored.take(4)
    text = stored.take(length)
    if int.from_bytes(found, "little") != mask_crc(crc32c(checked)) or stored.at != len(data):
        raise corrupt(f"the length of the string {name} does not match", uri)
    if mask_crc(crc32c(checked + found + text)) != crc:
        raise CorruptError(f"checksum mismatch in the string {name}", uri=uri, cure="restore the file")
    try:
        return text.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(text).decode()}"


def _shape(entry: dict[int, list[int | bytes]], name: str, uri: str) -> tuple[int, ...]:
    """TensorShapeProto: 2 dimensions (1 their extents), 3 whether the rank is unknown."""
    stored = entry.get(2, [b""])[-1]
    proto = _fields(stored if isinstance(stored, bytes) else b"", uri)
    dimensions = proto.get(2, [])
    if _number(proto, 3) or len(dimensions) > _MOST_RANK:
        raise corrupt(f"unknown shape of {name}", uri)
    extents = [_number(_fields(one, uri), 1) for one in dimensions if isinstance(one, bytes)]
    if len(extents) != len(dimensions) or any(extent >= 1 << 62 for extent in extents):
        raise corrupt(f"impossible shape of {name}", uri)
    return tuple(extents)


def _fields(data: bytes, uri: str) -> dict[int, list[int | bytes]]:
    """The fields of a protocol buffer by number."""
    found: dict[int, list[int | bytes]] = {}
    rest = Bytes(data, uri)
    while rest.at < len(data):
        number, wire = divmod(rest.varint(), 8)
        if wire == _VARINT:
            value: int | bytes = rest.varint()
        elif wire == _BYTES:
            value = rest.take(rest.varint())
        elif wire in (_FIXED32, _FIXED64):
            value = int.from_bytes(rest.take(4 if wire == _FIXED32 else 8), "little")
        else:
            raise corrupt(f"unknown field type {wire}", uri)
        found.setdefault(number, []).append(value)
    return found


def _number(fields: dict[int, list[int | bytes]], number: int) -> int:
    value = fields.get(number, [0])[-1]
    return value if isinstance(value, int) else 0
