"""Reads torch.save archives: their tensors, and the positions of the bytes.

The root folder in the archive can have any name (the file's stem, `archive`, `consolidated`), so the reader searches
for the one member that ends in `/data.pkl`; storages are members `<root>/data/<key>`. `<root>/byteorder` is `little` or
`big`, and `little` where it is missing; `<root>/version` is the container's version. A tensor is a view: several
may share a storage (tied weights, slices), strides may be 0 (expanded) or permuted, so a tensor is stored raw
only if it is contiguous and little endian. `constants.pkl` means TorchScript, whose `data.pkl` needs its code.
Source: torch/serialization.py of 1.6 to 2.15, and the archives that these wrote.

The stream that torch.save wrote before 1.6 (and still does with `_use_new_zipfile_serialization=False`).

The stream has five pickles: a magic number, the protocol 1001, facts about the writing system, the object, and the list
of storage keys. Then follow, for each key in that order, the number of elements (8 bytes, little endian) and the
elements, which torch writes little endian on every machine. Persistent ids have a sixth part: a storage that is a view
of another storage has the key of that storage, with offset and size in elements. All five pickles go through the inert
machine, because any of them can contain a payload. Only the element counts between the storages are read to locate the
tensors. The older tar archive of `storages`, `tensors` and `pickle` is recognised, but not read.
Source: torch/serialization.py (`_legacy_save`, `_legacy_load`) of 0.4 to 2.13, and files that they wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast
from zlib import crc32

from wherry.core import dtypes
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, HostileError, NotACheckpointError, UnsupportedError
from wherry.integrations.containers.flat.strides import PlacedTensor, require_honest_size, specs_of
from wherry.integrations.containers.pickle.machine import load
from wherry.integrations.containers.pickle.values import PickleSource, Rules, open_for_walk
from wherry.integrations.containers.torch.values import RULES, PickleTree, TorchTensor, flatten, storage_of
from wherry.integrations.containers.zip.read import Directory, data_offset, read_directory, read_member
from wherry.store.location import Location

PICKLE = "/data.pkl"
CONSTANTS = "/constants.pkl"
_LARGEST_PICKLE = 1 << 29
_LARGEST_NOTE = 64
_MAX_RANK = 64


@dataclass(frozen=True, slots=True)
class Archive:
    """The contents of an archive.

    Attributes:
        tree: its leaves.
        placed: the position of each tensor.
        specs: each tensor's spec; `shares` in its tags names the first tensor that is the same view.
        version: of the container, from its `version` record; None if it has none.
    """

    tree: PickleTree
    placed: Mapping[KeyPath, PlacedTensor]
    specs: Mapping[KeyPath, TensorSpec]
    version: str | None


class PlacedStorage(NamedTuple):
    """A storage in its file: offset, bytes, CRC-32 (0 if none was recorded) and byte order."""

    start: int
    length: int
    crc: int = 0
    big_endian: bool = False


def place_view(location: Location, path: KeyPath, tensor: TorchTensor, stored: PlacedStorage) -> PlacedTensor:
    """A tensor as a view of a storage with a known position.

    Raises:
        UnsupportedError: it has too many dimensions.
        CorruptError: it reaches beyond the storage.
    """
    if len(tensor.shape) > _MAX_RANK:
        raise UnsupportedError(
            f"{len(tensor.shape)} dimensions exceed the limit of {_MAX_RANK}",
            uri=location.uri,
            path=render(path),
        )
    width = dtypes.bits(tensor.dtype) // 8
    last = tensor.offset + sum((d - 1) * s for d, s in zip(tensor.shape, tensor.strides, strict=True))
    if math.prod(tensor.shape) and (last + 1) * width > stored.length:
        raise CorruptError(
            f"tensor exceeds its storage {tensor.storage.key}: expected at least {(last + 1) * width} bytes, "
            f"got {stored.length}",
            uri=location.uri,
            path=render(path),
            cure="restore the file from a backup or download it again",
        )
    return PlacedTensor(
        location,
        stored.start,
        stored.length,
        tensor.offset,
        tensor.shape,
        tensor.strides,
        tensor.dtype,
        stored.big_endian,
        stored.crc,
    )


def roots(directory: Directory, ending: str = PICKLE) -> list[str]:
    """Names of the folders that hold a member of this name."""
    return [name.removesuffix(ending) for name in directory.members if name.endswith(ending)]


def read_archive(
    location: Location, rules: Rules = RULES, *, opaque: frozenset[str] = frozenset(), bare: bool = False
) -> Archive:
    """Interpret the pickle of an archive and locate the bytes of every tensor.

    Args:
        location: the file.
        rules: what the pickle may contain.
        opaque: names of classes whose objects become opaque values, besides those of the location.
        bare: whether it may hold no tensor.

    Raises:
        NotACheckpointError: it is not a torch archive, or holds no tensor.
        UnsupportedError: it is TorchScript, or holds whole modules or unsupported kinds of tensors.
        HostileError: it has a forbidden global, hidden members, or impossible sizes.
        CorruptError: it is truncated or invalid.
    """
    place = replace(location, opaque=location.opaque | opaque)
    archive = read_object(place, read_directory(place), {}, rules)
    if not bare:
        _require_tensors(archive.placed, location)
    require_honest_size(archive.placed, location)
    return archive


def _require_tensors(placed: Mapping[KeyPath, PlacedTensor], location: Location) -> None:
    if not placed:
        raise NotACheckpointError(
            "the torch file contains no tensors",
            uri=location.uri,
            cure="pass the file that contains the weights",
        )


def read_object(
    location: Location, directory: Directory, known: dict[bytes, PickleTree], rules: Rules = RULES
) -> Archive:
    """Interpret the pickle of an archive that may hold no tensor and may begin anywhere in its file.

    Args:
        location: the file.
        directory: the archive's members.
        known: the trees of earlier pickles, by the bytes of these; the new tree is added.
        rules: what the pickle may contain.

    Raises:
        NotACheckpointError, UnsupportedError, HostileError, CorruptError: as `read_archive`.
    """
    root = _root(directory, location)
    member = directory.members[root + PICKLE]
    data = read_member(location, member, _LARGEST_PICKLE)
    if member.crc and crc32(data) != member.crc:
        raise CorruptError(
            f"checksum mismatch in {member.name}: expected CRC-32 {member.crc:#010x}, got {crc32(data):#010x}",
            uri=location.uri,
            cure="restore the file from a backup or download it again",
        )
    tree = known.get(data)
    if tree is None:
        tree = known[data] = _tree(data, location, rules)
    placer = _Placer(location, directory, root)
    placed = {path: placer.place(path, tensor) for path, tensor in tree.tensors.items()}
    return Archive(tree, placed, specs_of(placed), _note(directory, f"{root}/version", location))


def _tree(data: bytes, location: Location, rules: Rules) -> PickleTree:
    value, end = load(data, replace(rules, opaque=location.opaque), location.uri)
    if end != len(data):
        raise CorruptError(
            f"{len(data) - end} trailing bytes after the pickle",
            uri=location.uri,
            cure="restore the file from a backup or download it again",
        )
    return flatten(value, len(data), location.uri)


def _root(directory: Directory, location: Location) -> str:
    if roots(directory, CONSTANTS):
        raise UnsupportedError(
            "unsupported TorchScript archive: only its code can locate the tensors",
            uri=location.uri,
            cure="load it with torch.jit.load and save its state_dict()",
        )
    found = roots(directory)
    if not found:
        raise NotACheckpointError(
            f"the zip archive is not a torch archive: no member ends in {PICKLE}", uri=location.uri
        )
    if len(found) > 1:
        raise HostileError(
            f"the torch archive has {len(found)} pickles; expected one",
            uri=location.uri,
            cure="do not use this file",
        )
    return found[0]


def _note(directory: Directory, name: str, location: Location) -> str | None:
    member = directory.members.get(name)
    if member is None:
        return None
    return read_member(location, member, _LARGEST_NOTE).decode("ascii", "replace").strip()


class _Placer:
    """Locates the tensors of one archive; each storage is located once."""

    def __init__(self, location: Location, directory: Directory, root: str) -> None:
        self._location = location
        self._directory = directory
        self._root = root
        self._starts: dict[str, int] = {}
        order = _note(directory, f"{root}/byteorder", location) or "little"
        if order not in ("little", "big"):
            raise CorruptError(
                f"invalid byte order {order!r}; expected little or big",
                uri=location.uri,
                cure="restore the file from a backup or download it again",
            )
        self._big = order == "big"

    def place(self, path: KeyPath, tensor: TorchTensor) -> PlacedTensor:
        storage = tensor.storage
        name = f"{self._root}/data/{storage.key}"
        member = self._directory.members.get(name)
        size = storage.elements * (dtypes.bits(storage.dtype) // 8 if storage.dtype else 1)
        if member is None or member.size != size:
            seen = f"expected {size} bytes, got {member.size}" if member else "not found in the archive"
            raise CorruptError(
                f"zip member {name}: {seen}",
                uri=self._location.uri,
                path=render(path),
                cure="restore the file from a backup or download it again",
            )
        if name not in self._starts:
            start = data_offset(self._location, member)
            if start + size > self._directory.start:
                raise CorruptError(
                    f"zip member {name} overlaps the central directory",
                    uri=self._location.uri,
                    cure="restore the file from a backup or download it again",
                )
            self._starts[name] = start
        stored = PlacedStorage(self._starts[name], size, member.crc, self._big)
        return place_view(self._location, path, tensor, stored)


MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
# Every such file begins with PROTO 2 (any protocol) and a LONG1 of ten bytes.
MAGIC_OPCODES = b"\x8a\x0a" + MAGIC_NUMBER.to_bytes(10, "little") + b"."
_PLAIN = Rules(allowed={})
_COUNT = 8


def is_legacy(head: bytes) -> bool:
    """Whether a file begins like a legacy stream, in pickle protocol 2 or later."""
    start = head.find(MAGIC_OPCODES, 2, 40)  # protocol 4 has a frame before it
    return head[:1] == b"\x80" and start >= 0


def is_tar(head: bytes) -> bool:
    """Whether a file begins like a tar archive of torch 0.1."""
    return head[257:262] == b"ustar" and head[:100].rstrip(b"\0") in (
        *(b"sys_info", b"pickle", b"storages", b"tensors", b"./storages", b"./tensors", b"./pickle"),
    )


def read_legacy(location: Location) -> Archive:
    """Interpret the five pickles and locate the bytes of every tensor.

    Raises:
        NotACheckpointError: it holds no tensor.
        UnsupportedError: it has unsupported kinds of tensors or objects, or a big-endian writer.
        HostileError: a pickle has a forbidden global, or sizes are impossible.
        CorruptError: it is truncated or invalid.
    """
    with open_for_walk(location) as data:
        seen = _StorageIds(location)
        tree, keys, end = _pickles(data, seen, location)
        stored = _storages(data, end, keys, seen.said, location)
    placed = {
        path: place_view(location, path, tensor, stored[tensor.storage.key])
        for path, tensor in tree.tensors.items()
    }
    _require_tensors(placed, location)
    require_honest_size(placed, location)
    return Archive(tree, placed, specs_of(placed), None)


def _pickles(data: PickleSource, seen: _StorageIds, location: Location) -> tuple[PickleTree, list[str], int]:
    uri, plain = location.uri, replace(_PLAIN, opaque=location.opaque)
    magic, end = load(data, plain, uri)
    protocol, end = load(data, plain, uri, end)
    if magic != MAGIC_NUMBER or protocol != PROTOCOL:
        raise UnsupportedError(f"unsupported torch stream protocol {protocol!r:.40}", uri=uri)
    system, start = load(data, plain, uri, end)
    if not isinstance(system, dict):
        raise _corrupt("invalid third pickle: expected a dict that describes the writing system", location)
    if cast("dict[str, Any]", system).get("little_endian") is not True:
        raise UnsupportedError(
            "unsupported legacy torch file of a big-endian machine",
            uri=uri,
            cure="load it on that machine and save it with torch 1.6 or later",
        )
    root, end = load(data, replace(RULES, persistent=seen, opaque=location.opaque), uri, start)
    keys, after = load(data, plain, uri, end)
    if type(keys) is not list or any(type(key) is not str for key in keys) or len(set(keys)) != len(keys):
        raise _corrupt("invalid fifth pickle: expected a list of distinct storage keys", location)
    return flatten(root, end - start, uri), keys, after


class _StorageIds:
    """Resolves persistent ids, and records the type and size of each storage."""

    def __init__(self, location: Location) -> None:
        self.said: dict[str, tuple[int, int]] = {}  # key → bytes of one element, elements
        self._location = location

    def __call__(self, persistent: Any) -> Any:
        if type(persistent) is tuple and persistent[:1] == ("module",):
            raise UnsupportedError(
                "unsupported pickled module with its source code; expected a state dict",
                uri=self._location.uri,
                cure="load it where its code is installed and save model.state_dict()",
            )
        storage = storage_of(persistent)
        facts = (dtypes.bits(storage.dtype) // 8 if storage.dtype else 1, storage.elements)
        if self.said.setdefault(storage.key, facts) != facts:
            raise _corrupt(f"conflicting types or sizes of storage {storage.key}", self._location)
        return storage


def _storages(
    data: PickleSource, position: int, keys: list[str], said: dict[str, tuple[int, int]], location: Location
) -> dict[str, PlacedStorage]:
    found: dict[str, PlacedStorage] = {}
    for key in keys:
        if key not in said:
            raise _corrupt(f"storage {key} belongs to no tensor, so its size is unknown", location)
        width, elements = said[key]
        start = position + _COUNT
        count = int.from_bytes(data[position:start], "little", signed=True)
        position = start + elements * width
        if start > len(data) or count != elements or position > len(data):
            raise _corrupt(
                f"invalid storage {key} at byte {start} of {len(data)}: expected {elements} elements, got {count}",
                location,
            )
        found[key] = PlacedStorage(start, elements * width)
    if set(said) - set(found):
        raise _corrupt(
            f"storage {min(set(said) - set(found))} missing from the list of storage keys", location
        )
    if position != len(data):
        raise _corrupt(f"{len(data) - position} trailing bytes after the last storage", location)
    return found


def _corrupt(what: str, location: Location) -> CorruptError:
    return CorruptError(what, uri=location.uri, cure="restore the file from a backup or download it again")
