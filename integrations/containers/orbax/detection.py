"""Detecting an Orbax item, step or remains: from names, first bytes and the small JSON files.

Systems that build on Orbax (MaxText, T5X, PaxML, Penzai) ask the same question of the same folder: `look` answers it
once for each `Glimpse`, with everything that was read for it, so that none of them reads `_METADATA` again.

Facts: a step folder holds items; which of several is meant is asked for unless one name is the usual one. A folder
with the suffix `.orbax-checkpoint-tmp` was never committed. On stores without rename Orbax counts a checkpoint as
committed only if `commit_success.txt` is there. No file names its Orbax release: what a release up to 0.12.8 does not
write is named in the evidence, and refused by name where its meaning decides what the tensors are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from wherry.core.detection import Detection, Evidence, Verdict, verdict_of_damage
from wherry.core.steps import step_number
from wherry.errors import AmbiguousError, WherryError
from wherry.formats.format import Glimpse
from wherry.integrations.containers.orbax import item as opening
from wherry.integrations.containers.orbax import layout, marks, tree

if TYPE_CHECKING:
    from wherry.storage.location import Location

NEWEST = "0.12.8"
_RENAMELESS = ("gs", "gcs", "s3")
_TREE_FIELDS = frozenset(
    {"tree_metadata", "use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value", "custom_metadata"}
    | {"value_metadata_tree"}
)


@dataclass(frozen=True, slots=True)
class FoundItem:
    """What a look at a folder gives.

    Attributes:
        detection: as the format `orbax` answers; its URI is that of the item.
        location: the item folder, or the folder itself where there is no item.
        item: what the item shows; None for remains.
        metadata: its `_METADATA`; empty where it has none or it cannot be read.
        leaves: the leaves that `_METADATA` names; None where it cannot be read.
    """

    detection: Detection
    location: Location
    item: layout.OrbaxItem | None = None
    metadata: layout.JsonObject = field(default_factory=dict[str, object])
    leaves: tree.ItemTree | None = None


_LOOKS: WeakKeyDictionary[Glimpse, FoundItem | None] = WeakKeyDictionary()


def look(glimpse: Glimpse) -> FoundItem | None:
    """An item folder, a step folder with an item in it, or the remains of a save; None where it is none of these.

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
    if layout.uncommitted(glimpse.location.name):
        return _remains(glimpse, "the folder has the suffix of a save that was never committed")
    return _found_step(glimpse)


def _found_item(glimpse: Glimpse, item: layout.OrbaxItem) -> FoundItem:
    location, names = glimpse.location, set(glimpse.entries)
    marks_of_step = (layout.COMMITTED, layout.V1_MARKER, layout.CHECKPOINT)
    around = {name for name in marks_of_step if location.parent.join(name).exists()}
    verdict, reason, metadata = _verdict(location, item, names, around)
    writer, signs = layout.generation(item, names | around, metadata)
    own = opening.own_notes(metadata)
    evidence = [Evidence(".", f"{sign} marks {writer}") for sign in sorted(signs)]
    if layout.V1_MARKER in around:
        evidence.append(Evidence(f"../{layout.V1_MARKER}", "saved through the v1 API"))
    if own:
        evidence.append(Evidence(layout.TREE, "written by wherry"))
        writer = f"wherry {own.get('version')} (as {writer})"
    leaves = _leaves(metadata, location) if verdict == "ok" and item.tree else None
    evidence += _too_new(metadata, leaves)
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
        kind=tree.kind_of(leaves.arrays, leaves.strings) if leaves else None,
        verdict=verdict,
        reason=reason,
        evidence=(*_presence(item), *evidence),
    )
    return FoundItem(detection, location, item, metadata, leaves)


def _too_new(metadata: layout.JsonObject, leaves: tree.ItemTree | None) -> list[Evidence]:
    """What no release up to the newest tested one writes, and what does not change the meaning of the rest."""
    names = sorted(metadata.keys() - _TREE_FIELDS) + sorted(leaves.unknown if leaves else ())
    return [
        Evidence(layout.TREE, f"{name!r} is not written by Orbax up to {NEWEST}: a newer writer")
        for name in names
    ]


def _presence(item: layout.OrbaxItem) -> list[Evidence]:
    seen = (
        (layout.TREE, item.tree, "the tree"),
        (layout.MSGPACK, item.msgpack, "a msgpack tree"),
        (layout.MANIFEST, item.merged, "an OCDBT database"),
    )
    rows = [Evidence(file, words) for file, there, words in seen if there]
    return rows + [Evidence(name, "the arrays of one process") for name in item.processes]


def _verdict(
    location: Location, item: layout.OrbaxItem, names: set[str], around: set[str]
) -> tuple[Verdict, str | None, layout.JsonObject]:
    """What names and `_METADATA` already tell of its health; a msgpack tree is whole, opening says what is read."""
    metadata: layout.JsonObject = {}
    try:
        if item.tree:
            metadata = layout.read_json(location.join(layout.TREE))
        if item.tree or not item.msgpack:
            opening.require_whole(location, item)
        if layout.CHECKPOINT in names:
            layout.read_json(location.join(layout.CHECKPOINT))
    except OSError:
        raise
    except WherryError as error:
        return verdict_of_damage(error.verdict), error.what, metadata
    if location.store.protocol in _RENAMELESS and layout.COMMITTED not in names | around:
        return (
            "incomplete",
            f"no {layout.COMMITTED}, which Orbax requires on {location.store.protocol}://",
            metadata,
        )
    return "ok", None, metadata


def _leaves(metadata: layout.JsonObject, location: Location) -> tree.ItemTree | None:
    """The leaves, where the tree can be read; opening says why where it cannot."""
    try:
        return tree.parse_tree(metadata, location.uri)
    except WherryError:
        return None


def _found_step(glimpse: Glimpse) -> FoundItem | None:
    """The item that a step folder stands for."""
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
        remains = marked or any(layout.uncommitted(name) for name in glimpse.entries)
        return _remains(glimpse, "no item with arrays is here") if remains else None
    name = _choose(glimpse, sorted(items))
    found = _found_item(Glimpse(glimpse.location.join(name)), items[name])
    others = [other for other in sorted(items) if other != name]
    chosen = f"the item with arrays{', chosen before ' + ', '.join(others) if others else ''}"
    evidence = (Evidence(f"../{name}", chosen), *found.detection.evidence)
    return replace(found, detection=replace(found.detection, evidence=evidence))


def _choose(glimpse: Glimpse, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    preferred = next((name for name in layout.PREFERRED_ITEMS if name in names), None)
    if preferred is None:
        raise AmbiguousError(
            f"the step has the items {', '.join(names)}",
            uri=glimpse.location.uri,
            cure=f"say --item {names[0]}",
        )
    return preferred


def _remains(glimpse: Glimpse, reason: str) -> FoundItem:
    """A folder that is Orbax's by its marks or name but has no array item."""
    seen = ", ".join(sorted(glimpse.entries)) or "nothing"
    detection = Detection(
        uri=glimpse.location.uri,
        format="orbax",
        step=step_number(layout.final_name(glimpse.location.name)),
        verdict="incomplete",
        reason=reason,
        evidence=(Evidence(".", f"named {glimpse.location.name}, holds {seen}"),),
    )
    return FoundItem(detection, glimpse.location)


def step_of(location: Location, *, inside_step: bool) -> int | None:
    """The step that the item's name states, or that of the step folder around it."""
    own = step_number(layout.final_name(location.name))
    around = layout.final_name(location.parent.name)
    return step_number(around, any_prefix=inside_step) if own is None else own
