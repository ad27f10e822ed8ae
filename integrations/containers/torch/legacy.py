"""The stream that torch.save wrote before 1.6 (and still does with `_use_new_zipfile_serialization=False`).

The stream has five pickles: a magic number, the protocol 1001, facts about the writing system, the object, and the list
of storage keys. Then follow, for each key in that order, the number of elements (8 bytes, little endian) and the
elements, which torch writes little endian on every machine. Persistent ids have a sixth part: a storage that is a view
of another storage has the key of that storage, with offset and size in elements. All five pickles go through the inert
machine, because any of them can contain a payload. Only the element counts between the storages are read to locate the
tensors. The older tar archive of `storages`, `tensors` and `pickle` is recognised, but not read.
Source: torch/serialization.py (`_legacy_save`, `_legacy_load`) of 0.4 to 2.13, and files that they wrote.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from wherry.core import dtypes
from wherry.errors import CorruptError, NotACheckpointError, UnsupportedError
from wherry.integrations.containers.flat.strides import require_honest_size, specs_of
from wherry.integrations.containers.pickle.opcodes import load
from wherry.integrations.containers.pickle.source import open_for_walk
from wherry.integrations.containers.pickle.values import PickleSource, Rules
from wherry.integrations.containers.torch.archive import Archive, PlacedStorage, place_view
from wherry.integrations.containers.torch.values import RULES, PickleTree, flatten, storage_of

if TYPE_CHECKING:
    from wherry.storage.location import Location

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
    if not placed:
        raise NotACheckpointError(
            "the torch file contains no tensors",
            uri=location.uri,
            cure="pass the file that contains the weights",
        )
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
