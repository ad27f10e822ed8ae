"""Detects an Orbax item, a step, or the remains of a save, from names, first bytes and the small JSON files.

Systems that build on Orbax (MaxText, T5X, PaxML, Penzai) examine the same folder: `look` does so once for each
`Glimpse` and keeps everything that it read, so that none of them reads `_METADATA` again.

Facts: a step folder holds items; if there are several, one must have a usual name, or the user must choose. `commit`
describes what shows that a save was committed. No file names its Orbax release: fields that no release up to 0.12.8
writes are listed in the evidence, and refused by name if they decide the meaning of the tensors.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from wherry.core.detection import Detection, Evidence, Verdict, verdict_of_damage
from wherry.core.steps import step_number
from wherry.errors import AmbiguousError, WherryError
from wherry.formats.format import Glimpse
from wherry.integrations.containers.orbax import layout, marks, tree
from wherry.integrations.containers.orbax.item import require_whole
from wherry.integrations.containers.orbax.other_items import is_state
from wherry.integrations.containers.orbax.tree import own_notes
from wherry.runtime.threads import without_collection
from wherry.tree.tree_reading import read_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.storage.location import Location

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
        evidence += marks.wrappers(leaves.tensors)
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
        rest = [name for name in names if not _is_state(glimpse.location.join(name), items[name])]
        preferred = rest[0] if len(rest) == 1 else None
    if preferred is None:
        raise AmbiguousError(
            f"the step has several items: {', '.join(names)}",
            uri=glimpse.location.uri,
            cure=f"pass --item {shlex.quote(names[0])}",
        )
    return preferred


def _is_state(place: Location, item: layout.OrbaxItem) -> bool:
    """Whether an item holds the state of an optimizer or of the run, by its name or its key paths."""
    try:
        leaves = tree.parse_tree(tree.read_tree(place), place.uri) if item.tree else None
    except OSError:
        raise
    except WherryError:
        leaves = None
    return is_state(place.name, leaves.arrays if leaves else ())


def _remains(glimpse: Glimpse, reason: str) -> FoundItem:
    """A folder with the name or files of Orbax, but without an item that has arrays."""
    seen = ", ".join(sorted(glimpse.entries)) or "nothing"
    detection = Detection(
        uri=glimpse.location.uri,
        format="orbax",
        step=step_number(layout.final_name(glimpse.location.name)),
        verdict="incomplete",
        reason=reason,
        evidence=(Evidence(".", f"folder {glimpse.location.name} contains {seen}"),),
    )
    return FoundItem(detection, glimpse.location)


def step_of(location: Location, *, inside_step: bool) -> int | None:
    """The step in the name of the item, or in that of the step folder around it."""
    own = step_number(layout.final_name(location.name))
    around = layout.final_name(location.parent.name)
    return step_number(around, any_prefix=inside_step) if own is None else own
