"""Penzai: NamedArrays of a Penzai model, saved through Orbax; a specialisation of the format `orbax`.

Read: a label dict, a parameter tuple (`unbind_params`), a frozen model, and arrays with a JSON of axis names. Key
paths are as stored. Axis names and labels come only from disk: if Orbax lost them, the evidence states this and nothing
is guessed, because the order of axes depends on the origin of a model (trained in Penzai or imported from Hugging Face)
and sizes cannot distinguish two axes. Written: arrays as in Orbax plus that JSON, from which
`wherry.integrations.penzai.rebuild` rebuilds NamedArrays. What is on disk follows.

Labels and axis names of Penzai arrays: their form on disk, and the JSON that stores them.

Facts (Penzai 0.2.5 saved with Orbax 0.12.8): of a `NamedArray` Orbax stores only `data_array`; the names are static and
lost, and two axes of the same size may then be silently restored in swapped order. A dict from label to array keeps
labels as keys; a tuple of `ParameterValue`s (`unbind_params`) and a frozen model do not even keep these. Penzai's and
Orbax's authors recommend to store arrays plus a JSON of names. Two forms of it are read from `custom_metadata` of
`_METADATA` under `penzai`, a map from label to a row:

    {"axes": ["embedding", "projection"], "positional": 1, "metadata": {}}       names after `positional` unnamed axes
    {"axes": [null, "embedding", "projection"], "shape": […], "path": "…"}       wherry's form: one entry for each axis

wherry also writes the file `penzai.json` in the item folder (`{"version": 1, "arrays": …}`), which survives tools that
rewrite `_METADATA`. `axes` is null if the names are unknown, which differs from unnamed axes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import AxisName, TensorSpec
from wherry.errors import CorruptError, NotFoundError, UnrepresentableError, WherryError, describe_exception
from wherry.formats.format import Format, Glimpse, Holds, Opened, Options
from wherry.formats.systems import TreeForm
from wherry.integrations.containers.orbax import layout
from wherry.integrations.containers.orbax import write as orbax
from wherry.integrations.containers.orbax.detection import SIGNS, FoundItem, look, other_items
from wherry.integrations.containers.orbax.item import NAMED_ARRAY, open_item
from wherry.integrations.containers.orbax.layout import TREE, JsonObject, read_json
from wherry.integrations.containers.orbax.tree import ItemTree, read_tree
from wherry.integrations.containers.orbax.write import HANDLER, MARKER, arrays_of, checkpoint_file, item_files
from wherry.integrations.containers.zarr.metadata import STORABLE
from wherry.layout.forms import BOX, wrapped_leaves
from wherry.store.location import Location
from wherry.target.file_map import File, FileMap, Scene, map_of_chunks

FILE = "penzai.json"
FIELD = "penzai"
LABEL = "label"
_VERSION = 1
_MOST_AXES = 64  # of an array of NumPy
_LAYER = re.compile(r"[^.]+\.[^./]+")  # a layer's place in the model, and its variable
_OF_LAYERS = (".weights", ".embeddings")


def _is_labelled(manifest: Manifest) -> bool:
    """Whether arrays have axis names or labels, or key paths that are labels of Penzai's layers."""
    specs = manifest.tensors.values()
    if any(spec.axes is not None or LABEL in (spec.tags or {}) for spec in specs):
        return True
    if any(path[-1:] == (NAMED_ARRAY,) for path in manifest.tensors):
        return True
    labels = [key_label(path) or "" for path in manifest.tensors]
    return all(map(_LAYER.fullmatch, labels)) and any(one.endswith(_OF_LAYERS) for one in labels)


FORM = TreeForm(_is_labelled, "named arrays, with labels such as `model/embedder.embeddings`")


class ArrayNames(NamedTuple):
    """The known names of one array.

    Attributes:
        label: the label of its parameter.
        axes: a name for each axis, None for a positional one; None if the names are unknown.
        metadata: the parameter's own metadata.
    """

    label: str
    axes: tuple[AxisName, ...] | None
    metadata: Mapping[str, Any]


def noted_labels(location: Location, metadata: JsonObject) -> JsonObject | None:
    """Label → row, from `_METADATA` or the file next to it; None if neither has them.

    Raises:
        CorruptError: they have an unexpected form, or do not match each other.
    """
    custom = metadata.get("custom_metadata")
    inside = custom.get(FIELD) if isinstance(custom, dict) else None
    try:
        file = read_json(location.join(FILE)) if location.join(FILE).exists() else None
    except NotFoundError:
        file = None
    in_file = file.get("arrays") if file is not None else None
    if file is not None and file.get("version", 0) > _VERSION:
        raise CorruptError(
            f"unsupported version {file['version']} of {FILE}", uri=location.uri, cure="upgrade wherry"
        )
    for rows, name in ((inside, TREE), (in_file, FILE)):
        if rows is not None and not isinstance(rows, dict):
            raise CorruptError(f"expected a map of axis names in {name}", uri=location.uri)
    if inside is not None and in_file is not None and inside != in_file:
        raise CorruptError(
            f"axis names in {TREE} and {FILE} do not match",
            uri=location.uri,
            cure=f"delete {FILE} if it is older",
        )
    return in_file if inside is None else inside


def read_names(rows: JsonObject, ranks: Mapping[KeyPath, int], uri: str) -> dict[KeyPath, ArrayNames]:
    """The names of each array.

    Args:
        rows: the result of `noted_labels`.
        ranks: number of axes of each tensor.
        uri: the checkpoint, for errors.

    Raises:
        CorruptError: a row has an unexpected form, or does not match its array.
    """
    found: dict[KeyPath, ArrayNames] = {}
    for label, row in rows.items():
        try:
            named = (label, NAMED_ARRAY)
            path = parse(row["path"]) if "path" in row else named if named in ranks else (label,)
            axes = _axes(row)
            found[path] = ArrayNames(label, axes, dict(row.get("metadata") or {}))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(
                f"invalid axis names of {label!r}: {describe_exception(error)}", uri=uri
            ) from error
        if path not in ranks or (axes is not None and len(axes) != ranks[path]):
            raise CorruptError(f"axis names of {label!r} do not match any array", uri=uri, path=render(path))
    return found


def label_of(spec: TensorSpec) -> str:
    """The label of a tensor: its recorded label, the key of a label dict, else its printed key path."""
    if spec.tags and LABEL in spec.tags:
        return spec.tags[LABEL]
    return key_label(spec.path) or spec.name


def key_label(path: KeyPath) -> str | None:
    """The label from the key of a label dict; None for arrays of other trees."""
    if len(path) == 1 or (len(path) == 2 and path[1] == NAMED_ARRAY):  # noqa: PLR2004  label, data_array
        return path[0]
    return None


def rows_of(manifest: Manifest, uri: str = "") -> JsonObject:
    """Label → row for all tensors of a manifest; the inverse of `read`.

    Raises:
        UnrepresentableError: two tensors have the same label.
    """
    rows: JsonObject = {}
    known: Mapping[str, Any] = manifest.custom.get(FIELD) or {}
    for path, spec in sorted(manifest.tensors.items()):
        label = label_of(spec)
        if label in rows:
            raise UnrepresentableError(f"duplicate array label {label!r}", uri=uri, path=render(path))
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


def _axes(row: JsonObject) -> tuple[AxisName, ...] | None:
    """A name for each axis of the stored array."""
    axes = row["axes"]
    if axes is None:
        return None
    if not isinstance(axes, list):
        raise TypeError(f"expected a list of axes, got {axes!r}")
    positional = row.get("positional", 0)
    if type(positional) is not int or not 0 <= positional <= _MOST_AXES:
        raise TypeError(f"expected a number of unnamed axes, got {positional!r:.40}")
    before: list[AxisName] = [None] * positional
    return (*before, *(tuple(map(str, axis)) if isinstance(axis, list) else _name(axis) for axis in axes))


def _name(axis: object) -> str | None:
    if axis is not None and not isinstance(axis, str):
        raise TypeError(f"expected an axis name, got {axis!r}")
    return axis


_NAMED = "axis names"


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect an Orbax item that contains NamedArrays, or has axis names noted for its arrays."""
    found = look(glimpse)
    if found is None or found.item is None:
        return None
    form = _form(found.leaves) if found.leaves else None
    where = _where_noted(found)
    if form is None and where is None:
        return None
    lost = "axis names are not stored" + ("" if form == "label dict" else ", nor are labels")
    seen = Evidence(where or ".", "labels and axis names" if where else f"{form}: {lost}")
    version = _words(found.detection.format_version or "", None if where else form)
    return replace(found.detection, format="penzai", format_version=version).seen(seen)


def open_penzai(location: Location, detection: Detection) -> Opened:
    """See Format.

    Raises: the errors of opening an Orbax item; CorruptError if the axis names do not match the arrays.
    """
    opened = open_item(location, detection)
    metadata = read_tree(location)
    rows = noted_labels(location, metadata)
    manifest = opened.manifest
    ranks = {path: len(spec.shape) for path, spec in manifest.tensors.items()}
    known = read_names(rows, ranks, location.uri) if rows is not None else {}
    specs = {path: _name_axes(spec, known.get(path)) for path, spec in manifest.tensors.items()}
    # The rows are now part of the tensors; the parameters' own metadata stays.
    item = {key: value for key, value in (manifest.custom.get("item") or {}).items() if key != FIELD}
    noted = {one.label: dict(one.metadata) for one in known.values() if one.metadata}
    custom = {**manifest.custom, "item": item, FIELD: noted}
    custom = {key: value for key, value in custom.items() if value}
    found = opened.detection
    words = detection.format_version if rows is None else _words(found.format_version or "", None)
    return Opened(
        replace(found, format_version=words),
        replace(manifest, tensors=specs, custom=custom),
        opened.reader,
        other_items(location, location),
    )


def lay_out(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """See Format: an Orbax item, with labels and axis names in `_METADATA` and in a separate file."""
    files = [
        File(FILE, lambda: file_text(rows_of(manifest)).encode()),
        *item_files(manifest, options, described=_with_names),
        checkpoint_file(HANDLER, scene.created_ns, manifest),
        MARKER,
    ]
    return map_of_chunks(arrays_of(manifest, options, scene), files)


def _with_names(manifest: Manifest) -> Manifest:
    """The manifest with the rows in `custom_metadata`, which Orbax itself restores."""
    item = {**(manifest.custom.get("item") or {}), FIELD: rows_of(manifest)}
    return replace(manifest, custom={**manifest.custom, "item": item})


def prepare(manifest: Manifest, options: Options) -> Manifest:
    """The manifest in the form to write: the chunk grid of Orbax, and a label for every array.

    Raises:
        UnrepresentableError: Orbax cannot represent a part of it, or two arrays have the same label.
    """
    prepared = orbax.prepare(manifest, options)
    rows_of(prepared)
    return prepared


def version(manifest: Manifest, options: Options) -> str:
    """The format version that these options give."""
    return _words(orbax.version(manifest, options), None)


def _words(words: str, form: str | None) -> str:
    return f"{words} + {_NAMED}" if form is None else f"{form}, {words}"


def _form(leaves: ItemTree) -> str | None:
    """The kind of Penzai tree that the NamedArrays are leaves of, from the key paths."""
    arrays = wrapped_leaves(leaves.tensors, NAMED_ARRAY)
    if not arrays:
        return None
    if len(arrays) == len(leaves.tensors) and all(len(path) == 2 for path in arrays):  # noqa: PLR2004
        return "label dict"
    if not all(path[-2:-1] == (BOX,) for path in arrays):
        return "tree of NamedArrays"
    positional = () in leaves.lists and all(path[1:] == (BOX, NAMED_ARRAY) for path in arrays)
    return "parameter tuple" if positional else "frozen model"


def _where_noted(found: FoundItem) -> str | None:
    """The file with labels and axis names; if it cannot be read, opening reports the error."""
    try:
        rows = noted_labels(found.location, found.metadata)
    except OSError:
        raise
    except WherryError:
        return FILE
    if rows is None:
        return None
    custom = found.metadata.get("custom_metadata")
    return layout.TREE if isinstance(custom, dict) and FIELD in custom else FILE


def _name_axes(spec: TensorSpec, known: ArrayNames | None) -> TensorSpec:
    """A tensor with its known names; the key of a label dict is a label even without a JSON of names."""
    label = known.label if known else (key_label(spec.path) if spec.path[-1:] == (NAMED_ARRAY,) else None)
    tags = {**(spec.tags or {}), **({LABEL: label} if label else {})}
    return replace(spec, axes=known.axes if known else spec.axes, tags=tags or None)


FORMATS = (
    Format(
        name="penzai",
        title="Penzai (through Orbax)",
        detect=detect,
        signs=SIGNS,
        open=open_penzai,
        layout=lay_out,
        holds=Holds(dtypes=STORABLE, zero_size=False, values=True, empties=True, companions=True),
        refines=("orbax",),
        system="penzai",
        form=FORM,
        companion_folder=f"{layout.ASSETS}/",
        commit_members=(layout.COMMITTED,),
        options=orbax.OPTIONS,
        loaded_by="orbax-checkpoint 0.12.8, and penzai 0.2.5 with wherry.integrations.penzai.rebuild",
        version=version,
        in_store=orbax.in_store,
        prepare=prepare,
    ),
)
