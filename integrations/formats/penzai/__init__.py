"""Penzai: NamedArrays of a Penzai model, saved through Orbax; a specialisation of the format `orbax`.

Read: a label dict, a parameter tuple (`unbind_params`), a frozen model, and arrays with a JSON of axis names. Key
paths are as stored. Axis names and labels come only from disk: if Orbax lost them, the evidence states this and nothing
is guessed, because the order of axes depends on the origin of a model (trained in Penzai or imported from Hugging Face)
and sizes cannot distinguish two axes. Written: arrays as in Orbax plus that JSON, from which
`wherry.integrations.penzai.rebuild` rebuilds NamedArrays. `names.py` describes the files on disk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core.detection import Evidence
from wherry.errors import WherryError
from wherry.formats.format import Format, Holds, Opened
from wherry.integrations.containers.orbax import layout
from wherry.integrations.containers.orbax import row as orbax
from wherry.integrations.containers.orbax.detection import FoundItem, look
from wherry.integrations.containers.orbax.item import open_item
from wherry.integrations.containers.orbax.marks import BOX, NAMED_ARRAY, wrapped_leaves
from wherry.integrations.containers.orbax.other_items import other_items
from wherry.integrations.containers.orbax.small_files import HANDLER, MARKER, checkpoint_file
from wherry.integrations.containers.orbax.tree import read_tree
from wherry.integrations.containers.zarr.metadata import STORABLE
from wherry.integrations.formats.penzai import names
from wherry.target.file_map import File, map_of_chunks

if TYPE_CHECKING:
    from wherry.core.detection import Detection
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.format import Glimpse, Options
    from wherry.integrations.containers.orbax.tree import ItemTree
    from wherry.storage.location import Location
    from wherry.target.file_map import FileMap, Scene

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
    rows = names.noted_labels(location, metadata)
    manifest = opened.manifest
    ranks = {path: len(spec.shape) for path, spec in manifest.tensors.items()}
    known = names.read(rows, ranks, location.uri) if rows is not None else {}
    specs = {path: _name_axes(spec, known.get(path)) for path, spec in manifest.tensors.items()}
    # The rows are now part of the tensors; the parameters' own metadata stays.
    item = {key: value for key, value in (manifest.custom.get("item") or {}).items() if key != names.FIELD}
    noted = {one.label: dict(one.metadata) for one in known.values() if one.metadata}
    custom = {**manifest.custom, "item": item, names.FIELD: noted}
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
    from wherry.integrations.containers.orbax.item_map import arrays_of, item_files  # zstandard

    files = [
        File(names.FILE, lambda: names.file_text(names.rows_of(manifest)).encode()),
        *item_files(manifest, options, described=_with_names),
        checkpoint_file(HANDLER, scene.created_ns, manifest),
        MARKER,
    ]
    return map_of_chunks(arrays_of(manifest, options, scene), files)


def _with_names(manifest: Manifest) -> Manifest:
    """The manifest with the rows in `custom_metadata`, which Orbax itself restores."""
    item = {**(manifest.custom.get("item") or {}), names.FIELD: names.rows_of(manifest)}
    return replace(manifest, custom={**manifest.custom, "item": item})


def prepare(manifest: Manifest, options: Options) -> Manifest:
    """The manifest in the form to write: the chunk grid of Orbax, and a label for every array.

    Raises:
        UnrepresentableError: Orbax cannot represent a part of it, or two arrays have the same label.
    """
    prepared = orbax.prepare(manifest, options)
    names.rows_of(prepared)
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
        rows = names.noted_labels(found.location, found.metadata)
    except OSError:
        raise
    except WherryError:
        return names.FILE
    if rows is None:
        return None
    custom = found.metadata.get("custom_metadata")
    return layout.TREE if isinstance(custom, dict) and names.FIELD in custom else names.FILE


def _name_axes(spec: TensorSpec, known: names.ArrayNames | None) -> TensorSpec:
    """A tensor with its known names; the key of a label dict is a label even without a JSON of names."""
    label = (
        known.label if known else (names.key_label(spec.path) if spec.path[-1:] == (NAMED_ARRAY,) else None)
    )
    tags = {**(spec.tags or {}), **({names.LABEL: label} if label else {})}
    return replace(spec, axes=known.axes if known else spec.axes, tags=tags or None)


FORMATS = (
    Format(
        name="penzai",
        title="Penzai (through Orbax)",
        detect=detect,
        signs=orbax.SIGNS,
        open=open_penzai,
        layout=lay_out,
        holds=Holds(dtypes=STORABLE, zero_size=False, values=True, empties=True, companions=True),
        refines=("orbax",),
        system="penzai",
        form=names.FORM,
        companion_folder=f"{layout.ASSETS}/",
        commit_members=(layout.COMMITTED,),
        options=orbax.OPTIONS,
        loaded_by="orbax-checkpoint 0.12.8, and penzai 0.2.5 with wherry.integrations.penzai.rebuild",
        version=version,
        in_store=orbax.in_store,
        prepare=prepare,
    ),
)
