"""Logical axis names of a checkpoint: the JSON that keeps what Flax's partition boxes lose on disk.

Facts (from Flax 0.12.8 with Orbax 0.12.8): of a box (`nn.Partitioned`, `LogicallyPartitioned`) only one
more key `value` is stored; names, mesh and rules are static and lost. `_sharding` has mesh axes only. The authors of
Flax and Orbax recommend free metadata, of which two forms are read from `custom_metadata` of `_METADATA`:

    "flax_partitioning": {"layers/wi/kernel": {"type": "LogicallyPartitioned", "names": ["layers", "embed", "mlp"]}}
    "version": 1, "boxes": {"params/layers/wi/kernel": {"box": "LogicallyPartitioned", "names": […], "rules": null}}

Keys are printed key paths without the box, whole or below the parameters. The names apply to every node of the tree
that holds all of these key paths with that many axes: the parameters, and the moments that mirror them. wherry writes
the first form with whole key paths, and also `rules` and `spec` (the partition spec) if they are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry.core.detection import Evidence
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import AxisName, Sharding, TensorSpec
from wherry.errors import UsageError, WherryError
from wherry.layout.axes import BOX_TAG, BOXES, axis_name, rules_of
from wherry.layout.forms import BOX, COLLECTION, wrapped_leaves

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest

FIELD = "flax_partitioning"
BOXES_FIELD = "boxes"

Rows: TypeAlias = "Mapping[KeyPath, BoxNames]"


@dataclass(frozen=True, slots=True)
class BoxNames:
    """The known facts of one box.

    Attributes:
        box: its class.
        axes: a name for each axis.
        rules: logical name → mesh axes, if they were kept.
        spec: the partition spec, if it was kept.
    """

    box: str
    axes: tuple[AxisName, ...]
    rules: tuple[tuple[str, AxisName], ...] = ()
    spec: tuple[AxisName, ...] = ()


def noted_boxes(item: Any) -> dict[KeyPath, BoxNames]:
    """The rows of free metadata, by key path without the box; empty if it has none.

    Raises:
        UsageError: a row has an unknown form.
    """
    if not isinstance(item, dict):
        return {}
    rows = item.get(FIELD, item.get(BOXES_FIELD) if item.get("version") == 1 else None)
    if not isinstance(rows, dict):
        return {}
    return {parse(key): _names(row) for key, row in rows.items()}


def with_names(manifest: Manifest) -> tuple[Manifest, tuple[Evidence, ...]]:
    """A manifest with the axis names from its free metadata, and the evidence of them.

    Metadata that cannot be read, or that fits no tree, becomes evidence and gives no names.
    """
    try:
        rows = noted_boxes(manifest.custom.get("item"))
    except WherryError as error:
        return manifest, (Evidence(FIELD, f"cannot read axis names: {error.what}"),)
    if not rows:
        return manifest, ()
    found = place_boxes(rows, manifest.tensors)
    if not found:
        return manifest, (Evidence(FIELD, "axis names do not fit the tree"),)
    tensors = dict(manifest.tensors)
    for path, names in found.items():
        spec = tensors[path]
        sharding = Sharding(spec=names.spec, rules=names.rules) if names.rules else spec.sharding
        tags = {**(spec.tags or {}), BOX_TAG: names.box}
        tensors[path] = replace(spec, axes=names.axes, sharding=sharding, tags=tags)
    seen = Evidence(FIELD, f"{len(found)} of {len(tensors)} arrays have logical axis names")
    return replace(manifest, tensors=tensors), (seen,)


def place_boxes(rows: Rows, tensors: Mapping[KeyPath, TensorSpec]) -> dict[KeyPath, BoxNames]:
    """The tensors that the rows apply to.

    Args:
        rows: names by key path, whole or below some node.
        tensors: of the checkpoint, boxed or not.
    """
    plain = _plain(tensors)
    found: dict[KeyPath, BoxNames] = {}
    below: Rows = {}
    if all(key[:1] == (COLLECTION,) for key in rows):  # they are also tried without the collection
        below = {key[1:]: names for key, names in rows.items()}
    for some in (rows, below):
        for root in _roots(some, plain, tensors):
            found.update({plain[(*root, *key)]: names for key, names in some.items()})
    return found


def rows_of(manifest: Manifest) -> dict[str, Any]:
    """The rows of all boxed tensors, as they are stored; the inverse of `noted_boxes` and `place_boxes`."""
    rows = {path: manifest.tensors[stored] for path, stored in _plain(manifest.tensors).items()}
    return {
        render(path): _row(spec)
        for path, spec in sorted(rows.items())
        if _box(spec) and spec.axes is not None
    }


def item_metadata(manifest: Manifest) -> dict[str, Any]:
    """The free metadata of an item with the names of its boxes; unchanged if it already has them."""
    item: dict[str, Any] = dict(manifest.custom.get("item") or {})
    wanted = {
        path: _known_box(spec)
        for path, spec in manifest.tensors.items()
        if _box(spec) and spec.axes is not None
    }
    if not wanted:
        return item
    try:
        if place_boxes(noted_boxes(item), manifest.tensors) == wanted:
            return item
    except WherryError:
        item.pop(FIELD, None)  # it cannot be read, so it gave no names, and is replaced
    if item.get("version") == 1 and BOXES_FIELD in item:
        item = {key: value for key, value in item.items() if key not in ("version", BOXES_FIELD)}
    return {**item, FIELD: rows_of(manifest)}


def rules_only(sharding: Sharding | None) -> Sharding | None:
    """The part of a sharding that is stored with the names: that from rules. Devices are not stored here."""
    return Sharding(spec=sharding.spec, rules=sharding.rules) if sharding and sharding.rules else None


def _names(row: Any) -> BoxNames:
    box = row.get("type", row.get("box", BOXES[0])) if isinstance(row, dict) else None
    if box not in BOXES or not isinstance(row.get("names"), list):
        raise UsageError(f"invalid axis names {row!r}", cure=f"write rows of type and names in {FIELD}")
    return BoxNames(
        str(box),
        tuple(axis_name(name) for name in row["names"]),
        rules_of(row.get("rules") or []),
        tuple(axis_name(name) for name in row.get("spec") or ()),
    )


def _row(spec: TensorSpec) -> dict[str, Any]:
    known = _known_box(spec)
    row: dict[str, Any] = {"type": known.box, "names": _json(known.axes)}
    row |= {"rules": [[name, *_json((axes,))] for name, axes in known.rules]} if known.rules else {}
    return row | ({"spec": _json(known.spec)} if known.spec else {})


def _json(axes: tuple[AxisName, ...]) -> list[Any]:
    return [list(axis) if isinstance(axis, tuple) else axis for axis in axes]


def _known_box(spec: TensorSpec) -> BoxNames:
    """The box of a tensor, from its spec; the partition spec counts only if it is from rules."""
    rules = spec.sharding.rules if spec.sharding else ()
    return BoxNames(
        _box(spec) or BOXES[0], spec.axes or (), rules, spec.sharding.spec if spec.sharding and rules else ()
    )


def _box(spec: TensorSpec) -> str | None:
    return (spec.tags or {}).get(BOX_TAG)


def _plain(tensors: Mapping[KeyPath, TensorSpec]) -> dict[KeyPath, KeyPath]:
    """Key path without the box → key path."""
    boxed = wrapped_leaves(tensors, BOX)
    return {path[:-1] if path in boxed else path: path for path in tensors}


def _roots(
    rows: Rows, plain: Mapping[KeyPath, KeyPath], tensors: Mapping[KeyPath, TensorSpec]
) -> list[KeyPath]:
    """The nodes below which every row matches an array with as many axes as it has names."""
    if not rows:
        return []
    first = next(iter(rows))
    ends = (path[: len(path) - len(first)] for path in plain if path[len(path) - len(first) :] == first)

    def fits(root: KeyPath, key: KeyPath, names: BoxNames) -> bool:
        stored = plain.get((*root, *key))
        return stored is not None and len(tensors[stored].shape) == len(names.axes)

    return sorted(root for root in ends if all(fits(root, key, names) for key, names in rows.items()))
