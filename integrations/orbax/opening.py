"""Opening an Orbax item: its small files become a Manifest, its array metadata the TensorSpecs.

Everything here is metadata: `_METADATA` for the tree, one listing of the store, and the `.zarray` or `zarr.json` of
each array, which OCDBT keeps inside its tree. An item whose tree is lost, whose save was never finished or whose
arrays lie in the msgpack tree of the oldest generations is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.detection import Detection, Evidence
from wherry.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError
from wherry.format import Glimpse, Opened
from wherry.integrations.containers import zarr
from wherry.integrations.orbax import layout, tree
from wherry.integrations.orbax.reader import OrbaxReader, StoredArray
from wherry.keypath import KeyPath, render
from wherry.manifest import Companion, Manifest
from wherry.tensorspec import Sharding, TensorSpec

if TYPE_CHECKING:
    import tensorstore as ts

    from wherry.integrations.containers.listing import Listing
    from wherry.location import Location

_FETCH_AGAIN = "copy the checkpoint again, or use another step"


def open_item(location: Location, detection: Detection) -> Opened:
    """Open one item folder.

    Raises:
        IncompleteError: it was never committed, or its tree, its OCDBT manifest or array metadata are missing.
        CorruptError: its metadata contradicts itself.
        UnsupportedError: it is of a generation, or holds a type, that is not read.
        HostileError: a name in it points outside, or a size is absurd.
    """
    glimpse = Glimpse(location)
    item = layout.look_at_item(glimpse)
    require_whole(location, item)
    assert item is not None
    metadata = layout.read_json(location.join(layout.TREE))
    leaves = tree.parse_tree(metadata, location.uri)
    listing, using = _list(location, item, leaves)
    arrays = _arrays(location, listing, leaves, item)
    shardings, unknown = (
        tree.read_shardings(location) if layout.SHARDING in glimpse.entries else ({}, frozenset())
    )
    own = own_notes(metadata)
    reader = OrbaxReader(
        location,
        arrays,
        listing,
        using,
        ocdbt=item.ocdbt,
        zeros_stored=bool(metadata.get("store_array_data_equal_to_fill_value")),
    )
    manifest = Manifest(
        tensors=_specs(arrays, shardings, _prng(location, glimpse, own)),
        values=tree.read_strings(location, leaves),
        empties=leaves.empties,
        lists=frozenset(leaves.lists),
        step=detection.step,
        kind=tree.kind_of(arrays, leaves.strings),
        companions=_companions(location, glimpse, arrays),
        custom=_custom(location, glimpse, metadata),
    )
    manifest, reader.arrays = _own_scalars(manifest, reader, own.get("scalars"))
    notes = tuple(
        Evidence(layout.SHARDING, f"sharding type {kind} is not understood") for kind in sorted(unknown)
    )
    zarr3 = any(array.zarr.version == 3 for array in arrays.values())  # noqa: PLR2004  zarr 3
    version = layout.layout_words(item, zarr3=zarr3) if arrays else detection.format_version
    return Opened(
        replace(detection.seen(*notes), kind=manifest.kind, format_version=version), manifest, reader
    )


def require_whole(location: Location, item: layout.Item | None) -> None:
    """Refuse what names and the listing of the folder already show to be unfinished or of a form that is not read.

    Raises:
        IncompleteError: never committed, no `_METADATA` beside arrays, or OCDBT databases that were never merged.
        UnsupportedError: a msgpack tree without `_METADATA`.
    """
    if any(layout.uncommitted(name) for name in (location.name, location.parent.name)):
        raise IncompleteError(
            "the folder has the suffix of a save that was never committed",
            uri=location.uri,
            cure="use another step",
        )
    if item is None:
        raise IncompleteError("no Orbax item is here", uri=location.uri, cure=_FETCH_AGAIN)
    if item.processes and not item.merged:
        raise IncompleteError(
            f"no {layout.MANIFEST}: the per-process stores {', '.join(item.processes)} were never merged",
            uri=location.uri,
            cure="the arrays can be salvaged from the per-process stores; to train on, use another step",
        )
    if not item.tree and item.msgpack:
        raise UnsupportedError(
            "a msgpack tree without _METADATA (Orbax before 0.4.4) is not read by this version",
            uri=location.uri,
            cure="restore and save it once with a current Orbax",
        )
    if not item.tree:
        raise IncompleteError(
            f"no {layout.TREE}: the tree structure is lost",
            uri=location.uri,
            cure="the arrays can be salvaged by name",
        )


def own_notes(metadata: layout.JsonObject) -> dict[str, Any]:
    """What our own writer noted in `custom_metadata`; empty for items of others."""
    custom = metadata.get("custom_metadata")
    own = custom.get("wherry") if isinstance(custom, dict) else None
    return own if isinstance(own, dict) else {}


def _list(
    location: Location, item: layout.Item, leaves: tree.Tree
) -> tuple[Listing | None, ts.Context | None]:
    from wherry.integrations.containers import kvstore, listing

    if not leaves.arrays:
        return None, None
    using = kvstore.context()
    kvstore.base_spec(location)
    return listing.list_ocdbt(location, using) if item.ocdbt else listing.list_files(location), using


def _arrays(
    location: Location, listing: Listing | None, leaves: tree.Tree, item: layout.Item
) -> dict[KeyPath, StoredArray]:
    if listing is None:
        return {}
    arrays: dict[KeyPath, StoredArray] = {}
    without: list[KeyPath] = []
    for path, name in leaves.arrays.items():
        if name and not item.ocdbt:
            location.member(name)
        found = _zarr(listing, name, f"{location.uri}/{name}")
        if found is None:
            without.append(path)
        else:
            arrays[path] = StoredArray(name, found)
    if without:
        raise _no_metadata(location, listing, leaves, without)
    return arrays


def _zarr(listing: Listing, name: str, uri: str) -> zarr.ZarrArray | None:
    for version, file in zarr.METADATA_NAMES.items():
        data = listing.read(f"{name}/{file}" if name else file)
        if data is not None:
            return zarr.parse(data, version, uri)
    return None


def _no_metadata(
    location: Location, listing: Listing, leaves: tree.Tree, without: list[KeyPath]
) -> Exception:
    first = without[0]
    if leaves.aggregated.issuperset(without) and Glimpse(location).entries.get(layout.MSGPACK):
        return UnsupportedError(
            f"{len(without)} leaves lie in the msgpack tree (Orbax <= 0.5.15, aggregate), which is not read by this "
            "version",
            uri=location.uri,
            path=render(first),
            cure="restore and save it once with a current Orbax",
        )
    if f"{leaves.arrays[first]}/{layout.MANIFEST}" in listing.values:
        return UnsupportedError(
            "an OCDBT database per array (Orbax 0.4.1) is not read", uri=location.uri, path=render(first)
        )
    return IncompleteError(
        f"{len(without)} arrays have no .zarray or zarr.json: nothing states their shape or dtype",
        uri=location.uri,
        path=render(first),
        cure=_FETCH_AGAIN,
    )


def _specs(
    arrays: dict[KeyPath, StoredArray], shardings: dict[str, Sharding], prng: dict[str, str]
) -> dict[KeyPath, TensorSpec]:
    return {
        path: TensorSpec(
            path=path,
            shape=array.zarr.shape,
            dtype=array.zarr.dtype,
            chunks=array.zarr.chunks,
            sharding=shardings.get(array.name),
            tags={"prng": prng[array.name]} if array.name in prng else None,
        )
        for path, array in arrays.items()
    }


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
    """Free metadata of the item and of the checkpoint around it (the step folder's, where it is an item of a step)."""
    home = location if layout.CHECKPOINT in glimpse.entries else location.parent
    try:
        around = layout.read_json(home.join(layout.CHECKPOINT)).get("custom_metadata")
    except NotFoundError:
        around = None
    found = {"item": metadata.get("custom_metadata"), "checkpoint": around}
    return {name: value for name, value in found.items() if value}


def _own_scalars(
    manifest: Manifest, reader: OrbaxReader, recorded: object
) -> tuple[Manifest, dict[KeyPath, StoredArray]]:
    """Give numbers that our writer had to store as arrays back as the values that they are."""
    names = recorded if isinstance(recorded, list) else []
    paths = {path for path, array in reader.arrays.items() if array.name in names}
    values = dict(manifest.values)
    for path in sorted(paths):
        spec = manifest.tensors[path]
        if spec.shape:
            raise CorruptError(
                "a number that is stored as an array of several", uri=reader.location.uri, path=spec.name
            )
        values[path] = reader.read(spec, ()).item()
    tensors = {path: spec for path, spec in manifest.tensors.items() if path not in paths}
    arrays = {path: array for path, array in reader.arrays.items() if path not in paths}
    return replace(manifest, tensors=tensors, values=values), arrays
