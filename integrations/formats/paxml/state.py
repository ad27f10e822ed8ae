"""Opens a PaxML checkpoint: its state, cut to the shapes before padding, and the facts in its names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core.detection import Detection, Evidence, Kind
from wherry.core.keypath import render
from wherry.formats.format import Glimpse, Opened
from wherry.integrations.containers.orbax.detection import look
from wherry.integrations.containers.orbax.item import open_item
from wherry.integrations.containers.orbax.other_items import other_items
from wherry.integrations.containers.orbax.within import WithinReader
from wherry.integrations.containers.zarr.reader import ArrayReader
from wherry.integrations.formats.paxml import metadata
from wherry.integrations.formats.paxml import names as naming
from wherry.integrations.formats.paxml.arrays import open_arrays
from wherry.integrations.formats.paxml.layout import COMMITTED, NEWEST, Place, StateLayout
from wherry.tree.tree_reading import read_leaves, read_tree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest

NAME = "paxml"
_STEP_FILES = (metadata.FILE, COMMITTED)


def describe(place: Place) -> Detection:
    """The detection of a checkpoint with arrays, from names and small files."""
    verdict, reason = place.verdict()
    # Key paths of the arrays, as far as names and small files state them.
    glimpse = Glimpse(place.state)
    if place.layout is StateLayout.ARRAYS:
        names = [naming.split_name(name) for name, entry in glimpse.entries.items() if entry.is_dir]
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
    inner = f"{place.state.path[len(place.home.path.rstrip('/')) :].strip('/')}" or "."
    rows = [Evidence(inner, f"state stored as {place.layout.value}")]
    if version:
        rows.append(Evidence(metadata.FILE, f"version {version}"))
    elif place.damage is None:
        rows.append(Evidence(".", f"no {metadata.FOLDER} item: version 0.0, or a separate state"))
    if version > NEWEST:
        rows.append(Evidence(metadata.FILE, f"newer than {NEWEST}, the newest version that was tested"))
    if place.metadata.notes:
        rows.append(Evidence(metadata.FILE, "written by wherry"))
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
    tensors = metadata.unpad(stored, place.metadata)
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
    shardings = {path: spec.sharding for path, spec in stored.items() if spec.sharding is not None}
    extra_files = _STEP_FILES if place.home != place.state else ()
    reader = WithinReader(inner, place.home, shardings=shardings, extra_files=extra_files, padded=padded)
    found = replace(
        detection.seen(*_find_evidence(manifest, padded)), kind=kind, format_version=place.version
    )
    ignored = other_items(place.state, place.home, {metadata.FOLDER}) if place.home != place.state else ()
    return Opened(found, manifest, reader, ignored)


def _custom(place: Place, tensors: Any, padded: Iterable[KeyPath]) -> dict[str, Any]:
    fields: dict[str, Any] = {"version": place.metadata.version}
    groups, layers = naming.optimizer_groups(tensors), naming.layers(tensors)
    if groups:
        fields["optimizer_groups"] = groups
    if layers:
        fields["layers"] = layers
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
        rows.append(Evidence(metadata.FILE, f"{len(padded)} arrays are cut to their unpadded_shape"))
    return rows


def _kind(paths: Iterable[KeyPath]) -> Kind | None:
    """The kind that key paths show; None if they do not."""
    found = read_leaves(paths).whole
    return None if found == "other" else found
