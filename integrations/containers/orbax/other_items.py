"""What a step holds apart from the item that is read: other items, checkpointables of the v1 API, and files.

An item with arrays is taken for weights, unless its name or its key paths say that it is the state of an optimizer or
of a run. Items without arrays hold JSON, strings, metrics or the position of a data loader. A folder is a step if it
has the files of one or a step's name; else only folders with the usual names of items are items. A folder with its own
`_CHECKPOINT_METADATA` is a checkpoint of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.account import FILES, ITEMS, TRAINING_STATE, IgnoredEntry, ignored_file
from wherry.core.steps import step_number
from wherry.errors import WherryError
from wherry.formats.format import Glimpse
from wherry.integrations.containers.orbax import aggregate, layout, tree
from wherry.storage.folders import is_staging
from wherry.storage.sidecar import OWN_NAMES
from wherry.tree.tree_reading import read_leaves

if TYPE_CHECKING:
    from collections.abc import Collection

    from wherry.core.keypath import KeyPath
    from wherry.storage.location import Location
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
        _entry(item.parent, f"{prefix}{name}", entry, v1=layout.V1_MARKER in step.entries)
        for name, entry in step.entries.items()
        if name not in skipped
        and not name.startswith(".")
        and not is_staging(name)
        and not layout.is_uncommitted(name)
        if whole or (entry.is_dir and name in layout.PREFERRED_ITEMS)
    ]
    return tuple(row for row in rows if row is not None)


def _entry(step: Location, name: str, entry: Entry, *, v1: bool) -> IgnoredEntry | None:
    """The entry of a file or folder of a step; None for a checkpoint of its own."""
    word = "a checkpointable" if v1 else "an item"
    if not entry.is_dir:
        return ignored_file(name, FILES, "a file of the step", "it belongs to no item")
    place = step.join(entry.name)
    if place.join(layout.CHECKPOINT).exists():
        return None
    item = layout.look_at_item(Glimpse(place))
    paths = _paths(place, item) if item is not None and item.has_arrays else []
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
        return list(aggregate.read_tree(place, item, metadata).tensors)
    except WherryError:
        return None
