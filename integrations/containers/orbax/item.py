"""Opens an Orbax item: its small files become a Manifest, its array metadata the TensorSpecs.

Only metadata is read: `_METADATA` or the msgpack tree of older generations, one listing of the store, and
the `.zarray` or `zarr.json` of each array, which OCDBT stores inside its tree. An item whose tree is lost or whose save
was never finished is refused by name.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import AxisName, Sharding, TensorSpec
from wherry.errors import CorruptError, HostileError, IncompleteError, NotFoundError, UnsupportedError
from wherry.formats.format import Glimpse, Opened
from wherry.integrations.containers.orbax import aggregate, layout, marks, partitioning, processes, tree
from wherry.integrations.containers.orbax.commit import missing_commit
from wherry.integrations.containers.zarr.arrays import Arrays, open_arrays
from wherry.integrations.containers.zarr.reader import ArrayReader, StoredArray
from wherry.mover.read import read_array
from wherry.runtime.threads import without_collection
from wherry.tree.tree_reading import read_tree

if TYPE_CHECKING:
    from wherry.integrations.containers.msgpack.contents import PlacedReader
    from wherry.storage.location import Location

_FETCH_AGAIN = "copy the checkpoint again, or use another step"


@without_collection()
def open_item(
    location: Location, detection: Detection, *, partial: bool = False, uncommitted: bool = False
) -> Opened:
    """Open one item folder.

    Args:
        location: the item.
        detection: the detection from names and first bytes.
        partial: whether to open it if some, but not all, arrays lack their metadata; these are then reported as
            absent.
        uncommitted: whether to open an item that was never committed, from the databases of its processes; a missing
            chunk is then never taken for zeros that the writer left out, since it may not have been written.

    Raises:
        IncompleteError: it was never committed, or its tree, OCDBT manifest or array metadata is missing.
        CorruptError: its metadata is invalid.
        UnsupportedError: it has a type that is not supported.
        HostileError: a name points outside the folder, or a size exceeds its limit; what the detection refused is not
            read again.
    """
    if detection.verdict == "malicious":
        raise HostileError(str(detection.reason), uri=detection.uri, cure=detection.cure)
    glimpse = Glimpse(location)
    item = layout.look_at_item(glimpse)
    if uncommitted:
        _require_tree(location, item)
    else:
        require_whole(location, item)
    assert item is not None
    metadata = tree.read_tree(location) if item.tree else {}
    leaves = aggregate.read_tree(location, item, metadata)
    parts = processes.list_processes(location, () if item.merged else item.processes)
    together = processes.merge_listings(location, parts) if parts else None
    arrays = open_arrays(location, leaves.arrays, ocdbt=item.ocdbt, listed=together)
    if arrays.without and not (partial and (arrays.found or leaves.inline)):
        raise _no_metadata(location, arrays, leaves)
    shardings, unknown = dict[str, Sharding](), frozenset[str]()
    if layout.SHARDING in glimpse.entries:
        shardings, unknown = tree.read_shardings(location, set(leaves.arrays.values()))
    own = tree.own_notes(metadata)
    stored = uncommitted or bool(metadata.get("store_array_data_equal_to_fill_value"))
    inline = placed_reader(location, leaves)
    if parts:
        reader = processes.UnmergedReader(location, arrays.found, parts, inline)
    else:
        reader = ArrayReader(
            location, arrays.found, arrays.listing, None, ocdbt=item.ocdbt, zeros_stored=stored, inline=inline
        )
    reader.lost = dict.fromkeys(arrays.without, "missing .zarray or zarr.json: shape and dtype are unknown")
    manifest = Manifest(
        tensors=_specs(arrays.found, leaves, shardings, _prng(location, glimpse, own), own_axes(own)),
        values={**tree.read_strings(location, leaves), **leaves.texts},
        empties=leaves.empties,
        lists=frozenset(leaves.lists),
        step=detection.step,
        companions=_companions(location, glimpse, arrays.found),
        custom=_custom(location, glimpse, metadata),
    )
    manifest = replace(manifest, kind=read_tree(manifest).whole_of_arrays)
    manifest, reader.arrays = _own_scalars(manifest, reader, own.get("scalars"))
    manifest, named = partitioning.with_names(manifest)
    notes = [] if item.tree else marks.wrappers(leaves.tensors)  # detection has those of `_METADATA`
    if leaves.inline:
        notes.append(Evidence(layout.MSGPACK, f"{len(leaves.inline)} arrays are stored in the msgpack tree"))
    notes += [Evidence(layout.SHARDING, f"unknown sharding type {kind}") for kind in sorted(unknown)]
    zarr3 = any(array.zarr.version == 3 for array in arrays.found.values())  # noqa: PLR2004  zarr 3
    version = layout.layout_words(item, zarr3=zarr3, arrays=bool(arrays.found))
    version = version if leaves.tensors else detection.format_version
    precise = replace(detection.seen(*notes, *named), kind=manifest.kind, format_version=version)
    return Opened(precise, manifest, reader)


def require_whole(location: Location, item: layout.OrbaxItem | None, parent: Glimpse | None = None) -> None:
    """Refuse an item that names and small files show to be unfinished.

    Args:
        location: the item.
        item: its files.
        parent: the folder that holds it, if the caller has listed it.

    Raises:
        IncompleteError: it was never committed, has no tree, or its OCDBT databases were never merged.
    """
    reason = missing_commit(location, parent)
    if reason is not None:
        raise IncompleteError(
            reason,
            uri=location.uri,
            cure=" or ".join(filter(None, ["use another step", rewrite_command(location, item)])),
        )
    if item is not None and item.processes and not item.merged:
        raise IncompleteError(
            f"file not found: {layout.MANIFEST}; the databases {', '.join(item.processes)} were never merged",
            uri=location.uri,
            cure=" or ".join(filter(None, [rewrite_command(location, item), "use another step"])),
        )
    _require_tree(location, item)


def rewrite_command(location: Location, item: layout.OrbaxItem | None) -> str:
    """The command that commits an uncommitted item, if that is complete; empty if no command can."""
    if item is None or not (item.tree or item.msgpack) or not location.store.capabilities.local:
        return ""
    name = "merge" if item.processes and not item.merged else "commit"
    return f"`wherry rewrite {shlex.quote(location.uri)} TARGET --as {shlex.quote(name)} --format orbax`"


def _require_tree(location: Location, item: layout.OrbaxItem | None) -> None:
    if item is None:
        raise IncompleteError("Orbax item not found", uri=location.uri, cure=_FETCH_AGAIN)
    if not item.tree and not item.msgpack:
        raise IncompleteError(
            f"file not found: {layout.TREE}; the tree structure is lost",
            uri=location.uri,
            cure=f"copy {layout.TREE} again, or use another step",
        )


def placed_reader(location: Location, leaves: tree.ItemTree) -> PlacedReader | None:
    """The reader of the tensors in the msgpack tree; None if there are none."""
    if not leaves.inline:
        return None
    from wherry.integrations.containers.msgpack.contents import PlacedReader

    return PlacedReader(location, leaves.places, ())


def own_axes(own: dict[str, Any]) -> dict[str, tuple[AxisName, ...]]:
    """Stored name → logical axis names, from the notes of wherry's writer."""
    rows = own.get("axes")
    if not isinstance(rows, dict):
        return {}
    return {
        str(name): tuple(tuple(map(str, axis)) if isinstance(axis, list) else axis for axis in axes)
        for name, axes in rows.items()
        if isinstance(axes, list)
    }


def _no_metadata(location: Location, arrays: Arrays, leaves: tree.ItemTree) -> Exception:
    path, name = next(iter(arrays.without.items()))
    if arrays.listing is not None and f"{name}/{layout.MANIFEST}" in arrays.listing.values:
        return UnsupportedError(
            "unsupported layout: one OCDBT database per array (Orbax 0.4.1)",
            uri=location.uri,
            path=render(path),
        )
    where = f", and {layout.MSGPACK} has no data for them" if path in leaves.aggregated else ""
    return IncompleteError(
        f"missing .zarray or zarr.json for {len(arrays.without)} arrays: shape and dtype are unknown{where}",
        uri=location.uri,
        path=render(path),
        cure=_FETCH_AGAIN,
    )


def _specs(
    arrays: dict[KeyPath, StoredArray],
    leaves: tree.ItemTree,
    shardings: dict[str, Sharding],
    prng: dict[str, str],
    axes: dict[str, tuple[AxisName, ...]],
) -> dict[KeyPath, TensorSpec]:
    stored = {
        path: TensorSpec(
            path=path,
            shape=array.zarr.shape,
            dtype=array.zarr.dtype,
            chunks=array.zarr.chunks,
            axes=_fitting(axes.get(array.name), array),
            sharding=shardings.get(array.name),
            tags={tree.PRNG: prng[array.name]} if array.name in prng else None,
        )
        for path, array in arrays.items()
    }
    return {
        path: replace(spec, tags={**(spec.tags or {}), **tree.SCALAR_TAG}) if path in leaves.scalars else spec
        for path, spec in (stored | leaves.inline).items()
    }


def _fitting(axes: tuple[AxisName, ...] | None, array: StoredArray) -> tuple[AxisName, ...] | None:
    """Noted axis names if they fit the rank of the tensor, else None."""
    return axes if axes is not None and len(axes) == len(array.zarr.shape) else None


def _prng(location: Location, glimpse: Glimpse, own: dict[str, Any]) -> dict[str, str]:
    recorded = own.get("prng")
    if isinstance(recorded, dict):
        return {str(name): str(impl) for name, impl in recorded.items()}
    return tree.read_prng_impls(location) if layout.ARRAY_METADATAS in glimpse.entries else {}


def _companions(
    location: Location, glimpse: Glimpse, arrays: dict[KeyPath, StoredArray]
) -> tuple[Companion, ...]:
    if layout.ASSETS not in glimpse.entries or any(
        array.name.split("/")[0] == layout.ASSETS for array in arrays.values()
    ):
        return ()
    return tuple(Companion(entry.name, entry.size) for entry in location.join(layout.ASSETS).walk())


def _custom(location: Location, glimpse: Glimpse, metadata: layout.JsonObject) -> dict[str, Any]:
    """Free metadata of the item and of the checkpoint around it (of the step folder, if it is an item of a step)."""
    home = location if layout.CHECKPOINT in glimpse.entries else location.parent
    try:
        around = layout.read_json(home.join(layout.CHECKPOINT)).get("custom_metadata")
    except NotFoundError:
        around = None
    found = {"item": metadata.get("custom_metadata"), "checkpoint": around}
    wrong = next((name for name, value in found.items() if not isinstance(value, dict | None)), None)
    if wrong is not None:
        raise CorruptError(
            f"invalid custom_metadata of the {wrong}: expected an object, got a {type(found[wrong]).__name__}",
            uri=home.uri, cure="restore the metadata from a backup, or use another step",
        )  # fmt: skip
    return {name: value for name, value in found.items() if value}


def _own_scalars(
    manifest: Manifest, reader: ArrayReader, recorded: object
) -> tuple[Manifest, dict[KeyPath, StoredArray]]:
    """Turn arrays that wherry's writer made of numbers back into values."""
    names = recorded if isinstance(recorded, list) else []
    paths = {path for path, array in reader.arrays.items() if array.name in names}
    values = dict(manifest.values)
    for path in sorted(paths):
        spec = manifest.tensors[path]
        if spec.shape:
            raise CorruptError(
                f"invalid number: stored as an array of shape {spec.shape}",
                uri=reader.location.uri,
                path=spec.name,
            )
        values[path] = read_array(reader, spec, ()).item()
    tensors = {path: spec for path, spec in manifest.tensors.items() if path not in paths}
    arrays = {path: array for path, array in reader.arrays.items() if path not in paths}
    return replace(manifest, tensors=tensors, values=values), arrays
