"""Finds and opens a MaxText checkpoint: the step folder around the item `items`.

Facts (MaxText 0.2.5 with Orbax 0.12.8; older releases from their source): `<run>/checkpoints/<step>/` holds
`_CHECKPOINT_METADATA`, `items/` and, with grain, `iter/`. `load_parameters_path` points at `<step>/items`, so a
separate item is a checkpoint too. Emergency managers name the item `state`. Since mid-2026 `custom_metadata` of the
step has `scan_layers`; the tree always determines it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wherry.core.detection import Detection, Evidence, Kind
from wherry.errors import WherryError
from wherry.formats.format import Opened
from wherry.integrations.containers.orbax import aggregate, detection, layout, tree
from wherry.integrations.containers.orbax.item import open_item
from wherry.integrations.containers.orbax.other_items import other_items
from wherry.integrations.containers.orbax.tree import own_notes
from wherry.integrations.containers.orbax.within import WithinReader
from wherry.integrations.containers.zarr.reader import ArrayReader
from wherry.integrations.formats.maxtext import shape
from wherry.tree.tree_reading import read_leaves

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.formats.format import Glimpse
    from wherry.storage.location import Location

ITEM = "items"
NAME = "maxtext"
_ITEMS = (ITEM, "state")
_STEP_FILES = (layout.CHECKPOINT, layout.COMMITTED)


@dataclass(frozen=True, slots=True)
class MaxTextStep:
    """A MaxText checkpoint.

    Attributes:
        home: the step folder, or the item if it is separate.
        item: the Orbax item in the folder of the arrays.
        shape: structure of its tree; None for another kind of tree that wherry wrote in MaxText's layout.
        scan_layers: the value in the step's `custom_metadata`, if any.
        kind: parameters or a train state, from the tree; None for another kind of tree.
    """

    home: Location
    item: detection.FoundItem
    shape: shape.Shape | None
    scan_layers: bool | None = None
    kind: Kind | None = None

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Why this is a MaxText checkpoint, and the form of its layers."""
        place = _relative(self.home, self.item.location)
        rows: list[Evidence] = []
        if self.shape is None:
            rows.append(Evidence(f"{place}{layout.TREE}", "written by wherry as a MaxText checkpoint"))
        else:
            root = "/".join(self.shape.root) or "the root"
            rows.append(Evidence(f"{place}{layout.TREE}", f"a MaxText decoder below {root}"))
            rows.append(Evidence(f"{place}{layout.TREE}", _scan_words(self.shape)))
        if self.scan_layers is not None:
            rows.append(
                Evidence(
                    layout.CHECKPOINT, f"custom_metadata has scan_layers={str(self.scan_layers).lower()}"
                )
            )
        return tuple(rows)

    @property
    def form(self) -> bool | None:
        """Whether layers are scanned: from the tree, else from the record."""
        return self.scan_layers if self.shape is None or self.shape.scanned is None else self.shape.scanned


def version_words(arrays: str, scanned: bool | None) -> str:
    """The format version: the storage of the arrays, and whether layers are scanned."""
    words = {True: ", scan_layers", False: ", unscanned", None: ""}
    return f"{NAME}, {arrays}{words[scanned]}"


def find(glimpse: Glimpse) -> MaxTextStep | None:
    """The MaxText checkpoint at a location, or None.

    Raises:
        AmbiguousError: a step has several items with arrays and none has a usual name.
    """
    item = detection.look(glimpse)
    if item is None or item.item is None:
        return None
    home, place = glimpse.location, item.location
    if home == place:
        in_step = place.name in _ITEMS and place.parent.join(layout.CHECKPOINT).exists()
        home = place.parent if in_step else place
    scan_layers = _recorded_scan(home)
    paths = _paths(item)
    confirmed = scan_layers is not None or item.location.name == ITEM
    root = shape.parameter_root(paths, confirmed=confirmed)
    if root is not None:
        # The decoder shows parameters; moments make them a train state.
        kind: Kind = "train-state" if read_leaves(paths).optimizer else "params"
        return MaxTextStep(home, item, shape.look(paths, root), scan_layers, kind)
    ours = own_notes(item.metadata).get("format") == NAME
    return MaxTextStep(home, item, None, scan_layers) if ours else None


def open_found(found: MaxTextStep) -> Opened:
    """Open the result of `find`. Raises the errors of opening an Orbax item."""
    opened = open_item(found.item.location, found.item.detection)
    assert isinstance(opened.reader, ArrayReader)
    manifest = opened.manifest
    seen = shape.look(manifest.tensors, found.shape.root) if found.shape else None
    if seen is not None:
        custom = {**manifest.custom, NAME: seen.to_json()}
        manifest = replace(manifest, kind=found.kind or manifest.kind, custom=custom)
    item = replace(found.item, detection=opened.detection)
    shardings = {path: spec.sharding for path, spec in manifest.tensors.items() if spec.sharding is not None}
    extra_files = _STEP_FILES if found.home != found.item.location else ()
    reader = WithinReader(opened.reader, found.home, shardings=shardings, extra_files=extra_files)
    ignored = other_items(found.item.location, found.home)
    return Opened(describe_step(replace(found, shape=seen, item=item)), manifest, reader, ignored)


def describe_step(found: MaxTextStep) -> Detection:
    """Turn Orbax's detection of the item into one of the MaxText checkpoint around it."""
    item, place = found.item.detection, _relative(found.home, found.item.location)
    evidence = [replace(row, file=_below(place, row.file)) for row in item.evidence]
    return replace(
        item,
        uri=found.home.uri,
        format=NAME,
        format_version=version_words(item.format_version or "", found.form),
        kind=found.kind or item.kind,
        evidence=(*found.evidence, *evidence),
    )


def _paths(item: detection.FoundItem) -> list[KeyPath]:
    """Key paths of the arrays; of a msgpack tree only if the item has MaxText's name."""
    location = item.location
    try:
        if item.leaves is not None:
            return list(item.leaves.arrays)
        if item.metadata:
            return list(tree.parse_tree(item.metadata, location.uri).arrays)
        if item.item is not None and item.item.msgpack and location.name == ITEM:
            return list(aggregate.msgpack_tree(location.join(layout.MSGPACK)).tensors)
    except OSError:
        raise
    except WherryError:
        return []  # Orbax's own detection of the item reports the error
    return []


def _below(place: str, file: str) -> str:
    """Path of a file of the item, relative to the checkpoint."""
    if not place or file.startswith("../"):
        return file.removeprefix("../") if place else file
    return place.rstrip("/") if file == "." else f"{place}{file}"


def _recorded_scan(home: Location) -> bool | None:
    """`scan_layers` of the step's custom metadata."""
    place = home.join(layout.CHECKPOINT)
    if not place.exists():
        return None
    try:
        custom = layout.read_json(place).get("custom_metadata")
    except OSError:
        raise
    except WherryError:
        return None  # as above
    value = custom.get("scan_layers") if isinstance(custom, dict) else None
    return value if isinstance(value, bool) else None


def _relative(home: Location, item: Location) -> str:
    inner = item.path[len(home.path.rstrip("/")) :].strip("/")
    return f"{inner}/" if inner else ""


def _scan_words(seen: shape.Shape) -> str:
    if seen.mixed:
        return "both scanned and unscanned layers"
    if seen.scanned is None:
        return "no layers"
    aliases = f" (names of a faulty release: {', '.join(seen.aliases[:3])})" if seen.aliases else ""
    if not seen.scanned:
        return f"layers are unscanned: one node for each layer{aliases}"
    words = [
        f"{name.rpartition('/')[2]}" + (f": {layers} on axis {axis}" if axis is not None else "")
        for name, (axis, layers) in seen.groups.items()
    ]
    return f"layers are scanned ({', '.join(words)}){aliases}"
