"""The files of an Orbax checkpoint: which folder is an item, which a step, and which generation wrote them.

Facts (from files of Orbax 0.1.7 to 0.12.8): an **item** folder holds one tree. It has `_METADATA`
(since 0.4.4, the tree), array data (OCDBT: `manifest.ocdbt` and `d/`, which refer into `ocdbt.process_<id>/`;
before 0.4 or on demand one folder per array), and up to 0.5.15 `checkpoint`, a msgpack tree whose leaves are
either arrays ("aggregate") or `PLACEHOLDER://<name>` strings. A **step** folder holds items and, since 0.11.1, a
full `_CHECKPOINT_METADATA`. `commit` describes what shows that a save was committed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry.core.json_document import Rows, scan_json
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import LARGE, scale_limit
from wherry.errors import CorruptError, CrowdedFolderError, IncompleteError
from wherry.formats.file_names import COMMIT_SUCCESS
from wherry.formats.format import Glimpse
from wherry.integrations.containers.ocdbt.read import PROCESS_PREFIX
from wherry.integrations.containers.zarr.listing import ASSETS
from wherry.store.folders import is_staging
from wherry.store.sidecar import FOLDER_NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from wherry.store.location import Location

JsonObject: TypeAlias = dict[str, Any]

DATA_FILE_SIZE = "1GiB"  # of an OCDBT database, by default
TREE = "_METADATA"
CHECKPOINT = "_CHECKPOINT_METADATA"
COMMITTED = COMMIT_SUCCESS
# Stores without an atomic rename: there only the marker shows that a save is complete.
RENAMELESS = ("gs", "gcs", "s3", "memory")
SHARDING = "_sharding"
STRINGS = "_strings.json"
ARRAY_METADATAS = "array_metadatas"
MSGPACK = "checkpoint"
V1_MARKER = "orbax.checkpoint"
DELETION = "_CHECKPOINT_DELETION"
COMMIT_TIME = "commit_timestamp_nsecs"
USE_OCDBT = "use_ocdbt"
MANIFEST = "manifest.ocdbt"

# Names in an item folder that array folders cannot have.
RESERVED = frozenset(
    {
        TREE,
        CHECKPOINT,
        COMMITTED,
        SHARDING,
        STRINGS,
        ARRAY_METADATAS,
        MSGPACK,
        V1_MARKER,
        MANIFEST,
        ASSETS,
        FOLDER_NAME,
        SIGNATURE_NAME,
    }
    | {"d", "ocdbt_data", "ocdbt_meta", "ocdbt_tmp_meta", "_strings.json", "descriptor"}
)
PREFERRED_ITEMS = ("state", "default", "items", "pytree", "params", "train_state", "model")
_UNCOMMITTED = re.compile(
    r"(?P<final>.*?)\.(orbax-checkpoint-tmp(-\d+)?|partial_save(\.(pending_\w+|orbax-checkpoint-tmp(-\d+)?))?)"
)
# A msgpack map with one of these first keys is the envelope of another system: T5X legacy, PaxML with Flax.
_FOREIGN_ENVELOPES = (b"\xa7version", b"\xa9optimizer", b"\xafflattened_state")
_ENVELOPE_BYTES = 64
PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")  # of arrays in the store, in a msgpack tree
_LEAVES = (*map(str.encode, PLACEHOLDERS), b"\x01\x93")  # the last: ext type 1, [shape, dtype, bytes]
# The first byte of a msgpack map and of an array: few elements, 16 bits of them, 32 bits.
_MAPS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
_ARRAYS = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})
_FEW = 3  # folders that are looked at


@dataclass(frozen=True, slots=True)
class OrbaxItem:
    """The files of an item folder.

    Attributes:
        tree: whether it has `_METADATA`.
        msgpack: whether it has the msgpack tree of the older generations.
        merged: whether it has the top manifest of an OCDBT database.
        processes: its per-process OCDBT databases.
        folders: whether it has folders that can be arrays.
    """

    tree: bool
    msgpack: bool
    merged: bool
    processes: tuple[str, ...]
    folders: bool

    @property
    def ocdbt(self) -> bool:
        """Whether its arrays are in OCDBT."""
        return self.merged or bool(self.processes)

    @property
    def has_arrays(self) -> bool:
        """Whether it can hold arrays at all (JSON items do not)."""
        return self.tree or self.msgpack or self.ocdbt


# Marks of an item folder → the generation that wrote it. The first row whose marks all exist decides.
# Marks: names of files, `_METADATA:<key>`, `process` (per-process OCDBT), `folders` (one per array).
_GENERATIONS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"_METADATA:use_ocdbt", COMMITTED}), "orbax-checkpoint >= 0.12.3"),
    (frozenset({"_METADATA:use_ocdbt"}), "orbax-checkpoint 0.11.31 to 0.12.2"),
    (frozenset({"_METADATA:custom_metadata"}), "orbax-checkpoint 0.11.1 to 0.11.30"),
    (frozenset({"_METADATA:store_array_data_equal_to_fill_value"}), "orbax-checkpoint 0.10 to 0.11.0"),
    (frozenset({TREE, MSGPACK, "process"}), "orbax-checkpoint 0.4.4 to 0.5.15"),
    (frozenset({TREE, MSGPACK, MANIFEST}), "orbax-checkpoint 0.4.0 to 0.4.3"),
    (frozenset({TREE, MSGPACK}), "orbax-checkpoint 0.4.0 to 0.5.15"),
    (frozenset({"_METADATA:use_zarr3"}), "orbax-checkpoint 0.5.16 to 0.10"),
    (frozenset({MSGPACK, MANIFEST}), "orbax-checkpoint 0.4.0 to 0.4.3"),
    (frozenset({MSGPACK, "folders"}), "orbax 0.0.21 to 0.3"),
    (frozenset({MSGPACK}), "orbax <= 0.5.15, aggregate"),
)


def look_at_item(glimpse: Glimpse) -> OrbaxItem | None:
    """Examine a folder for an Orbax item; None if it is not one."""
    entries = glimpse.entries
    item = OrbaxItem(
        tree=TREE in entries,
        msgpack=_is_msgpack_tree(glimpse),
        merged=MANIFEST in entries,
        processes=tuple(name for name in entries if name.startswith(PROCESS_PREFIX)),
        folders=any(entry.is_dir and not is_reserved(name) for name, entry in entries.items()),
    )
    if item.tree or item.msgpack or item.processes or SHARDING in entries:
        return item
    if not item.merged or "d" not in entries:
        return None
    # A database alone may be of any program that uses tensorstore: small files in it or in the step around it show
    # that it is Orbax's, or a record of wherry.
    if any(name in entries for name in (CHECKPOINT, COMMITTED, ARRAY_METADATAS, STRINGS, FOLDER_NAME)):
        return item
    step = glimpse.location.parent
    return item if any(step.join(name).exists() for name in (CHECKPOINT, COMMITTED, V1_MARKER)) else None


def items_of_step(glimpse: Glimpse) -> dict[str, OrbaxItem]:
    """The items of a step folder by name, without items that have no arrays and without staging areas."""
    children = {
        name: Glimpse(glimpse.location.join(name))
        for name, entry in glimpse.entries.items()
        if entry.is_dir and not is_staging(name)
    }
    looks = {name: _look_at_child(child) for name, child in children.items() if not is_uncommitted(name)}
    return {name: look for name, look in looks.items() if look is not None and look.has_arrays}


def _look_at_child(glimpse: Glimpse) -> OrbaxItem | None:
    """Examine a folder in a step; a folder of data with too many files to be listed is no item."""
    try:
        return look_at_item(glimpse)
    except CrowdedFolderError:
        return None


def has_empty_msgpack(folder: Location) -> bool:
    """Whether a folder has arrays next to an empty msgpack tree, which the older generations wrote last."""
    file = folder.join(MSGPACK).stat()
    if file is None or file.is_dir or file.size:
        return False
    folders = (entry.name for entry in folder.entries() if entry.is_dir and not is_reserved(entry.name))
    return any(folder.join(f"{name}/.zarray").exists() for name in islice(folders, _FEW))


def is_reserved(name: str) -> bool:
    """Whether Orbax or wherry reserves a name in an item folder, so that no array can have it."""
    return name in RESERVED or name.startswith(PROCESS_PREFIX)


def is_uncommitted(name: str) -> bool:
    """Whether a folder name is that of a save that was never committed."""
    return _UNCOMMITTED.fullmatch(name) is not None


def final_name(name: str) -> str:
    """The name that a folder would have had after its commit."""
    found = _UNCOMMITTED.fullmatch(name)
    return found["final"] if found else name


def generation(
    item: OrbaxItem, names: Collection[str], tree: Mapping[str, Any]
) -> tuple[str, frozenset[str]]:
    """The Orbax releases that write such an item, and the marks that show it."""
    marks = {name for name in (TREE, MANIFEST, COMMITTED) if name in names}
    marks |= {f"{TREE}:{key}" for key in tree}
    marks |= {MSGPACK} if item.msgpack else set()
    marks |= {"process"} if item.processes else set()
    marks |= {"folders"} if item.folders else set()
    for wanted, writer in _GENERATIONS:
        if wanted <= marks:
            return writer, wanted
    return "orbax-checkpoint", frozenset()


def layout_words(item: OrbaxItem, *, zarr3: bool, arrays: bool = True) -> str:
    """The format version: how the arrays are stored, and what else exists.

    Args:
        item: the item.
        zarr3: whether its arrays are zarr 3.
        arrays: whether any array is stored outside the msgpack tree.
    """
    zarr = "zarr3" if zarr3 else "zarr2"
    if item.ocdbt:
        words = f"ocdbt {zarr}"
    elif item.msgpack and not (item.folders and arrays):
        return "aggregate msgpack" + ("" if item.tree else ", no _METADATA")
    else:
        words = f"per-array directories {zarr}"
    return words + (" + msgpack" if item.msgpack else "") + ("" if item.tree else ", no _METADATA")


def read_json(location: Location, rows: Rows | None = None) -> JsonObject:
    """A JSON file of a checkpoint.

    Args:
        location: the file.
        rows: how to read its large objects; see `scan_json`.

    Raises:
        NotFoundError: the file does not exist.
        IncompleteError: it is empty, for example after a power failure (Orbax does not sync these files).
        CorruptError: it is not a JSON object.
        HostileError: it exceeds a limit.
    """
    pieces = location.metadata(scale_limit(LARGE.nbytes))
    first = next(pieces, b"")
    if not first.strip():
        raise IncompleteError(
            f"{location.name} is empty, probably after a power failure",
            uri=location.uri,
            cure="use another step",
        )
    value = scan_json(
        chain((first,), pieces), location.name, {} if rows is None else rows, uri=location.uri, limits=LARGE
    )
    if not isinstance(value, dict):
        raise CorruptError(
            f"invalid JSON in {location.name}: expected an object, got {type(value).__name__}",
            uri=location.uri,
        )
    return value


def _is_msgpack_tree(glimpse: Glimpse) -> bool:
    entry = glimpse.entries.get(MSGPACK)
    if entry is None or entry.is_dir or entry.size == 0:
        return False
    head = glimpse.location.join(MSGPACK).read(0, _ENVELOPE_BYTES)
    if head[0] in _MAPS:
        return not any(head[1:].startswith(envelope) for envelope in _FOREIGN_ENVELOPES)
    # A tuple or list at the root, such as an optimizer state; without `_METADATA` its leaves show what it is.
    return head[0] in _ARRAYS and (TREE in glimpse.entries or any(mark in head for mark in _LEAVES))
