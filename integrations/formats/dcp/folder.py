"""Opens a DCP folder: index, files, and the objects that are not tensors.

Only `relative_path` in the metadata determines which files belong to the checkpoint: a stale `__7_0.distcp` of an older
save with more ranks may be in the folder too. Every item must be inside its file; the chunks of a missing file are
absent, but the rest can be read. Objects (`BytesStorageMetadata`: step, optimizer groups) are small pickles, which the
inert machine interprets; they become values and empties below their name, or tensors if they hold any.

The steps of accelerate's FSDP runs: the model and its optimizers as DCP folders, with the state of the trainer.

Facts: with sharded state dicts `save_state`, and transformers' Trainer, put each model into `pytorch_model_fsdp_<i>`
and each optimizer into `optimizer_<i>`; keys start with `model.` and `optimizer.`. Schedules, random states and the
like are files next to them. So these folders are the items of one step, and the model is the one that is meant unless
an item is named. (A full state dict is the file `pytorch_model_fsdp.bin`, which the format `huggingface` reads.)
Source: accelerate/utils/fsdp_utils.py of 1.12.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace

from wherry.core import dtypes
from wherry.core.account import FILES, ITEMS, TRAINING_STATE, IgnoredEntry, ignored_file
from wherry.core.detection import Evidence
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.steps import step_number
from wherry.core.tensorspec import TensorSpec
from wherry.core.threads import without_collection
from wherry.cures import Argument, Cure
from wherry.errors import AmbiguousError, CorruptError, HostileError, IncompleteError
from wherry.formats.file_names import fsdp_item, is_weights
from wherry.formats.format import Glimpse
from wherry.integrations.containers.flat.reader import Surroundings
from wherry.integrations.containers.flat.strides import PlacedTensor
from wherry.integrations.containers.torch.values import PickleTree
from wherry.integrations.formats.dcp.items import Items
from wherry.integrations.formats.dcp.metadata import DcpIndex, grid_of, read_index, with_elements
from wherry.integrations.formats.huggingface.folder import FolderWalk, ignored_companion
from wherry.integrations.formats.huggingface.weights import find_weights
from wherry.store.location import Location
from wherry.store.sidecar import OWN_NAMES
from wherry.store.store import Entry

METADATA = ".metadata"
UNCOMMITTED = "file not found: .metadata; the save was never committed"
SUFFIX = ".distcp"
_OF_RANK = re.compile(r"__\d+\.metadata")
_EXPANSION = 64  # torch writes expanded tensors in full; metadata that claims more than this factor is forged
_RATIO = 1 << 10  # additional factor for zstd-compressed zeros
_FREE_BYTES = 1 << 20
_READ = f"the tensors are read from {METADATA} and its data files"
_ARRAY_MARKS = (".zarray", "zarr.json", "manifest.ocdbt")  # of arrays of another system in the same folder


@dataclass(slots=True)
class DcpContents:
    """Contents of a checkpoint; see `Manifest` for the fields of the same name.

    Attributes:
        index: its metadata.
        items: access to its items.
        inner: tensors inside objects.
        tree: the leaves of objects that are no tensors.
        files: metadata and data files.
        around: the other files of the folder.
    """

    index: DcpIndex
    items: Items
    files: tuple[Entry, ...]
    around: Surroundings
    tensors: dict[KeyPath, TensorSpec] = field(default_factory=dict["KeyPath", TensorSpec])
    inner: dict[KeyPath, PlacedTensor] = field(default_factory=dict["KeyPath", "PlacedTensor"])
    tree: PickleTree = field(default_factory=PickleTree)


@dataclass(frozen=True, slots=True)
class OwnRules:
    """What a system that stores its checkpoints in DCP folders knows of them.

    Attributes:
        files: names of its own files, which are no companions.
        leave: the entry of an object that is not read; None for one that is.
    """

    files: frozenset[str] = frozenset()
    leave: Callable[[str], IgnoredEntry | None] = lambda _name: None


OWN = OwnRules()


def metadata_names(names: Mapping[str, Entry]) -> list[str]:
    """The metadata files of a folder: the one of all ranks, or else one of each rank; empty if there are none."""
    if METADATA in names and not names[METADATA].is_dir:
        return [METADATA]
    return sorted(name for name in names if _OF_RANK.fullmatch(name))


def read_contents(location: Location, own: OwnRules = OWN) -> DcpContents:
    """Read the metadata and the objects of a folder.

    Args:
        location: the folder.
        own: what a system that stores its checkpoints in such folders knows of them.

    Raises:
        IncompleteError: the save was never committed.
        HostileError: a global that is not allowed, a file outside the folder, sizes that no file has.
        CorruptError: an item is not inside its file, or the metadata is inconsistent.
        UnsupportedError: an unsupported form of the metadata or of an object.
    """
    names = {entry.name: entry for entry in location.entries()}
    marks = metadata_names(names)
    if not marks:
        raise IncompleteError(
            UNCOMMITTED,
            uri=location.uri,
            cure="use another checkpoint; data files cannot be read without .metadata",
        )
    with without_collection():
        index = read_index([location.join(name) for name in marks])
        files = _files(index, location, names)
        _require_inside(index, files, location)
        format_files = [name for name in (*marks, *sorted(own.files)) if name in names]
        # Files in folders count too (a tokenizer, a module's configuration), unless the folder holds another state.
        around = FolderWalk({*files, *format_files}, _READ, _left_file, _is_apart).sort(
            location, names.values()
        )
        left = [entry for name in index.objects if (entry := own.leave(name)) is not None]
        around.ignored += left
        out = {entry.path for entry in left}
        index.objects = [name for name in index.objects if (name,) not in out]
        contents = DcpContents(
            index,
            Items(location, files),
            (*(names[name] for name in format_files), *files.values()),
            around,
        )
        coded = index.stored.coded()
        for name, described in index.tensors.items():
            path, chunks = (name,), _grid(index, name) if name in coded else None
            contents.tensors[path] = TensorSpec(path, described.shape, described.dtype, chunks)
        for name in index.objects:
            _read_object(contents, name)
        return contents


def _grid(index: DcpIndex, name: str) -> tuple[int, ...] | None:
    """The chunk grid of a tensor whose chunks must be decoded; None if regions are read directly from the file."""
    described = index.tensors[name]
    stored = index.stored.get(name, described.chunks[0].offsets) if described.chunks else None
    if stored is None or not stored.transforms:
        return None
    return grid_of(described.shape, with_elements(described.chunks))


def _files(index: DcpIndex, location: Location, names: Mapping[str, Entry]) -> dict[str, Entry]:
    """The data files that exist, by their names in the metadata."""
    found: dict[str, Entry] = {}
    for name in sorted(index.stored.ends()):
        place = location.member(name)
        entry = names.get(name) or (place.stat() if "/" in name else None)
        if entry is not None and entry.size >= 0 and not entry.is_dir:
            found[name] = replace(entry, name=name)
    return found


def _require_inside(index: DcpIndex, files: Mapping[str, Entry], location: Location) -> None:
    stored_bytes = index.stored.nbytes(_RATIO)
    for file, end in index.stored.ends().items():
        if file in files and end > files[file].size:
            last = (
                name for name, _offsets, item in index.stored.items() if item[:2] == (file, end - item.length)
            )
            raise CorruptError(
                f"{file} is truncated: expected {end} bytes, got {files[file].size}",
                uri=location.uri,
                path=next(last),
                cure="the file is truncated or from another save: restore it, or use another checkpoint",
            )
    alike = Counter(map(id, index.tensors.values()))  # many tensors have one description
    said = sum(
        alike[number] * dtypes.canonical_size(one.dtype, math.prod(chunk.sizes))
        for number, one in {id(one): one for one in index.tensors.values()}.items()
        for chunk in one.chunks
    )
    if said > _EXPANSION * stored_bytes + _FREE_BYTES:
        raise HostileError(
            f".metadata claims {said} bytes of tensors in items of {stored_bytes} bytes",
            uri=location.uri,
            cure="do not use this checkpoint",
        )


def _is_apart(_folder: Location, names: Iterable[str]) -> bool:
    """Whether a folder holds another state."""
    return any(
        name in (METADATA, *_ARRAY_MARKS)
        or _OF_RANK.fullmatch(name)
        or name.endswith(SUFFIX)
        or is_weights(name)
        for name in names
    )


def _left_file(full: str, entry: Entry) -> IgnoredEntry | None:
    """The entry of a file that is no companion; None for a companion."""
    if entry.size < 0:
        return ignored_file(full, FILES, "a link", "its target was not found, or must not be read")
    if full.endswith(SUFFIX) or _OF_RANK.fullmatch(full):
        return ignored_file(full, FILES, "a file of another save", f"{METADATA} does not name it")
    return ignored_companion(full, _READ)


def _read_object(contents: DcpContents, name: str) -> None:
    stored = contents.index.stored.get(name, None)
    if stored is None or not contents.items.there(stored):
        return  # the reader's `absent` reports it
    archive = contents.items.read(stored, name)
    tree, whole = archive.tree, contents.tree
    for path, placed in archive.placed.items():
        full = (name, *path)
        contents.inner[full] = contents.items.at_home(placed, stored)
        contents.tensors[full] = TensorSpec(full, placed.shape, placed.dtype)
    whole.values |= {(name, *path): value for path, value in tree.values.items()}
    whole.empties |= {(name, *path): kind for path, kind in tree.empties.items()}
    whole.lists |= {(name, *path) for path in tree.lists}
    whole.types |= {(name, *path): kind for path, kind in tree.types.items()}
    whole.keys |= {(name, *path): key for path, key in tree.keys.items()}


_NOT_READ = "one item of a step is converted"
_NOT_OF_ITEM = "a file of the step, which the item does not include"


def model_of_step(glimpse: Glimpse) -> str | None:
    """The item of a step that is meant if none is named; None if the folder is no such step.

    Raises:
        AmbiguousError: the step has several models.
        IncompleteError: it has only optimizers.
    """
    if not glimpse.is_dir or find_weights(glimpse.entries) is not None:
        return None
    named = [name for name, entry in glimpse.entries.items() if entry.is_dir and fsdp_item(name)]
    items = [name for name in named if _is_folder_of_torch(glimpse.location.join(name))]
    models = [name for name in items if fsdp_item(name) == "model"]
    if len(models) > 1:
        raise AmbiguousError(
            f"the step has several models: {', '.join(models)}",
            uri=glimpse.location.uri,
            cure=Cure("pass {}", Argument("item", models[0])),
        )
    if items and not models:
        raise IncompleteError(
            f"folder not found: pytorch_model_fsdp_0; the step has only {', '.join(items)}",
            uri=glimpse.location.uri,
            cure=Cure("use another step, or pass {} for the optimizer", Argument("item", items[0])),
        )
    return models[0] if models else None


def _is_folder_of_torch(place: Location) -> bool:
    names = {entry.name: entry for entry in place.entries()}
    return bool(metadata_names(names)) or any(name.endswith(SUFFIX) for name in names)


def item_evidence(item: str) -> Evidence:
    """The evidence that an item of a step was chosen."""
    return Evidence(f"../{item}", "the model of a step of accelerate's FSDP")


def step_around(location: Location) -> int | None:
    """The step in the name of the folder around an item; None for a folder that is no item."""
    return step_number(location.parent.name) if fsdp_item(location.name) else None


def ignored_of_step(location: Location) -> list[IgnoredEntry]:
    """The other entries of the step around an item; none for a folder that is no item."""
    if not fsdp_item(location.name):
        return []
    others = [entry for entry in location.parent.entries() if entry.name not in (location.name, *OWN_NAMES)]
    rows = [_entry(entry) for entry in others if not entry.name.startswith(".")]
    return [row for row in rows if row is not None]


def _entry(entry: Entry) -> IgnoredEntry | None:
    """A file or item of the step; None for folders of which accelerate knows nothing."""
    name = f"../{entry.name}"
    if entry.is_dir:
        kind = fsdp_item(entry.name)
        if kind == "model":
            return ignored_file(name, ITEMS, "another model of the step", _NOT_READ, weights=True)
        return ignored_file(name, TRAINING_STATE, "optimizer state", _NOT_READ) if kind else None
    return ignored_companion(name, _NOT_READ) or ignored_file(name, FILES, "a file", _NOT_OF_ITEM)
