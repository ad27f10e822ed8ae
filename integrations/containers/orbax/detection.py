"""Detects an Orbax item, a step, or the remains of a save, from names, first bytes and the small JSON files.

Systems that build on Orbax (MaxText, T5X, PaxML, Penzai) examine the same folder: `look` does so once for each
`Glimpse` and keeps everything that it read, so that none of them reads `_METADATA` again.

Facts: a step folder holds items; if there are several, one must have a usual name, or the user must choose. `commit`
describes what shows that a save was committed. No file names its Orbax release: fields that no release up to 0.12.8
writes are listed in the evidence, and refused by name if they decide the meaning of the tensors.

The entries of a step besides the item that is read: other items, checkpointables of the v1 API, and files.

An item with arrays is taken for weights, unless its name or its key paths say that it is the state of an optimizer or
of a run. Items without arrays hold JSON, strings, metrics or the position of a data loader. A folder is a step if it
has the files of one or a step's name; else only folders with the usual names of items are items. A folder with its own
`_CHECKPOINT_METADATA` is a checkpoint of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import field, replace
from weakref import WeakKeyDictionary

from wherry.core.account import FILES, ITEMS, TRAINING_STATE, IgnoredEntry, ignored_file
from wherry.core.detection import Detection, Evidence, Verdict, verdict_of_damage
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.steps import step_number
from wherry.core.threads import without_collection
from wherry.cures import Argument, Cure
from wherry.errors import AmbiguousError, WherryError
from wherry.formats.format import Glimpse, Signs
from wherry.integrations.containers.ocdbt.read import PROCESS_PREFIX
from wherry.integrations.containers.orbax import layout, tree
from wherry.integrations.containers.orbax.item import require_whole, wrappers
from wherry.integrations.containers.orbax.layout import (
    CHECKPOINT,
    MANIFEST,
    MSGPACK,
    PREFERRED_ITEMS,
    SHARDING,
    TREE,
    V1_MARKER,
)
from wherry.integrations.containers.orbax.tree import item_tree, own_notes
from wherry.layout.tree_reading import read_leaves
from wherry.store.folders import is_staging
from wherry.store.location import Location
from wherry.store.sidecar import OWN_NAMES
from wherry.store.store import Entry

_MARKERS = frozenset({layout.CHECKPOINT, layout.COMMITTED, layout.V1_MARKER, *OWN_NAMES})
_NOT_READ = "one item of a step is converted"
_UNNAMED = "leaf"  # stands for a leaf of an item of which nothing is known
_PARAMETER = ("params", "kernel")  # stands for the item that is read


def other_items(item: Location, home: Location, read: Collection[str] = ()) -> tuple[IgnoredEntry, ...]:
    """The entries of a step that are not read.

    Args:
        item: the item folder that is read.
        home: the checkpoint's location, to which names are relative: the step or the item.
        read: names of further entries of the step that the format reads.
    """
    step = Glimpse(item.parent)
    if item.join(layout.CHECKPOINT).exists():
        return ()
    marked = any(name in step.entries for name in (layout.CHECKPOINT, layout.V1_MARKER))
    whole = marked or step_number(item.parent.name) is not None
    if not (whole or item.name in layout.PREFERRED_ITEMS):
        return ()
    prefix = "" if home.path.rstrip("/") == item.parent.path.rstrip("/") else "../"
    skipped = {item.name, *read, *_MARKERS}
    rows = [
        _ignored_entry(item.parent, f"{prefix}{name}", entry, v1=layout.V1_MARKER in step.entries)
        for name, entry in step.entries.items()
        if name not in skipped
        and not name.startswith(".")
        and not is_staging(name)
        and not layout.is_uncommitted(name)
        if whole or (entry.is_dir and name in layout.PREFERRED_ITEMS)
    ]
    return tuple(row for row in rows if row is not None)


def _ignored_entry(step: Location, name: str, entry: Entry, *, v1: bool) -> IgnoredEntry | None:
    """The entry of a file or folder of a step; None for a checkpoint of its own."""
    word = "a checkpointable" if v1 else "an item"
    if not entry.is_dir:
        return ignored_file(name, FILES, "a file of the step", "it belongs to no item")
    place = step.join(entry.name)
    if place.join(layout.CHECKPOINT).exists():
        return None
    item = layout.look_at_item(Glimpse(place))
    try:
        paths = _paths(place, item) if item is not None and item.has_arrays else []
    except OSError:  # that item is not converted; what is converted can still be read
        paths = None
    if paths == []:
        return ignored_file(name, ITEMS, f"{word} without arrays", _NOT_READ)
    if paths is not None and is_state(entry.name, paths):
        return ignored_file(
            name, TRAINING_STATE, f"{word} with the state of an optimizer or of the run", _NOT_READ
        )
    return ignored_file(name, ITEMS, f"{word} with arrays", _NOT_READ, weights=True)


def is_state(name: str, paths: Collection[KeyPath]) -> bool:
    """Whether an item holds nothing but the state of an optimizer or of a run, next to the item with the parameters.

    Args:
        name: of the item, which alone shows it if no key path is known.
        paths: key paths of its arrays.
    """
    inside = [(name, *path) for path in paths or ((_UNNAMED,),)]
    found = read_leaves([*inside, _PARAMETER])
    return all(found.kind(path) in ("optimizer", "counter", "key") for path in inside)


def _paths(place: Location, item: layout.OrbaxItem) -> list[KeyPath] | None:
    """The key paths of the arrays of an item; None if they are not stated, or cannot be read."""
    if not item.tree and not item.msgpack:
        return None
    try:
        metadata = tree.read_tree(place) if item.tree else {}
        return list(item_tree(place, item, metadata).tensors)
    except OSError:
        raise
    except WherryError:
        return None


NEWEST = "0.12.8"
_TREE_FIELDS = frozenset(
    {"tree_metadata", "use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value", "custom_metadata"}
    | {"value_metadata_tree"}
)


@dataclass(frozen=True, slots=True)
class FoundItem:
    """The result of examining a folder.

    Attributes:
        detection: the detection of the format `orbax`; its URI is that of the item.
        location: the item folder, or the folder itself if there is no item.
        item: the files of the item; None for remains.
        metadata: its `_METADATA`; empty if it has none, or if it cannot be read.
        leaves: the leaves in `_METADATA`; None if it cannot be read.
    """

    detection: Detection
    location: Location
    item: layout.OrbaxItem | None = None
    metadata: layout.JsonObject = field(default_factory=dict[str, object])
    leaves: tree.ItemTree | None = None


_LOOKS: WeakKeyDictionary[Glimpse, FoundItem | None] = WeakKeyDictionary()


def look(glimpse: Glimpse) -> FoundItem | None:
    """An item folder, a step folder with an item in it, or the remains of a save; None for other folders.

    Raises:
        AmbiguousError: a step has several items with arrays and none has a usual name.
    """
    if glimpse not in _LOOKS:
        _LOOKS[glimpse] = _look(glimpse)
    return _LOOKS[glimpse]


def _look(glimpse: Glimpse) -> FoundItem | None:
    if not glimpse.is_dir:
        return None
    item = layout.look_at_item(glimpse)
    if item is not None:
        return _found_item(glimpse, item)
    if layout.is_uncommitted(glimpse.location.name):
        return _remains(glimpse, "not committed: the folder name has the suffix of a save in progress")
    if layout.has_empty_msgpack(glimpse.location):
        return _remains(glimpse, f"{layout.MSGPACK} is empty, probably after a power failure")
    return _found_step(glimpse)


@without_collection()
def _found_item(glimpse: Glimpse, item: layout.OrbaxItem, parent: Glimpse | None = None) -> FoundItem:
    location, names = glimpse.location, set(glimpse.entries)
    marks_of_step = (layout.COMMITTED, layout.V1_MARKER, layout.CHECKPOINT)
    around = {name for name in marks_of_step if location.parent.join(name).exists()}
    verdict, refused, metadata = _verdict(location, item, parent)
    writer, signs = layout.generation(item, names | around, metadata)
    own = own_notes(metadata)
    seen = (
        (layout.TREE, item.tree, "the tree"),
        (layout.MSGPACK, item.msgpack, "a msgpack tree"),
        (layout.MANIFEST, item.merged, "an OCDBT database"),
    )
    evidence = [Evidence(file, words) for file, there, words in seen if there]
    evidence += [Evidence(name, "the arrays of one process") for name in item.processes]
    evidence += [Evidence(".", f"{sign} is written by {writer}") for sign in sorted(signs)]
    if layout.V1_MARKER in around:
        evidence.append(Evidence(f"../{layout.V1_MARKER}", "saved through the v1 API"))
    if own:
        evidence.append(Evidence(layout.TREE, "written by wherry"))
        writer = f"wherry {own.get('version')} (as {writer})"
    leaves = None
    if verdict == "ok" and item.tree:
        with suppress(WherryError):  # opening reports why the tree cannot be read
            leaves = tree.parse_tree(metadata, location.uri)
    # Fields that no tested release writes, and that do not change the meaning of the others.
    unknown = sorted(metadata.keys() - _TREE_FIELDS) + sorted(leaves.unknown if leaves else ())
    evidence += [
        Evidence(
            layout.TREE, f"unknown field {name!r}, which Orbax up to {NEWEST} does not write: a newer writer"
        )
        for name in unknown
    ]
    if leaves:
        evidence += wrappers(leaves.tensors)
    detection = Detection(
        uri=location.uri,
        format="orbax",
        format_version=layout.layout_words(
            item,
            zarr3=bool(metadata.get("use_zarr3")),
            arrays=leaves is None or set(leaves.arrays) != leaves.aggregated,
        ),
        writer=writer,
        step=step_of(location, inside_step=bool(around) or location.name in layout.PREFERRED_ITEMS),
        kind=read_leaves(leaves.tensors, leaves.others, leaves.empties).whole_of_arrays if leaves else None,
        verdict=verdict,
        reason=refused.what if refused else None,
        evidence=tuple(evidence),
        cure=refused.cure if refused else None,
    )
    return FoundItem(detection, location, item, metadata, leaves)


def _verdict(
    location: Location, item: layout.OrbaxItem, parent: Glimpse | None
) -> tuple[Verdict, WherryError | None, layout.JsonObject]:
    """The verdict from names and small files, and its error."""
    metadata: layout.JsonObject = {}
    try:
        if item.tree:
            metadata = tree.read_tree(location)
        require_whole(location, item, parent)
    except OSError:
        raise
    except WherryError as error:
        return verdict_of_damage(error.verdict), error, metadata
    return "ok", None, metadata


def _found_step(glimpse: Glimpse) -> FoundItem | None:
    """The chosen item of a step folder."""
    marked = layout.CHECKPOINT in glimpse.entries or layout.V1_MARKER in glimpse.entries
    step = step_number(
        glimpse.location.name
    )  # `exp_2024` may be a folder of runs: only known step names count
    usual = any(name in glimpse.entries for name in layout.PREFERRED_ITEMS)
    if not (marked or step is not None or usual):
        return None
    items = layout.items_of_step(glimpse)
    if not marked:
        items = {
            name: item for name, item in items.items() if step is not None or name in layout.PREFERRED_ITEMS
        }
        items = {name: item for name, item in items.items() if step_number(name) is None}
    if not items:
        usually = [glimpse.location.join(name) for name in layout.PREFERRED_ITEMS if name in glimpse.entries]
        remains = marked or any(layout.is_uncommitted(name) for name in glimpse.entries)
        if remains or any(map(layout.has_empty_msgpack, usually)):
            return _remains(glimpse, "no item with arrays found")
        return None
    name = _choose(glimpse, items)
    found = _found_item(Glimpse(glimpse.location.join(name)), items[name], glimpse)
    others = [other for other in sorted(items) if other != name]
    chosen = f"the item with arrays{', preferred to ' + ', '.join(others) if others else ''}"
    evidence = (Evidence(f"../{name}", chosen), *found.detection.evidence)
    return replace(found, detection=replace(found.detection, evidence=evidence))


def _choose(glimpse: Glimpse, items: Mapping[str, layout.OrbaxItem]) -> str:
    names = sorted(items)
    if len(names) == 1:
        return names[0]
    preferred = next((name for name in layout.PREFERRED_ITEMS if name in names), None)
    if preferred is None:
        # Tunix saves `model_params` and `optimizer_state`.
        known = {name: _paths(glimpse.location.join(name), item) for name, item in items.items()}
        rest = [name for name in names if not is_state(name, known[name] or ())]
        preferred = rest[0] if len(rest) == 1 else None
    if preferred is None:
        raise AmbiguousError(
            f"the step has several items: {', '.join(names)}",
            uri=glimpse.location.uri,
            cure=Cure("pass {}", Argument("item", names[0])),
        )
    return preferred


def _remains(glimpse: Glimpse, reason: str) -> FoundItem:
    """A folder with the name or files of Orbax, but without an item that has arrays."""
    name = glimpse.location.name
    seen = Evidence(".", f"folder {name} contains {', '.join(sorted(glimpse.entries)) or 'nothing'}")
    step = step_number(layout.final_name(name))
    return FoundItem(glimpse.detected("orbax", None, None, seen, step=step, reason=reason), glimpse.location)


def step_of(location: Location, *, inside_step: bool) -> int | None:
    """The step in the name of the item, or in that of the step folder around it."""
    own = step_number(layout.final_name(location.name))
    around = layout.final_name(location.parent.name)
    return step_number(around, any_prefix=inside_step) if own is None else own


# An item or a step; the folder of a step that is empty, or was never committed, has only its name.
SIGNS = Signs(
    entries=frozenset({TREE, CHECKPOINT, MSGPACK, SHARDING, MANIFEST, V1_MARKER, *PREFERRED_ITEMS}),
    starts=(PROCESS_PREFIX,),
    folders=True,
    named=r".*\.(orbax-checkpoint-tmp|partial_save).*|(?i:([a-z_]+[-_]?)?\d{1,18})",
)


def detect(glimpse: Glimpse) -> Detection | None:
    """An item folder, a step folder with an item in it, or the remains of a save; None for other folders.

    Raises:
        AmbiguousError: a step has several items with arrays and none has a usual name.
    """
    found = look(glimpse)
    return found and found.detection
