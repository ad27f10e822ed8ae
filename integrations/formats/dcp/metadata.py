"""The index of a DCP checkpoint: which tensors there are, in which chunks, and which item of which file holds each.

`.metadata` is one pickle of a `Metadata` object and the commit marker; with `use_collectives=False` (torch 2.9) each
rank writes `__<rank>.metadata` instead, and the whole is their union. Attributes: `state_dict_metadata` {name →
TensorStorageMetadata | BytesStorageMetadata}, `storage_data` {MetadataIndex → _StorageInfo}, `planner_data` {name →
nested path} (missing or None where names are already flat), `storage_meta` (2.4), `version` (2.9). The state of
TensorProperties is a tuple of 5, of 6 with strides from torch 2.15. A storage is found by name and chunk offsets;
`index` in MetadataIndex is only a hint. Chunks come in plan order, and those without elements occur.
Source: torch/distributed/checkpoint/metadata.py, default_planner.py, filesystem.py of torch 2.0 to 2.15.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from wherry.errors import CorruptError, UnsupportedError
from wherry.integrations.containers.pickle.opcodes import load
from wherry.integrations.containers.pickle.source import walked
from wherry.integrations.containers.pickle.values import CallRecord, Global
from wherry.integrations.containers.torch.values import DTYPES
from wherry.integrations.formats.dcp.rules import METADATA_RULES, OLD_PROPERTIES, STRIDED

if TYPE_CHECKING:
    from collections.abc import Generator

    from wherry.integrations.containers.pickle.values import PickleSource
    from wherry.storage.location import Location

_OURS = {torch: ours for torch, ours, _ in DTYPES}
_PROPERTIES = (5, 6)
_MAX_RANK = 64
_HELD = 256 << 20  # bytes of a metadata file that are read whole; a larger one is mapped
_INTEGER = frozenset({int})
Offsets: TypeAlias = tuple[int, ...] | None


class Chunk(NamedTuple):
    """A part of a tensor: first element and extents."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredItem(NamedTuple):
    """An item: bytes [offset, offset + length) of a file of the checkpoint, and what was done to them."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor as the metadata has it; `dtype` is our name."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(slots=True)
class DcpIndex:
    """The contents of one or several metadata files.

    Attributes:
        tensors: name → tensor.
        objects: names of the items that are not tensors.
        stored: (name, offsets) → item; offsets None for objects.
        nested: name → nested path, whose integers are list positions.
        writer: the oldest torch that writes such metadata.
    """

    tensors: dict[str, DescribedTensor] = field(default_factory=dict[str, DescribedTensor])
    objects: list[str] = field(default_factory=list[str])
    stored: dict[tuple[str, Offsets], StoredItem] = field(
        default_factory=dict[tuple[str, Offsets], StoredItem]
    )
    nested: dict[str, tuple[str | int, ...]] = field(default_factory=dict[str, tuple[str | int, ...]])
    writer: str = ""


def read_index(locations: list[Location]) -> DcpIndex:
    """Read the metadata of a checkpoint.

    Args:
        locations: `.metadata`, or the metadata of each rank.

    Raises:
        HostileError: a global that is not allowed, or limits of the inert machine.
        UnsupportedError: dtypes, layouts or transforms that are not read.
        CorruptError: it contradicts itself.
    """
    index = DcpIndex()
    for location in locations:
        try:
            _merge(index, load_state(location))
        except (CorruptError, UnsupportedError) as error:
            error.uri = error.uri or location.uri
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _corrupt(f"it contradicts itself: {type(error).__name__} {error}", location.uri) from error
    return index


def load_state(location: Location) -> dict[str, Any]:
    """The attributes of the `Metadata` object of one file, as inert values.

    Raises:
        HostileError: a global that is not allowed, or limits of the inert machine.
        CorruptError: it is not one object of that class.
    """
    with _metadata(location) as data:
        root, end = load(data, replace(METADATA_RULES, opaque=location.opaque), location.uri)
        if end != len(data):
            raise _corrupt(f"{len(data) - end} bytes after the pickle", location.uri)
    return state_of(root, "Metadata")


@contextmanager
def _metadata(location: Location) -> Generator[PickleSource]:
    """The bytes of a metadata file: held where that is little, as held ones are the fastest to interpret."""
    entry = location.stat()
    if entry is None or entry.size <= _HELD:
        yield location.read_whole(_HELD)
    else:
        with walked(location) as data:
            yield data


def _merge(index: DcpIndex, state: dict[str, Any]) -> None:
    traits: set[str] = {"storage_meta"} & set(state)
    if state.get("version") is not None:
        traits.add("version")
    saved = state.get("storage_meta")
    if isinstance(saved, CallRecord) and "modules" in state_of(saved, "StorageMeta"):
        traits.add("modules")
    for name, described in state["state_dict_metadata"].items():
        if described.kind.name == "BytesStorageMetadata":
            index.objects.append(_name(name))
        else:
            _add_tensor(index, _name(name), state_of(described, "TensorStorageMetadata"), traits)
    for key, info in state["storage_data"].items():
        _add_stored(index, state_of(key, "MetadataIndex"), state_of(info, "_StorageInfo"))
    for name, path in (state.get("planner_data") or {}).items():
        index.nested[_name(name)] = _nested(path)
    index.writer = _writer(traits)


def _add_tensor(index: DcpIndex, name: str, state: dict[str, Any], traits: set[str]) -> None:
    dtype = _dtype(state["properties"], traits)
    shape, chunks = _extents(state["size"]), tuple(_chunk(chunk) for chunk in state["chunks"])
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape) or any(
            start + extent > whole for start, extent, whole in zip(*chunk, shape, strict=True)
        ):
            raise _corrupt(f"a chunk of {name!r} at {chunk.offsets} is not inside the tensor")
    known = index.tensors.get(name)
    if known is not None:
        if (known.dtype, known.shape) != (dtype, shape):
            raise _corrupt(f"two ranks describe {name!r} differently")
        chunks = tuple(dict.fromkeys((*known.chunks, *chunks)))
    index.tensors[name] = DescribedTensor(dtype, shape, chunks)


def _chunk(record: Any) -> Chunk:
    state = state_of(record, "ChunkStorageMetadata")
    return Chunk(_extents(state["offsets"]), _extents(state["sizes"]))


def _extents(value: Any) -> tuple[int, ...]:
    """Extents or offsets; checked before anything hashes them, since a nested tuple can take for ever."""
    if type(value) is not tuple or not _INTEGER.issuperset(map(type, value)) or min(value, default=0) < 0:
        raise _corrupt("a size or offset that is no tuple of natural numbers")
    if len(value) > _MAX_RANK:
        raise UnsupportedError(f"{len(value)} dimensions")
    return value


def _dtype(record: Any, traits: set[str]) -> str:
    if not isinstance(record, CallRecord) or record.kind.name != "TensorProperties":
        raise _corrupt("a tensor without properties")
    properties = record.state
    if type(properties) is not tuple or len(properties) not in _PROPERTIES:
        raise UnsupportedError("tensor properties of a form that torch 2.0 to 2.15 do not write")
    if properties[1] != STRIDED:
        raise UnsupportedError("tensors without a strided layout", cure="save them as dense tensors")
    traits.add("old properties" if record.kind.module == OLD_PROPERTIES else "properties")
    if len(properties) == _PROPERTIES[1]:
        traits.add("strides")
    dtype = properties[0]
    if not isinstance(dtype, Global) or dtype.name not in _OURS:
        raise _corrupt("a tensor without a dtype")
    return _OURS[dtype.name]


def _add_stored(index: DcpIndex, key: dict[str, Any], info: dict[str, Any]) -> None:
    name = _name(key["fqn"])
    said = info.get("transform_descriptors")
    transforms = require_known(said, name) if said else ()
    file, offset, length = info["relative_path"], info["offset"], info["length"]
    if type(file) is not str or type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise _corrupt(f"the storage of {name!r} is no file, offset and length")
    place = key.get("offset")
    index.stored[name, None if place is None else _extents(place)] = StoredItem(
        file, offset, length, transforms
    )


def _nested(path: Any) -> tuple[str | int, ...]:
    if type(path) is not tuple or any(type(part) not in (str, int) for part in path):
        raise _corrupt("a nested path of something else than names and positions")
    return path


def _writer(traits: set[str]) -> str:
    """Each release adds something; the newest of these that is there was written by that one or a later one."""
    marks = {"strides": "2.15", "version": "2.9", "modules": "2.7", "storage_meta": "2.4"}
    found = next((since for trait, since in marks.items() if trait in traits), None)
    if found is None and "old properties" in traits:
        return "torch 2.0 to 2.2"
    return f"torch >= {found or '2.3'}"


def _name(name: Any) -> str:
    if type(name) is not str:
        raise _corrupt("a name that is no text")
    return name


def state_of(record: Any, kind: str) -> dict[str, Any]:
    """The attributes of an object of one class.

    Raises:
        CorruptError: it is something else.
    """
    if not isinstance(record, CallRecord) or record.kind.name != kind or type(record.state) is not dict:
        raise _corrupt(f"something else where a {kind} should be")
    return record.state


def _corrupt(what: str, uri: str | None = None) -> CorruptError:
    return CorruptError(f".metadata: {what}", uri=uri, cure="restore .metadata, or take another checkpoint")


_ZSTD, _MAJOR = "stream.zstd", "1"


def require_known(transforms: object, name: str) -> tuple[str, ...]:
    """The transforms of an item, in the order in which they are undone.

    Raises:
        UnsupportedError: one that torch itself does not have.
    """
    found = (
        tuple(str(one) for one in transforms) if isinstance(transforms, (list, tuple)) else (str(transforms),)
    )
    for one in found:
        kind, _, version = one.partition("/")
        if kind != _ZSTD or version.partition(".")[0] != _MAJOR:
            raise UnsupportedError(
                f"items transformed by {one}", path=name, cure="save the checkpoint without that transform"
            )
    return found
