"""The index of a DCP checkpoint: its tensors and their chunks, and the item and file of each chunk.

`.metadata` is one pickle of a `Metadata` object and the commit member; with `use_collectives=False` (torch 2.9) each
rank writes `__<rank>.metadata` instead, and the index is their union. Attributes: `state_dict_metadata` {name →
TensorStorageMetadata | BytesStorageMetadata}, `storage_data` {MetadataIndex → _StorageInfo}, `planner_data` {name →
nested path} (missing or None if names are already flat), `storage_meta` (2.4), `version` (2.9). The state of
TensorProperties is a tuple of 5, of 6 with strides from torch 2.15. A storage is looked up by name and chunk offsets;
`index` in MetadataIndex is only a hint. Chunks are in plan order, and may have no elements.
Source: torch/distributed/checkpoint/metadata.py, default_planner.py, filesystem.py of torch 2.0 to 2.15.

The allow-list for a DCP `.metadata` pickle: exactly the globals that torch 2.0 to 2.15 and OLMo-core write.

`TensorProperties` and its memory-format enum were in the sharded-tensor package until torch 2.2, and can be written
under either name. A path of the writer's machine (`checkpoint_id`) is pickled as a `pathlib` object, which Python 3.13
names `pathlib._local`. Layouts other than strided, and all other globals, are refused by name.
Source: torch/distributed/checkpoint/{metadata,filesystem}.py of these releases, and the globals of each one's output.

Checks on the chunks of a tensor: whether they cover it, and whether they follow each other in C order.

Row sharding (FSDP) is the common case and takes one sorted walk. Any other division is checked on the grid of all chunk
boundaries, which is small for real shardings; a division with too large a grid is refused. Tensors that are written are
cut into rows, too.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from typing import Any, NamedTuple, TypeAlias

from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region
from wherry.errors import CorruptError, UnsupportedError
from wherry.integrations.containers.pickle.machine import load
from wherry.integrations.containers.pickle.values import (
    CallRecord,
    Global,
    Maker,
    PickleSource,
    Rules,
    dict_of,
    open_for_walk,
)
from wherry.integrations.containers.torch.values import DTYPES, RULES
from wherry.store.location import Location

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
FILESYSTEM_MODULE = "torch.distributed.checkpoint.filesystem"
OLMO_CORE = "olmo_core.distributed.checkpoint.filesystem"  # its writer's own class: path, offset and length, as torch's
PLANNER = "torch.distributed.checkpoint.planner"  # plans that Megatron-Core keeps for its next save
OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
STRIDED = "torch.strided"
_INTEGER = frozenset({int})
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


def _size(args: tuple[Any, ...]) -> tuple[int, ...]:
    (extents,) = args
    if (
        type(extents) not in (tuple, list)
        or not _INTEGER.issuperset(map(type, extents))
        or min(extents, default=0) < 0
    ):
        raise CorruptError(
            "invalid torch.Size: expected a tuple of non-negative integers",
            cure="restore .metadata from a backup",
        )
    return tuple(extents)


def _layout_of(args: tuple[Any, ...]) -> str:
    if args != (STRIDED,):
        raise UnsupportedError(f"unsupported tensor layout {args[0]}", cure="save it as a dense tensor")
    return STRIDED


def _path(args: tuple[Any, ...]) -> str:
    return "/".join(str(part) for part in args)


_RECORDS = (
    *((METADATA_MODULE, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((METADATA_MODULE, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    *((METADATA_MODULE, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    (OLD_PROPERTIES, "TensorProperties"),
    (OLD_PROPERTIES, "MEM_FORMAT_ENCODING"),
    (FILESYSTEM_MODULE, "_StorageInfo"),
    (OLMO_CORE, "_StorageInfo"),
    *((PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
)
_MAKERS: dict[tuple[str, str], Maker | None] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout_of,
    ("collections", "OrderedDict"): dict_of,
    **{(module, name): _path for module in ("pathlib", "pathlib._local") for name in _PATHS},
}
# Source: torch.distributed.checkpoint.metadata and planner (torch 2.13).
_FORMATS = {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2}
# The attributes of objects of which an index has one for each tensor.
ATTRIBUTES = {
    Global(METADATA_MODULE, "TensorStorageMetadata"): ["chunks", "properties", "size"],
    Global(METADATA_MODULE, "MetadataIndex"): ["fqn", "index", "offset"],
    Global(FILESYSTEM_MODULE, "_StorageInfo"): ["length", "offset", "relative_path"],
}
METADATA_RULES = Rules(
    members={
        (METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _FORMATS,
        (OLD_PROPERTIES, "MEM_FORMAT_ENCODING"): _FORMATS,
        (PLANNER, "WriteItemType"): {"TENSOR": 1, "SHARD": 2, "BYTE_IO": 3},
    },
    allowed={
        **dict.fromkeys(_RECORDS),
        **{("torch", torch): None for torch, _, _ in DTYPES},
        **_MAKERS,
    },
    refusal=RULES.refusal,
)


_OURS = {torch: ours for torch, ours, _ in DTYPES}
_PROPERTIES = (5, 6)
_MAX_RANK = 64
_HELD = 256 << 20  # bytes of a metadata file that are read whole; a larger one is mapped
_PARTS = frozenset({str, int})  # types of the parts of a nested path
Offsets: TypeAlias = tuple[int, ...] | None


class Chunk(NamedTuple):
    """A part of a tensor: offsets and extents."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredItem(NamedTuple):
    """An item: bytes [offset, offset + length) of a file of the checkpoint, and their transforms."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class StoredItems:
    """Where chunks and objects lie, as columns: a large checkpoint has a hundred thousand."""

    __slots__ = ("_files", "_lengths", "_names", "_numbers", "_offsets", "_ranks", "_rows", "_transforms")

    def __init__(self) -> None:
        # By the name alone of a chunk that is the first of its tensor, as nearly all are.
        self._rows: dict[str | tuple[str, Offsets], int] = {}
        self._numbers, self._ranks = array("L"), array("B")
        self._offsets, self._lengths = array("Q"), array("Q")
        self._files: dict[str, int] = {}
        self._names: list[str] = []
        self._transforms: dict[int, tuple[str, ...]] = {}

    def put(self, name: str, offsets: Offsets, item: StoredItem) -> None:
        """Set the place of a chunk, or of an object if offsets are None.

        Raises:
            CorruptError: a chunk with these offsets is known that has another number of axes.
        """
        file, offset, length, transforms = item
        row, rank = len(self._numbers), len(offsets or ())
        before = self._rows.setdefault(key := _item_key(name, offsets), row)
        if before != row:
            if self._ranks[before] != rank:
                raise _corrupt(f"two chunks of {name!r} have a different number of axes")
            self._rows[key] = row
            self._offsets[before] = self._lengths[before] = 0
        number = self._files.setdefault(file, len(self._files))
        if number == len(self._names):
            self._names.append(file)
        self._numbers.append(number)
        self._ranks.append(rank)
        self._offsets.append(offset)
        self._lengths.append(length)
        if transforms:
            self._transforms[row] = transforms

    def get(self, name: str, offsets: Offsets) -> StoredItem | None:
        """The place of a chunk, or of an object; None if none is recorded."""
        row = self._rows.get(_item_key(name, offsets))
        return None if row is None or self._ranks[row] != len(offsets or ()) else self._item(row)

    def coded(self) -> set[str]:
        """The names of tensors and objects with an item that is transformed."""
        if not self._transforms:
            return set()
        return {name for name, _offsets, item in self.items() if item.transforms}

    def ends(self) -> dict[str, int]:
        """Each file in which something is, with the offset after the last item of it."""
        found = [0] * len(self._names)
        for number, offset, length in zip(self._numbers, self._offsets, self._lengths, strict=True):
            found[number] = max(found[number], offset + length)
        return {name: end for name, end in zip(self._names, found, strict=True) if end}

    def nbytes(self, ratio: int) -> int:
        """Bytes of all items; those of transformed ones count as many times as the ratio."""
        return sum(self._lengths) + (ratio - 1) * sum(self._lengths[row] for row in self._transforms)

    def items(self) -> Iterator[tuple[str, Offsets, StoredItem]]:
        """The name of each tensor or object, with the offsets of each of its chunks and the place of that."""
        for key, row in self._rows.items():
            name, offsets = (key, (0,) * self._ranks[row]) if isinstance(key, str) else key
            yield name, offsets, self._item(row)

    def _item(self, row: int) -> StoredItem:
        file, transforms = self._names[self._numbers[row]], self._transforms.get(row, ())
        return StoredItem(file, self._offsets[row], self._lengths[row], transforms)


def _item_key(name: str, offsets: Offsets) -> str | tuple[str, Offsets]:
    return (name, offsets) if offsets is None or any(offsets) else name


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor as described by the metadata; `dtype` is wherry's name."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(slots=True)
class DcpIndex:
    """The contents of one or several metadata files.

    Attributes:
        tensors: name → tensor.
        objects: names of the items that are not tensors.
        stored: the item of each chunk and object.
        nested: name → nested path, whose integers are list positions, where it is another one than the name.
        writer: the oldest torch that writes such metadata.
    """

    tensors: dict[str, DescribedTensor] = field(default_factory=dict[str, DescribedTensor])
    objects: list[str] = field(default_factory=list[str])
    stored: StoredItems = field(default_factory=StoredItems)
    nested: dict[str, tuple[str | int, ...]] = field(default_factory=dict[str, tuple[str | int, ...]])
    writer: str = ""


def read_index(locations: list[Location]) -> DcpIndex:
    """Read the metadata of a checkpoint.

    Args:
        locations: `.metadata`, or the metadata of each rank.

    Raises:
        HostileError: a global that is not allowed, or limits of the inert machine.
        UnsupportedError: unsupported dtypes, layouts or transforms.
        CorruptError: the metadata is inconsistent.
    """
    index = DcpIndex()
    for location in locations:
        try:
            _merge(index, load_state(location, ATTRIBUTES))
        except (CorruptError, UnsupportedError) as error:
            error.uri = error.uri or location.uri
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _corrupt(f"{type(error).__name__} {error}", location.uri) from error
    return index


def load_state(location: Location, attributes: Mapping[Global, list[str]] | None = None) -> dict[str, Any]:
    """The attributes of the `Metadata` object of one file, as inert values.

    Args:
        location: the file.
        attributes: classes whose objects may have the tuple of these attributes as their state; see Rules.

    Raises:
        HostileError: a global that is not allowed, or limits of the inert machine.
        CorruptError: the file is not a single object of that class.
    """
    with _metadata(location) as data:
        root, end = load(
            data, replace(METADATA_RULES, attributes=attributes or {}, opaque=location.opaque), location.uri
        )
        if end != len(data):
            raise _corrupt(f"{len(data) - end} extra bytes after the pickle", location.uri)
    return state_of(root, "Metadata")


@contextmanager
def _metadata(location: Location) -> Generator[PickleSource]:
    """The bytes of a metadata file: in memory if it is small, which is fastest to interpret, else mapped."""
    entry = location.stat()
    if entry is None or entry.size <= _HELD:
        yield location.read_whole(_HELD)
    else:
        with open_for_walk(location) as data:
            yield data


def _merge(index: DcpIndex, state: dict[str, Any]) -> None:
    traits: set[str] = {"storage_meta"} & set(state)
    if state.get("version") is not None:
        traits.add("version")
    saved = state.get("storage_meta")
    if isinstance(saved, CallRecord) and "modules" in state_of(saved, "StorageMeta"):
        traits.add("modules")
    for name, path in (state.pop("planner_data", None) or {}).items():
        if type(path) is not tuple or not _PARTS.issuperset(map(type, path)):
            raise _corrupt("expected a nested path of names and positions")
        if path != (name,):
            index.nested[_name(name)] = path
    _merge_storage(index, state.pop("storage_data"))
    # What describes tensors that are alike is often one object; so is then what becomes of it.
    known: dict[tuple[int, ...], DescribedTensor] = {}
    for name, described in state["state_dict_metadata"].items():
        kind = described.kind
        if kind.name == "BytesStorageMetadata":
            index.objects.append(_name(name))
            continue
        if (
            isinstance(described, CallRecord)
            and kind.name == "TensorStorageMetadata"
            and type(described.state) is tuple
        ):
            chunks, properties, size = described.state
        else:
            said = state_of(described, "TensorStorageMetadata")
            chunks, properties, size = (said[attribute] for attribute in ATTRIBUTES[kind])
        same = (id(properties), id(size), *map(id, chunks))
        if same not in known or name in index.tensors:
            known[same] = _add_tensor(index, _name(name), chunks, properties, size, traits)
        else:
            index.tensors[_name(name)] = known[same]
    index.writer = _writer(traits)


def _merge_storage(index: DcpIndex, storage: dict[Any, Any]) -> None:
    """Take over where chunks lie; of very many chunks what was read is freed meanwhile."""
    offsets: dict[int, Offsets] = {}  # by the identity of the record, which is one for many chunks
    for key in list(storage):
        index.stored.put(*_stored_item(key, storage.pop(key), offsets))


def _add_tensor(
    index: DcpIndex, name: str, records: Any, properties: Any, size: Any, traits: set[str]
) -> DescribedTensor:
    dtype = _dtype(properties, traits)
    shape = _extents(size)
    states = (state_of(record, "ChunkStorageMetadata") for record in records)
    chunks = tuple([Chunk(_extents(state["offsets"]), _extents(state["sizes"])) for state in states])
    for chunk in chunks:
        if chunk.sizes == shape and not any(chunk.offsets) and len(chunk.offsets) == len(shape):
            continue  # the whole tensor, as almost always
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape) or any(
            start + extent > whole for start, extent, whole in zip(*chunk, shape, strict=True)
        ):
            raise _corrupt(f"chunk of {name!r} at {chunk.offsets} exceeds the tensor")
    known = index.tensors.get(name)
    if known is not None:
        if (known.dtype, known.shape) != (dtype, shape):
            raise _corrupt(f"conflicting descriptions of {name!r} by two ranks")
        chunks = tuple(dict.fromkeys((*known.chunks, *chunks)))
    described = index.tensors[name] = DescribedTensor(dtype, shape, chunks)
    return described


def _extents(value: Any) -> tuple[int, ...]:
    """Extents or offsets; checked before they are hashed, since hashing a nested tuple can take forever."""
    if type(value) is not tuple or not _INTEGER.issuperset(map(type, value)) or min(value, default=0) < 0:
        raise _corrupt("expected a size or offset as a tuple of non-negative integers")
    if len(value) > _MAX_RANK:
        raise UnsupportedError(f"unsupported tensor of {len(value)} dimensions")
    return value


def _dtype(record: Any, traits: set[str]) -> str:
    if not isinstance(record, CallRecord) or record.kind.name != "TensorProperties":
        raise _corrupt("missing properties of a tensor")
    properties = record.state
    if type(properties) is not tuple or len(properties) not in _PROPERTIES:
        raise UnsupportedError("unsupported form of TensorProperties: not written by torch 2.0 to 2.15")
    if properties[1] != STRIDED:
        raise UnsupportedError("unsupported tensor layout: not strided", cure="save it as a dense tensor")
    traits.add("old properties" if record.kind.module == OLD_PROPERTIES else "properties")
    if len(properties) == _PROPERTIES[1]:
        traits.add("strides")
    dtype = properties[0]
    if not isinstance(dtype, Global) or dtype.name not in _OURS:
        raise _corrupt("missing dtype of a tensor")
    return _OURS[dtype.name]


def _stored_item(key: Any, info: Any, offsets: dict[int, Offsets]) -> tuple[str, Offsets, StoredItem]:
    """The name and offsets of a chunk, or the name of an object, and where it is."""
    if type(key) is CallRecord and key.kind.name == "MetadataIndex" and type(key.state) is tuple:
        name, _number, place = key.state
    else:
        said = state_of(key, "MetadataIndex")
        name, place = said["fqn"], said.get("offset")
    transforms = ()
    if type(info) is CallRecord and info.kind.name == "_StorageInfo" and type(info.state) is tuple:
        length, offset, file = info.state
    else:
        said = state_of(info, "_StorageInfo")
        length, offset, file = said["length"], said["offset"], said["relative_path"]
        if said.get("transform_descriptors"):
            transforms = require_known(said["transform_descriptors"], _name(name))
    if type(file) is not str or type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise _corrupt(f"expected file, offset and length as the storage of {name!r}")
    if id(place) not in offsets:
        offsets[id(place)] = None if place is None else _extents(place)
    return _name(name), offsets[id(place)], StoredItem(file, offset, length, transforms)


def _writer(traits: set[str]) -> str:
    """The oldest torch that writes these traits: each release adds some, so the newest trait decides."""
    marks = {"strides": "2.15", "version": "2.9", "modules": "2.7", "storage_meta": "2.4"}
    found = next((since for trait, since in marks.items() if trait in traits), None)
    if found is None and "old properties" in traits:
        return "torch 2.0 to 2.2"
    return f"torch >= {found or '2.3'}"


def _name(name: Any) -> str:
    if type(name) is not str:
        raise _corrupt("expected a name as text")
    return name


def state_of(record: Any, kind: str) -> dict[str, Any]:
    """The attributes of an object of a given class.

    Raises:
        CorruptError: the object is of another class.
    """
    if not isinstance(record, CallRecord) or record.kind.name != kind or type(record.state) is not dict:
        raise _corrupt(f"expected an object of class {kind}")
    return record.state


def _corrupt(what: str, uri: str | None = None) -> CorruptError:
    return CorruptError(
        f"invalid .metadata: {what}",
        uri=uri,
        cure="restore .metadata from a backup, or use another checkpoint",
    )


_ZSTD, _MAJOR = "stream.zstd", "1"


def require_known(transforms: object, name: str) -> tuple[str, ...]:
    """The transforms of an item, in the order of decoding.

    Raises:
        UnsupportedError: a transform that torch itself does not have.
    """
    found = (
        tuple(str(one) for one in transforms) if isinstance(transforms, (list, tuple)) else (str(transforms),)
    )
    for one in found:
        kind, _, version = one.partition("/")
        if kind != _ZSTD or version.partition(".")[0] != _MAJOR:
            raise UnsupportedError(
                f"unsupported item transform {one}",
                path=name,
                cure="save the checkpoint without that transform",
            )
    return found


_MOST_CELLS = 1_000_000


def cut_rows(shape: tuple[int, ...], width: int, most: int) -> Iterator[Chunk]:
    """Cut a tensor into chunks which, one after the other, are its bytes: ranks that shard its rows save such chunks.

    Args:
        shape: shape of the tensor.
        width: bytes of an element.
        most: bytes of a chunk; a row that is larger is cut along the next axis.

    Returns:
        The chunks; those of one axis have the same number of rows, except for the last one.
    """
    if math.prod(shape) * width <= most or not shape:
        yield Chunk((0,) * len(shape), shape)
        return
    rows = most // (math.prod(shape[1:]) * width)
    if not rows:
        for index in range(shape[0]):
            for inner in cut_rows(shape[1:], width, most):
                yield Chunk((index, *inner.offsets), (1, *inner.sizes))
        return
    each = -(-shape[0] // -(-shape[0] // rows))  # the fewest chunks, of nearly the same size
    for start in range(0, shape[0], each):
        rest = (0,) * (len(shape) - 1)
        yield Chunk((start, *rest), (min(each, shape[0] - start), *shape[1:]))


def with_elements(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks that have elements, in the order of their offsets."""
    return sorted(chunk for chunk in chunks if 0 not in chunk.sizes)


def region_of(chunk: Chunk) -> Region:
    """A chunk as a region of its tensor."""
    return tuple(
        slice(start, start + extent) for start, extent in zip(chunk.offsets, chunk.sizes, strict=True)
    )


def grid_of(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> tuple[int, ...] | None:
    """Extents of a cell if the chunks are the cells of a regular grid; else None."""
    if not chunks or not shape:
        return None
    cell = chunks[0].sizes
    for chunk in chunks:
        whole = tuple(
            min(step, extent - start) for step, extent, start in zip(cell, shape, chunk.offsets, strict=True)
        )
        if whole != chunk.sizes or any(start % step for start, step in zip(chunk.offsets, cell, strict=True)):
            return None
    return cell


def in_order(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether sorted chunks, one after the other, are the tensor in C order."""
    position = 0
    for chunk in chunks:
        lead = next((axis for axis, extent in enumerate(chunk.sizes) if extent != 1), len(shape))
        if chunk.sizes[lead + 1 :] != shape[lead + 1 :]:
            return False  # not contiguous
        first = 0
        for extent, start in zip(shape, chunk.offsets, strict=True):
            first = first * extent + start
        if first != position:
            return False
        position += math.prod(chunk.sizes)
    return position == math.prod(shape)


def uncovered_regions(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> Iterator[Region]:
    """Regions of a tensor that no chunk covers.

    Args:
        shape: shape of the tensor.
        chunks: its chunks with elements, sorted.

    Raises:
        CorruptError: two chunks overlap.
        UnsupportedError: the division is too irregular.
    """
    if 0 in shape or in_order(shape, chunks):
        return
    import numpy as np

    bounds = [
        sorted(
            {0, extent}
            | {chunk.offsets[axis] for chunk in chunks}
            | {chunk.offsets[axis] + chunk.sizes[axis] for chunk in chunks}
        )
        for axis, extent in enumerate(shape)
    ]
    cells = math.prod(len(marks) - 1 for marks in bounds)
    if cells > _MOST_CELLS:
        raise UnsupportedError(
            f"unsupported sharding: {len(chunks)} irregular chunks with {cells} grid cells"
        )
    seen = np.zeros([len(marks) - 1 for marks in bounds], dtype=bool)
    at = [{mark: index for index, mark in enumerate(marks)} for marks in bounds]
    for chunk in chunks:
        cell = tuple(
            slice(marks[part.start], marks[part.stop])
            for marks, part in zip(at, region_of(chunk), strict=True)
        )
        if seen[cell].any():
            raise CorruptError(
                f"two chunks overlap at {chunk.offsets}", cure="restore .metadata from a backup"
            )
        seen[cell] = True
    for index in np.argwhere(~seen):
        yield tuple(slice(marks[place], marks[place + 1]) for marks, place in zip(bounds, index, strict=True))
