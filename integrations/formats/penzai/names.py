"""Labels and axis names of Penzai arrays: what is on disk of them, and the JSON that keeps them.

Facts (Penzai 0.2.5 saved with Orbax 0.12.8 and looked at): of a `NamedArray` Orbax keeps `data_array` alone; the names
are static and lost, and two axes of one size are then restored swapped without a word. A dict from label to array
keeps labels as keys; a tuple of `ParameterValue`s (`unbind_params`) and a frozen model keep not even these. The way
that Penzai's and Orbax's authors advise is arrays plus a JSON of names. Two forms of it are read from
`custom_metadata` of `_METADATA` under `penzai`, a map from label to a row:

    {"axes": ["embedding", "projection"], "positional": 1, "metadata": {}}       names after `positional` unnamed axes
    {"axes": [null, "embedding", "projection"], "shape": […], "path": "…"}       ours: one entry for each axis

Ours is also the file `penzai.json` in the item folder (`{"version": 1, "arrays": …}`), which survives tools that
rewrite `_METADATA`. `axes` is null where nothing is known of them, which is not the same as unnamed axes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.keypath import KeyPath, parse, render
from wherry.errors import CorruptError, NotFoundError, UnrepresentableError
from wherry.integrations.containers.orbax.layout import TREE, JsonObject, read_json
from wherry.integrations.containers.orbax.marks import NAMED_ARRAY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import AxisName, TensorSpec
    from wherry.storage.location import Location

FILE = "penzai.json"
FIELD = "penzai"
LABEL = "label"
_VERSION = 1


class ArrayNames(NamedTuple):
    """What is known of one array.

    Attributes:
        label: the label of its parameter.
        axes: a name for each axis, None for a positional one; None where nothing is known.
        metadata: the parameter's own metadata.
    """

    label: str
    axes: tuple[AxisName, ...] | None
    metadata: Mapping[str, Any]


def noted(location: Location, metadata: JsonObject) -> JsonObject | None:
    """Label → row, as `_METADATA` or the file beside it says; None where neither does.

    Raises:
        CorruptError: they are not of that form, or contradict each other.
    """
    custom = metadata.get("custom_metadata")
    inside = custom.get(FIELD) if isinstance(custom, dict) else None
    try:
        file = read_json(location.join(FILE)) if location.join(FILE).exists() else None
    except NotFoundError:
        file = None
    beside = file.get("arrays") if file is not None else None
    if file is not None and file.get("version", 0) > _VERSION:
        raise CorruptError(
            f"{FILE} of version {file['version']}", uri=location.uri, cure="use a newer wherry"
        )
    for rows, name in ((inside, TREE), (beside, FILE)):
        if rows is not None and not isinstance(rows, dict):
            raise CorruptError(f"{name} has axis names that are not a map", uri=location.uri)
    if inside is not None and beside is not None and inside != beside:
        raise CorruptError(
            f"{TREE} and {FILE} name other axes", uri=location.uri, cure=f"remove {FILE} if it is older"
        )
    return beside if inside is None else inside


def read(rows: JsonObject, ranks: Mapping[KeyPath, int], uri: str) -> dict[KeyPath, ArrayNames]:
    """The names of each array.

    Args:
        rows: what `noted` gave.
        ranks: number of axes of each tensor.
        uri: the checkpoint, for errors.

    Raises:
        CorruptError: a row is not of the form, or does not fit its array.
    """
    found: dict[KeyPath, ArrayNames] = {}
    for label, row in rows.items():
        try:
            path = parse(row["path"]) if "path" in row else _path_of(label, ranks)
            axes = _axes(row)
            found[path] = ArrayNames(label, axes, dict(row.get("metadata") or {}))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"the axis names of {label!r} cannot be read: {error!r}", uri=uri) from error
        if path not in ranks or (axes is not None and len(axes) != ranks[path]):
            raise CorruptError(f"axis names of {label!r} fit no array", uri=uri, path=render(path))
    return found


def label_of(spec: TensorSpec) -> str:
    """The label of a tensor: the one it is known by, the key of a label dict, else its printed key path."""
    if spec.tags and LABEL in spec.tags:
        return spec.tags[LABEL]
    return key_label(spec.path) or spec.name


def key_label(path: KeyPath) -> str | None:
    """The label that a label dict has as key; None for arrays of other trees."""
    if len(path) == 1 or (len(path) == 2 and path[1] == NAMED_ARRAY):  # noqa: PLR2004  label, data_array
        return path[0]
    return None


def rows_of(manifest: Manifest, uri: str = "") -> JsonObject:
    """Label → row for everything that a manifest holds; the inverse of `read`.

    Raises:
        UnrepresentableError: two tensors have one label.
    """
    rows: JsonObject = {}
    known: Mapping[str, Any] = manifest.custom.get(FIELD) or {}
    for path, spec in sorted(manifest.tensors.items()):
        label = label_of(spec)
        if label in rows:
            raise UnrepresentableError(f"two arrays have the label {label!r}", uri=uri, path=render(path))
        axes = None if spec.axes is None else [list(a) if isinstance(a, tuple) else a for a in spec.axes]
        rows[label] = {
            "axes": axes,
            "shape": list(spec.shape),
            "path": render(path),
            "metadata": known.get(label, {}),
        }
    return rows


def file_text(rows: JsonObject) -> str:
    """The file `penzai.json`."""
    return json.dumps({"version": _VERSION, "arrays": rows})


def _path_of(label: str, ranks: Mapping[KeyPath, int]) -> KeyPath:
    return (label, NAMED_ARRAY) if (label, NAMED_ARRAY) in ranks else (label,)


def _axes(row: JsonObject) -> tuple[AxisName, ...] | None:
    """A name for each axis of the stored array."""
    axes = row["axes"]
    if axes is None:
        return None
    if not isinstance(axes, list):
        raise TypeError(f"axes {axes!r}")
    before: list[AxisName] = [None] * int(row.get("positional", 0))
    return (*before, *(tuple(map(str, axis)) if isinstance(axis, list) else _name(axis) for axis in axes))


def _name(axis: object) -> str | None:
    if axis is not None and not isinstance(axis, str):
        raise TypeError(f"axis {axis!r}")
    return axis
