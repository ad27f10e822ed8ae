"""Opens a PaxML checkpoint: its state, cut to the shapes before padding, and the facts in its names.

Opens the state of versions 0.0 to 1.1: one zarr folder for each array; only their names show the structure.

No file lists the arrays, so a missing folder is not visible by itself. Three other sources show which arrays to expect:
`_sharding` names every saved array, `train_state_metadata` every variable, and a folder without `.zarray` has chunks of
an array whose metadata another host wrote.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from wherry.core.detection import Detection, Evidence, Kind
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import AxisName
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.format import Glimpse, Opened
from wherry.integrations.containers.orbax import layout, tree
from wherry.integrations.containers.orbax.detection import look, other_items
from wherry.integrations.containers.orbax.item import asset_companions, open_item
from wherry.integrations.containers.zarr import kvstore, listing
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr.listing import Listing
from wherry.integrations.containers.zarr.reader import ArrayReader, StoredArray, WithinReader
from wherry.integrations.formats.paxml.layout import (
    COMMITTED,
    METADATA_FILE,
    METADATA_FOLDER,
    NEWEST,
    SEPARATOR,
    Metadata,
    Place,
    StateLayout,
    layers,
    optimizer_groups,
    split_name,
    unpad,
)
from wherry.layout.tree_reading import read_leaves, read_tree
from wherry.mover.read import read_array
from wherry.store.location import Location

_CURE = "copy the missing folders from the training hosts, or use another step"
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Notes:
    """Notes of wherry's writer about a tree that PaxML's names cannot represent.

    Attributes:
        stored: the names of all folders.
        names: folder name → key path, if that is not the name split at `.`.
        lists: paths of the nodes that are sequences.
        empties: key path → kind of the empty node.
        scalars: folder names of arrays that are numbers.
        prng: folder name → implementation of a PRNG key.
        axes: folder name → names of the axes.
    """

    stored: frozenset[str] = frozenset()
    names: Mapping[str, KeyPath] = field(default_factory=dict[str, KeyPath])
    lists: frozenset[KeyPath] = frozenset()
    empties: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    scalars: frozenset[str] = frozenset()
    prng: Mapping[str, str] = field(default_factory=dict[str, str])
    axes: Mapping[str, tuple[AxisName, ...]] = field(default_factory=dict[str, "tuple[AxisName, ...]"])


def open_arrays(place: Place) -> tuple[Manifest, ArrayReader]:
    """The stored arrays, padding included, and their reader.

    Raises:
        IncompleteError: a saved array is missing, or has no metadata.
        CorruptError: the metadata of an array is invalid.
        UnsupportedError: the metadata of an array is stored under a custom name.
        HostileError: an impossible size.
    """
    location, glimpse = place.state, Glimpse(place.state)
    using = kvstore.context()
    store = listing.list_files(location)
    notes = read_notes(place.metadata, place.home.uri)
    stored = _stored_arrays(store, location)
    sharded = layout.SHARDING in glimpse.entries
    expected = notes.stored | (_sharded_names(location) if sharded else set[str]())
    _require_all(place, glimpse, stored.keys(), expected)
    arrays = {notes.names.get(name) or split_name(name): array for name, array in stored.items()}
    if len(arrays) != len(stored):
        raise CorruptError("invalid wherry notes: two arrays have the same key path", uri=place.home.uri)
    shardings = tree.read_shardings(location)[0] if sharded else {}
    reader = ArrayReader(location, arrays, store, using, ocdbt=False, zeros_stored=False)
    specs = {
        path: array.spec(
            path,
            axes=notes.axes.get(array.name),
            sharding=shardings.get(array.name),
            tags={"prng": notes.prng[array.name]} if array.name in notes.prng else None,
        )
        for path, array in arrays.items()
    }
    scalars = [path for path, array in arrays.items() if array.name in notes.scalars]
    if any(arrays[path].zarr.shape for path in scalars):
        raise CorruptError("expected a scalar, got an array with several elements", uri=place.home.uri)
    values = {path: read_array(reader, specs[path], ()).item() for path in scalars}
    for path in values:
        del specs[path], arrays[path]
    strings = layout.read_json(location.join(layout.STRINGS)) if layout.STRINGS in glimpse.entries else {}
    texts = {notes.names.get(name) or split_name(name): str(text) for name, text in strings.items()}
    manifest = Manifest(
        tensors=specs,
        values={**values, **texts},
        empties=notes.empties,
        lists=notes.lists,
        companions=asset_companions(location, glimpse, stored),
    )
    return manifest, reader


def read_notes(metadata: Metadata, uri: str) -> Notes:
    """The notes of wherry's writer in the item `metadata`.

    Raises:
        CorruptError: the notes have an unexpected form.
    """
    data = metadata.notes
    try:
        return Notes(
            stored=frozenset(map(str, data.get("stored", ()))),
            names={str(name): parse(path) for name, path in data.get("names", {}).items()},
            lists=frozenset(parse(path) for path in data.get("lists", ())),
            empties={parse(path): str(kind) for path, kind in data.get("empties", {}).items()},
            scalars=frozenset(map(str, data.get("scalars", ()))),
            prng={str(name): str(kind) for name, kind in data.get("prng", {}).items()},
            axes={
                str(name): tuple(map(tree.axis_of_json, axes)) for name, axes in data.get("axes", {}).items()
            },
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptError(f"invalid wherry notes: {error}", uri=uri) from error


def _stored_arrays(store: Listing, location: Location) -> dict[str, StoredArray]:
    found: dict[str, StoredArray] = {}
    for key in store.values:
        name, _, file = key.rpartition("/")
        version = next((version for version, one in zarr.METADATA_NAMES.items() if one == file), None)
        if version is None or not name or layout.is_reserved(name.split("/")[0]):
            continue
        data = store.read(key)
        assert data is not None
        found[name] = StoredArray(name, zarr.parse(data, version, f"{location.uri}/{name}"))
    return found


def _require_all(place: Place, glimpse: Glimpse, names: Any, expected: frozenset[str]) -> None:
    """Refuse a state that lacks arrays which are known to have been saved."""
    known = set(names)
    folders = {
        name for name, entry in glimpse.entries.items() if entry.is_dir and not layout.is_reserved(name)
    }
    without = sorted(name for name in folders - known if not any(one.startswith(f"{name}/") for one in known))
    for name in without:
        folder = place.state.join(name)
        for entry in folder.entries():
            head = (
                b"" if entry.is_dir or entry.name[:1].isdecimal() else folder.join(entry.name).read(0, 4096)
            )
            if b'"zarr_format"' in head:  # PaxML can be configured to use another name
                raise UnsupportedError(
                    f"unsupported array metadata file name {entry.name!r} (tensorstore_metadata_key)",
                    uri=folder.uri,
                    cure="rename these files to .zarray in a copy",
                )
    if without:
        raise IncompleteError(
            f"missing .zarray of {len(without)} arrays that have chunks: {_some(without)}; probably only a part of the "
            "hosts' disks was copied",
            uri=place.home.uri,
            cure=_CURE,
        )
    unpadded = {} if place.metadata.notes else place.metadata.unpadded  # wherry's own may have lists there
    lost = sorted((expected | {SEPARATOR.join(path) for path in unpadded}) - known)
    if lost:
        raise IncompleteError(
            f"missing {len(lost)} arrays that were saved: {_some(lost)}", uri=place.home.uri, cure=_CURE
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _sharded_names(location: Location) -> set[str]:
    """The arrays that `_sharding` names; the oldest releases wrote their names unencoded."""
    names: set[str] = set()
    for key in layout.read_json(location.join(layout.SHARDING)):
        try:
            names.add(base64.b64decode(key, altchars=b"-_", validate=True).decode())
        except (binascii.Error, ValueError):
            names.add(key)
    return names


NAME = "paxml"


def describe(place: Place) -> Detection:
    """The detection of a checkpoint with arrays, from names and small files."""
    verdict, reason = place.verdict()
    # Key paths of the arrays, as far as names and small files state them.
    glimpse = Glimpse(place.state)
    if place.layout is StateLayout.ARRAYS:
        names = [split_name(name) for name, entry in glimpse.entries.items() if entry.is_dir]
    else:
        item = look(glimpse)
        names = list(item.leaves.arrays) if item is not None and item.leaves is not None else []
    writer = f"paxml (checkpoint version {place.metadata.version:.1f})"
    if place.metadata.notes:
        writer = f"wherry {place.metadata.notes.get('version')} (as {writer})"
    return Detection(
        uri=place.home.uri,
        format=NAME,
        format_version=place.version,
        writer=writer,
        step=place.step,
        kind=_kind(names),
        verdict=verdict,
        reason=reason,
        evidence=tuple(evidence(place)),
    )


def evidence(place: Place) -> list[Evidence]:
    """Evidence that a checkpoint is PaxML's, and of its version."""
    version = place.metadata.version
    rows = [Evidence(place.inner or ".", f"state stored as {place.layout.value}")]
    if version:
        rows.append(Evidence(METADATA_FILE, f"version {version}"))
    elif place.damage is None:
        rows.append(Evidence(".", f"no {METADATA_FOLDER} item: version 0.0, or a separate state"))
    if version > NEWEST:
        rows.append(Evidence(METADATA_FILE, f"newer than {NEWEST}, the newest version that was tested"))
    if place.metadata.notes:
        rows.append(Evidence(METADATA_FILE, "written by wherry"))
    return rows


def open_place(place: Place, detection: Detection) -> Opened:
    """Open the checkpoint.

    Raises:
        DamagedError: a part is missing or invalid.
        UnsupportedError: an unsupported form.
        HostileError: an impossible name or size.
    """
    place.require_committed()
    if place.layout is StateLayout.ARRAYS:
        manifest, inner = open_arrays(place)
    else:
        item = look(Glimpse(place.state))
        assert item is not None
        opened = open_item(place.state, item.detection)
        assert isinstance(opened.reader, ArrayReader)
        manifest, inner = opened.manifest, opened.reader
    stored = manifest.tensors
    tensors = unpad(stored, place.metadata)
    padded = {path: stored[path] for path, spec in tensors.items() if spec.shape != stored[path].shape}
    noted, custom = place.metadata.notes.get("kind"), place.metadata.notes.get("custom")
    noted = noted if noted in ("params", "train-state", "other") else None
    custom = custom if isinstance(custom, dict) else {}
    kind = _kind(tensors) or noted or read_tree(manifest).whole_of_arrays
    manifest = replace(
        manifest,
        tensors=tensors,
        step=detection.step,
        kind=kind,
        custom={**manifest.custom, **custom, NAME: _custom(place, tensors, padded)},
    )
    parts = {place.inner: place.state}
    if place.inner:
        parts |= {name: place.home.join(name) for name in (METADATA_FILE, COMMITTED)}
    reader = WithinReader(inner, parts, stored, padded=padded)
    found = replace(
        detection.seen(*_find_evidence(manifest, padded)), kind=kind, format_version=place.version
    )
    ignored = other_items(place.state, place.home, {METADATA_FOLDER}) if place.inner else ()
    return Opened(found, manifest, reader, ignored)


def _custom(place: Place, tensors: Any, padded: Iterable[KeyPath]) -> dict[str, Any]:
    fields: dict[str, Any] = {"version": place.metadata.version}
    groups, stack = optimizer_groups(tensors), layers(tensors)
    if groups:
        fields["optimizer_groups"] = groups
    if stack:
        fields["layers"] = stack
    cut = sorted(render(path) for path in padded)
    return fields | ({"padded": cut} if cut else {})


def _find_evidence(manifest: Manifest, padded: dict[KeyPath, Any]) -> list[Evidence]:
    fields = manifest.custom[NAME]
    rows: list[Evidence] = []
    moments = [name for name, row in fields.get("optimizer_groups", {}).items() if len(row["fields"]) > 1]
    if moments:
        rows.append(Evidence(".", f"optimizer moments in {', '.join(moments)}"))
    if "layers" in fields:
        form = "repeated: stacked on axis 0" if fields["layers"]["repeated"] else "not repeated: one by one"
        rows.append(Evidence(".", f"layers are {form}"))
    if padded:
        rows.append(Evidence(METADATA_FILE, f"{len(padded)} arrays are cut to their unpadded_shape"))
    return rows


def _kind(paths: Iterable[KeyPath]) -> Kind | None:
    """The kind that key paths show; None if they do not."""
    found = read_leaves(paths).whole
    return None if found == "other" else found
