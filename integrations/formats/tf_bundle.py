"""TensorFlow's tensor bundles (`tf.train.Checkpoint`, `variables/` of a SavedModel): read, never written.

A bundle is a prefix: `<prefix>.index` and `<prefix>.data-00000-of-0000N` in one folder. It is detected by the string
table in the index, given the index file, its prefix, or a folder that contains only one bundle. A key path is one part,
the stored name with its slashes; single strings are values, including the serialised object graph
(`_CHECKPOINTABLE_OBJECT_GRAPH`). The layout follows.

The entries of a TensorFlow tensor bundle: `<prefix>.index` and `<prefix>.data-<i>-of-<n>`.

The index is a sorted string table. Its empty key holds a BundleHeaderProto (1 number of shards, 2 byte order, 0 for
little); every other key is a tensor's name and holds a BundleEntryProto: 1 dtype, 2 shape, 3 shard, 4 offset, 5 size,
6 masked CRC-32C of the bytes, 7 slices of a partitioned variable. Numbers are stored raw; strings as a varint length
each, a CRC-32C of the lengths, and the bytes. Source: tensorflow/core/protobuf/tensor_bundle.proto,
tensorflow/core/framework/types.proto, tensorflow/core/util/tensor_bundle/tensor_bundle.cc.

Sorted string tables of LevelDB, as TensorFlow writes them: the keys and values of a small file.

On disk: blocks, each followed by a compression byte and a masked CRC-32C, and a footer of 48 bytes: the handles
(offset and length as varints) of a meta index and of the index block, padding, and a magic number. A block is a
sequence of entries (bytes shared with the previous key, new bytes, bytes of the value, all varints; then the new bytes
and the value), an array of restart offsets, and their number. Values of the index block are handles of the data blocks.
Source: leveldb's doc/table_format.md; tensorflow/core/lib/io/{format,table_builder}.cc.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from dataclasses import field

from google_crc32c import value as crc32c

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest, Value
from wherry.core.steps import step_number
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.format import Extent, Format, Glimpse, Holds, Opened, RangeChecksum, Signs
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.store.location import Location
from wherry.store.store import Entry

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
    """The shape in a TensorShapeProto; field 2 holds the dimensions (extents in field 1), field 3 an unknown rank."""
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


VERSION = "tensor bundle"
_FINGERPRINT = "fingerprint.pb"


def _detect(glimpse: Glimpse) -> Detection | None:
    index = _index(glimpse.location, glimpse.entries)
    entry = None if index is None else index.entry
    if index is None or entry is None or entry.size < FOOTER:
        return None
    if index.read(entry.size - len(MAGIC), entry.size) != MAGIC:
        return None
    return Detection(
        uri=glimpse.location.uri if glimpse.is_dir else index.uri,
        format="tf-bundle",
        format_version=VERSION,
        writer="TensorFlow",
        step=step_number(index.name.removesuffix(INDEX)),
        kind="params",
        evidence=(Evidence(index.name, "a sorted string table, the index of a tensor bundle"),),
    )


def _only_index(names: Mapping[str, Entry]) -> str | None:
    """The index of the one bundle that a folder consists of."""
    found = [name for name in names if name.endswith(INDEX)]
    if len(found) != 1 or any(entry.is_dir for entry in names.values()):
        return None
    data = found[0].removesuffix(INDEX) + ".data-"
    others = [name for name in names if name not in (found[0], _FINGERPRINT) and not name.startswith(data)]
    return None if others else found[0]


def _index(location: Location, names: Mapping[str, Entry]) -> Location | None:
    """The index for a location that may be a folder, an index, or a prefix."""
    if location.entry is None:
        return Location(location.store, location.path + INDEX)
    if not location.entry.is_dir:
        return location if location.name.endswith(INDEX) else None
    name = _only_index(names)
    return None if name is None else location.join(name)


def _open(location: Location, detection: Detection) -> Opened:
    index = _index(location, {one.name: one for one in location.entries()})
    if index is None:
        raise IncompleteError("index of the tensor bundle not found", uri=location.uri)
    bundle = read_bundle(index)
    manifest = Manifest(tensors=bundle.specs, values=bundle.values, step=detection.step, kind="params")
    seen = Evidence(
        index.name, f"{len(bundle.specs)} tensors in {len(bundle.files)} files, {len(bundle.values)} strings"
    )
    reader = FlatReader(location, bundle.places, (index.present(), *bundle.files.values()))
    return Opened(detection.seen(seen), manifest, reader)


FORMATS = (
    Format(
        name="tf-bundle",
        title="TensorFlow tensor bundle",
        detect=_detect,
        signs=Signs(files=(INDEX,), ends=(INDEX,)),
        open=_open,
        holds=Holds(dtypes=frozenset()),
        aliases=("tf",),
    ),
)
