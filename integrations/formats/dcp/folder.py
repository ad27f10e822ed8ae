"""Opens a DCP folder: index, files, and the objects that are not tensors.

Only `relative_path` in the metadata says which files belong to the checkpoint: a stale `__7_0.distcp` of an older,
wider save may lie beside them. Every item must lie inside its file; a file that is not there makes its chunks absent,
but the rest can be read. Objects (`BytesStorageMetadata`: step, optimizer groups) are small pickles, which are
interpreted by the inert machine and become values and empties below their name, or tensors where they hold some.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, HostileError, IncompleteError
from wherry.integrations.containers.torch.values import PickleTree
from wherry.integrations.formats.dcp.chunks import grid_of, with_elements
from wherry.integrations.formats.dcp.items import Items
from wherry.integrations.formats.dcp.metadata import DcpIndex, read_index
from wherry.integrations.formats.huggingface.weights import is_weights
from wherry.runtime.threads import uncollected
from wherry.storage.sidecar import OWN_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Value
    from wherry.integrations.containers.flat.strides import PlacedTensor
    from wherry.storage.stores import Entry, Location

METADATA = ".metadata"
SUFFIX = ".distcp"
_OF_RANK = re.compile(r"__\d+\.metadata")
_EXPANSION = 64  # expanded tensors are written out in full by torch; metadata that claims more is made up
_RATIO = 1 << 10  # what zstd makes of zeros is this times smaller again
_FREE_BYTES = 1 << 20
_DEEPEST = 3  # folders with companion files in each other
_ARRAY_MARKS = (".zarray", "zarr.json", "manifest.ocdbt")  # of arrays that another system wrote beside


@dataclass(slots=True)
class DcpContents:
    """What a checkpoint holds; see `Manifest` for the fields of that name.

    Attributes:
        index: its metadata.
        items: the way to its items.
        inner: tensors that lie inside objects.
        notes: classes and keys that key paths do not tell; its other fields are empty.
        files: metadata and data files.
        companions: other files beside them.
    """

    index: DcpIndex
    items: Items
    files: tuple[Entry, ...]
    companions: tuple[Entry, ...]
    tensors: dict[KeyPath, TensorSpec] = field(default_factory=dict["KeyPath", TensorSpec])
    values: dict[KeyPath, Value] = field(default_factory=dict["KeyPath", "Value"])
    empties: dict[KeyPath, str] = field(default_factory=dict["KeyPath", str])
    lists: set[KeyPath] = field(default_factory=set["KeyPath"])
    inner: dict[KeyPath, PlacedTensor] = field(default_factory=dict["KeyPath", "PlacedTensor"])
    notes: PickleTree = field(default_factory=PickleTree)


def metadata_names(names: Mapping[str, Entry]) -> list[str]:
    """The metadata files of a folder: the one of all ranks, or else one of each rank; empty where none is."""
    if METADATA in names and not names[METADATA].is_dir:
        return [METADATA]
    return sorted(name for name in names if _OF_RANK.fullmatch(name))


def read_contents(location: Location) -> DcpContents:
    """Read the metadata and the objects of a folder.

    Raises:
        IncompleteError: it was never committed.
        HostileError: a global that is not allowed, a file outside the folder, sizes that no file has.
        CorruptError: an item is not inside its file, or something contradicts itself.
        UnsupportedError: a form that is not read.
    """
    names = {entry.name: entry for entry in location.entries()}
    marks = metadata_names(names)
    if not marks:
        raise IncompleteError(
            "no .metadata: the save was never committed",
            uri=location.uri,
            cure="take another checkpoint; data files without .metadata do not say what they hold",
        )
    with uncollected():
        index = read_index([location.join(name) for name in marks])
        return _contents(location, index, names, marks)


def _contents(
    location: Location, index: DcpIndex, names: Mapping[str, Entry], marks: list[str]
) -> DcpContents:
    files = _files(index, location, names)
    _require_inside(index, files, location)
    own = (*(names[name] for name in marks), *files.values())
    companions = tuple(_companions(location, names, set(files) | set(marks)))
    contents = DcpContents(index, Items(location, files), own, companions)
    for name, described in index.tensors.items():
        grid = _grid(index, name)
        contents.tensors[name,] = TensorSpec((name,), described.shape, described.dtype, chunks=grid)
    for name in index.objects:
        _read_object(contents, name)
    return contents


def _grid(index: DcpIndex, name: str) -> tuple[int, ...] | None:
    """The chunk grid of a tensor whose chunks must be decoded; None where regions are read as they lie."""
    described = index.tensors[name]
    stored = index.stored.get((name, described.chunks[0].offsets)) if described.chunks else None
    if stored is None or not stored.transforms:
        return None
    return grid_of(described.shape, with_elements(described.chunks))


def _files(index: DcpIndex, location: Location, names: Mapping[str, Entry]) -> dict[str, Entry]:
    """The data files that are there, by the names that the metadata gives them."""
    found: dict[str, Entry] = {}
    for name in sorted({stored.file for stored in index.stored.values()}):
        place = location.member(name)
        entry = names.get(name) or (place.stat() if "/" in name else None)
        if entry is not None and entry.size >= 0 and not entry.is_dir:
            found[name] = type(entry)(name, entry.size, is_dir=False, mark=entry.mark)
    return found


def _require_inside(index: DcpIndex, files: Mapping[str, Entry], location: Location) -> None:
    stored_bytes = 0
    for (name, _), stored in index.stored.items():
        entry = files.get(stored.file)
        stored_bytes += stored.length * (_RATIO if stored.transforms else 1)
        if entry is not None and stored.offset + stored.length > entry.size:
            raise CorruptError(
                f"{stored.file} has {entry.size} bytes, an item lies at {stored.offset} + {stored.length}",
                uri=location.uri,
                path=name,
                cure="the file is cut, or of another save: restore it, or take another checkpoint",
            )
    said = sum(
        dtypes.canonical_size(one.dtype, math.prod(chunk.sizes))
        for one in index.tensors.values()
        for chunk in one.chunks
    )
    if said > _EXPANSION * stored_bytes + _FREE_BYTES:
        raise HostileError(
            f"items of {stored_bytes} bytes that claim to be {said} bytes of tensors",
            uri=location.uri,
            cure="do not use this checkpoint",
        )


def _companions(
    folder: Location, names: Mapping[str, Entry], own: set[str], prefix: str = ""
) -> Iterator[Entry]:
    """Files beside the data, such as the configuration of a model: no hidden ones, no weights in another form.

    Those in folders count too (a tokenizer, a module's configuration), unless the folder holds a state of its own.
    """
    for name, entry in names.items():
        full = f"{prefix}{name}"
        if full in own or full in OWN_NAMES or name.startswith("."):
            continue
        if entry.is_dir:
            below = folder.join(name)
            inside = {one.name: one for one in below.entries()}
            if full.count("/") + 1 < _DEEPEST and not any(map(_holds_state, inside)):
                yield from _companions(below, inside, own, f"{full}/")
        elif entry.size >= 0 and not _holds_state(name):
            yield type(entry)(full, entry.size, is_dir=False, mark=entry.mark)


def _holds_state(name: str) -> bool:
    marks = name in (METADATA, *_ARRAY_MARKS) or _OF_RANK.fullmatch(name)
    return bool(marks) or name.endswith(SUFFIX) or is_weights(name)


def _read_object(contents: DcpContents, name: str) -> None:
    stored = contents.index.stored.get((name, None))
    if stored is None or not contents.items.there(stored):
        return  # the reader's `absent` names it
    archive = contents.items.read(stored, name)
    tree = archive.tree
    for path, placed in archive.placed.items():
        full = (name, *path)
        contents.inner[full] = contents.items.at_home(placed, stored)
        contents.tensors[full] = TensorSpec(full, placed.shape, placed.dtype)
    contents.values |= {(name, *path): value for path, value in tree.values.items()}
    contents.empties |= {(name, *path): kind for path, kind in tree.empties.items()}
    contents.lists |= {(name, *path) for path in tree.lists}
    contents.notes.types.update({(name, *path): kind for path, kind in tree.types.items()})
    contents.notes.keys.update({(name, *path): key for path, key in tree.keys.items()})
