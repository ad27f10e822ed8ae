"""Opens an Orbax item: its small files become a Manifest, its array metadata the TensorSpecs.

Only metadata is read: `_METADATA` or the msgpack tree of older generations, one listing of the store, and
the `.zarray` or `zarr.json` of each array, which OCDBT stores inside its tree. An item whose tree is lost or whose save
was never finished is refused by name.

Reads an Orbax item whose processes never merged their databases: each chunk from the database that has it.

Every process writes a complete OCDBT database with the metadata of its arrays and its share of the chunks; the merge
combines them. If two databases have the same key, the later one counts, as in a merge.

Recognises from the key paths of a tree what held it: Flax boxes, NNX variables, Penzai arrays, PyTorch modules.

Facts (from files of each release): a linen box (`nn.Partitioned`, `LogicallyPartitioned`) is a node with
the one child `value`; its axis names are lost, and some parameters of a tree may have no box. A saved
`nnx.State` wraps every variable: `raw_value` in Flax 0.8, `value` since 0.9. A Penzai `NamedArray` keeps only its
`data_array`. A parameter may be named `value`, so a node counts only if it has no other child. Hugging Face names a
tensor by the modules that hold it, in one part: `model.norm.weight`. The key paths are not changed; the marks are
evidence only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import AxisName, Region, Sharding, TensorSpec, region_shape, region_within
from wherry.core.threads import without_collection
from wherry.cures import Argument, Blank, Command, either
from wherry.errors import CorruptError, HostileError, IncompleteError, NotFoundError, UnsupportedError
from wherry.formats.format import Block, Glimpse, Opened
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.containers.orbax import layout, partitioning, tree
from wherry.integrations.containers.orbax.commit import missing_commit
from wherry.integrations.containers.orbax.tree import item_tree
from wherry.integrations.containers.zarr.listing import Listing, list_ocdbt
from wherry.integrations.containers.zarr.reader import ArrayReader, Arrays, StoredArray, open_arrays
from wherry.layout.forms import BOX, OLD_VARIABLE, wrapped_leaves
from wherry.layout.tree_reading import read_tree
from wherry.mover.move import cells
from wherry.mover.output import as_array
from wherry.mover.read import read_array, read_region
from wherry.store.location import Location


def list_processes(folder: Location, databases: Iterable[str]) -> dict[str, Listing]:
    """The contents of the database of each process.

    Raises:
        DamagedError, HostileError, StorageError: see `list_ocdbt`.
    """
    return {name: list_ocdbt(folder.join(name)) for name in databases}


def merge_listings(folder: Location, listings: Mapping[str, Listing]) -> Listing:
    """Their contents together, with files relative to the folder above them."""
    together = Listing(folder, {})
    for name, listing in listings.items():
        for key, value in listing.values.items():
            together.values[key] = value._replace(file=value.file and f"{name}/{value.file}")
    return together


class UnmergedReader(ArrayReader):
    """A reader of the databases of several processes; a missing chunk is never taken for zeros."""

    def __init__(
        self,
        location: Location,
        arrays: Mapping[KeyPath, StoredArray],
        listings: Mapping[str, Listing],
        inline: FlatReader | None,
    ) -> None:
        """See ArrayReader; `listings` as `list_processes` gives them."""
        together = merge_listings(location, listings)
        super().__init__(location, arrays, together, None, ocdbt=True, zeros_stored=True, inline=inline)
        self._parts = [
            ArrayReader(location.join(name), arrays, listing, None, ocdbt=True, zeros_stored=True)
            for name, listing in reversed(list(listings.items()))
        ]

    def _fill(self, array: StoredArray, spec: TensorSpec, region: Region, out: memoryview) -> None:
        """Fill a buffer with a region, each chunk from the database that has it."""
        part = self._part(array, region)
        chunks = array.zarr.chunks
        if part is not None or not chunks:
            read_region(part or self._parts[0], spec, region, out)
            return
        result = as_array(out, spec.dtype, region_shape(region))
        for cell in cells(region, chunks):
            reader = self._part(array, cell) or self._parts[0]
            result[region_within(cell, region)] = read_array(reader, spec, cell)

    def _held(self, array: StoredArray, spec: TensorSpec, cell: Region) -> int | None:
        part = self._part(array, cell)
        return part and part._held(array, spec, cell)  # noqa: SLF001  of the same class

    def _decode(self, array: StoredArray, spec: TensorSpec, cell: Region) -> Iterator[Block]:
        part = self._part(array, cell) or self._parts[0]
        return part._decode(array, spec, cell)  # noqa: SLF001  of the same class

    def close(self) -> None:
        """Close the open arrays of all databases."""
        super().close()
        for part in self._parts:
            part.close()

    def _part(self, array: StoredArray, region: Region) -> ArrayReader | None:
        """The database that has every chunk of a region; None if no single one has."""
        keys = list(array.chunk_keys(region))
        return next(
            (part for part in self._parts if part.listing and part.listing.values.keys() >= set(keys)), None
        )


NAMED_ARRAY = "data_array"
_PARAMS = "params"
_OF_MODULES = (".weight", ".bias")


def wrappers(paths: Iterable[KeyPath]) -> list[Evidence]:
    """Evidence of boxes and wrappers in a tree."""
    every = list(paths)
    boxes, old, named = (len(wrapped_leaves(every, word)) for word in (BOX, OLD_VARIABLE, NAMED_ARRAY))
    found: list[Evidence] = []
    if old:
        found.append(
            Evidence(".", f"{old} of {len(every)} arrays are NNX variables (`{OLD_VARIABLE}`, Flax 0.8)")
        )
    if boxes and not named:
        found.append(Evidence(".", f"{boxes} of {len(every)} arrays are {_holder(every, boxes)}"))
    if named:
        found.append(
            Evidence(".", f"{named} of {len(every)} arrays are Penzai NamedArrays (`{NAMED_ARRAY}`)")
        )
    modules = sum(len(path) == 1 and path[0].endswith(_OF_MODULES) for path in every)
    if 2 * modules > len(every):
        found.append(
            Evidence(
                ".",
                f"{modules} of {len(every)} arrays have names of PyTorch modules, as Hugging Face has them",
            )
        )
    return found


def _holder(paths: list[KeyPath], boxes: int) -> str:
    """The kind of box: linen boxes some parameters, below `params`; an NNX state wraps every variable."""
    if boxes < len(paths) or any(_PARAMS in path for path in paths):
        return f"in linen partition boxes (`{BOX}`); their axis names are not stored in the tree"
    return f"NNX variables (`{BOX}`, Flax 0.9 and later)"


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
    leaves = item_tree(location, item, metadata)
    parts = list_processes(location, () if item.merged else item.processes)
    together = merge_listings(location, parts) if parts else None
    arrays = open_arrays(location, leaves.arrays, ocdbt=item.ocdbt, listed=together)
    if arrays.without and not (partial and (arrays.found or leaves.inline)):
        raise _no_metadata(location, arrays, leaves)
    shardings, unknown = dict[str, Sharding](), frozenset[str]()
    if layout.SHARDING in glimpse.entries:
        shardings, unknown = tree.read_shardings(location, set(leaves.arrays.values()))
    own = tree.own_notes(metadata)
    stored = uncommitted or bool(metadata.get("store_array_data_equal_to_fill_value"))
    inline = FlatReader(location, leaves.places, (), packs=False) if leaves.inline else None
    if parts:
        reader = UnmergedReader(location, arrays.found, parts, inline)
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
        companions=asset_companions(location, glimpse, (array.name for array in arrays.found.values())),
        custom=_custom(location, glimpse, metadata),
    )
    manifest = replace(manifest, kind=read_tree(manifest).whole_of_arrays)
    manifest, reader.arrays = _own_scalars(manifest, reader, own.get("scalars"))
    manifest, named = partitioning.with_names(manifest)
    notes = [] if item.tree else wrappers(leaves.tensors)  # detection has those of `_METADATA`
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
            cure=either(filter(None, ["use another step", rewrite_command(location, item)])),
        )
    if item is not None and item.processes and not item.merged:
        raise IncompleteError(
            f"file not found: {layout.MANIFEST}; the databases {', '.join(item.processes)} were never merged",
            uri=location.uri,
            cure=either(filter(None, [rewrite_command(location, item), "use another step"])),
        )
    _require_tree(location, item)


def rewrite_command(location: Location, item: layout.OrbaxItem | None) -> Command | None:
    """The command that commits an uncommitted item, if that is complete; None if no command can."""
    if item is None or not (item.tree or item.msgpack) or not location.store.capabilities.local:
        return None
    name = "merge" if item.processes and not item.merged else "commit"
    return Command(
        "rewrite", location.uri, Blank("TARGET"), Argument("as", name), Argument("format", "orbax")
    )


def _require_tree(location: Location, item: layout.OrbaxItem | None) -> None:
    if item is None:
        raise IncompleteError("Orbax item not found", uri=location.uri, cure=_FETCH_AGAIN)
    if not item.tree and not item.msgpack:
        raise IncompleteError(
            f"file not found: {layout.TREE}; the tree structure is lost",
            uri=location.uri,
            cure=f"copy {layout.TREE} again, or use another step",
        )


def own_axes(own: dict[str, Any]) -> dict[str, tuple[AxisName, ...]]:
    """Stored name → logical axis names, from the notes of wherry's writer."""
    rows = own.get("axes")
    if not isinstance(rows, dict):
        return {}
    return {
        str(name): tuple(map(tree.axis_of_json, axes))
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
        path: array.spec(
            path,
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


def asset_companions(location: Location, glimpse: Glimpse, names: Iterable[str]) -> tuple[Companion, ...]:
    """The files of `assets` in an item, unless one of the arrays of these names is there."""
    if layout.ASSETS not in glimpse.entries or any(name.split("/")[0] == layout.ASSETS for name in names):
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
