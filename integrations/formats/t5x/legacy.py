"""Opens a legacy T5X checkpoint: combines the msgpack tree with the zarr arrays next to it.

The envelope (`version`, `optimizer`) is not part of key paths. The content of each leaf determines where its bytes are:
in the msgpack file, in the array that a spec names, or in the array that a placeholder names; one file mixes all three.
In version 2 the bits of bfloat16 are stored as uint16, only below `target` and `state/param_states`. In the months when
T5X tried Orbax (2022-11 to 2023-01) array folders have an extra `optimizer.` in their names.

Users often copy the parameters without the optimizer state: then the checkpoint opens, its parameters can be read, and
the missing arrays are listed as absent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import IncompleteError
from wherry.formats.format import Glimpse, Opened
from wherry.integrations.containers.msgpack.contents import PlacedReader
from wherry.integrations.containers.orbax.layout import MANIFEST
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr.arrays import Arrays, open_arrays
from wherry.integrations.containers.zarr.reader import ArrayReader, StoredArray
from wherry.integrations.formats.t5x import layout
from wherry.integrations.formats.t5x.extra_files import ExtraFiles, extra_files
from wherry.integrations.formats.t5x.reader import T5xReader
from wherry.integrations.formats.t5x.references import as_bytes, rebuilt_metadata
from wherry.integrations.formats.t5x.step import checked_step
from wherry.integrations.formats.t5x.tree import T5xTree, read_tree
from wherry.tree.tree_reading import read_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.storage.location import Location

_BITS_OF_BFLOAT16 = "uint16"
_NOTHING_STATES = "missing .zarray, and no other file states the shape or dtype"
_FETCH_AGAIN = "copy the checkpoint again with its dot-files, or use another step"


def open_legacy(location: Location, detection: Detection) -> Opened:
    """Open a checkpoint.

    Args:
        location: its folder, or a msgpack file.
        detection: the detection from its first bytes.

    Raises:
        IncompleteError: the save was never committed, its msgpack file is missing, or no array can be read at all.
        UnsupportedError: a version before 2, or an unsupported form.
        CorruptError: the checkpoint is inconsistent, for example the folder's step differs from the step inside.
        HostileError: a path points outside the folder, a spec names foreign storage, or sizes are impossible.
    """
    entry = location.entry
    home, file = (location, location.join(layout.MSGPACK))
    if entry is not None and not entry.is_dir:
        home, file = location.parent, location
    require_committed(location, file)
    tree = read_tree(file)
    arrays, lost = _open_arrays(home, tree)
    if lost and not arrays.found and not tree.contents.specs:
        raise IncompleteError(
            f"{len(lost)} arrays cannot be read: {_NOTHING_STATES}",
            uri=file.uri,
            path=render(next(iter(lost))),
            cure=_FETCH_AGAIN,
        )
    specs = _specs(tree, arrays)
    ocdbt = bool(tree.stored) and home.join(MANIFEST).exists()
    placed = PlacedReader(location, tree.contents.places, ())
    inner = ArrayReader(
        home, arrays.found, arrays.listing, None, ocdbt=ocdbt, zeros_stored=True, inline=placed
    )
    inner.lost = lost
    step = checked_step(location, specs, tree.contents.values, inner)
    folders = {leaf.name.split("/")[0] for leaf in tree.stored.values()}
    extra = extra_files(home, folders) if home == location else ExtraFiles()
    manifest = Manifest(
        tensors=specs,
        values=tree.contents.values,
        empties=tree.contents.empties,
        lists=frozenset(tree.contents.lists),
        step=detection.step if step is None else step,
        kind=read_leaves(specs, tree.contents.values, tree.contents.empties, specs=specs).whole_of_arrays,
        companions=tuple(Companion(entry.name, entry.size) for entry in extra.companions),
        origin={"pinned": True} if home == location and home.join(layout.PINNED).exists() else {},
    )
    reader = T5xReader(location, inner, frozenset(one.name for one in extra.companions))
    found = _precise(detection, manifest, tree, arrays, file)
    return Opened(found, manifest, reader, tuple(extra.ignored))


def require_committed(location: Location, file: Location) -> None:
    """Refuse a save that is unfinished according to names and sizes.

    Raises:
        IncompleteError: the folder has the name of an unfinished save, or the msgpack file is missing or empty.
    """
    if layout.is_uncommitted(location.name):
        raise IncompleteError(
            "the folder has the suffix .tmp-<seconds> of a save that was never committed",
            uri=location.uri,
            cure="use another step",
        )
    entry = file.entry
    if entry is None or entry.is_dir or entry.size == 0:
        what = f"missing {file.name}" if entry is None else f"{file.name} is empty"
        raise IncompleteError(
            f"{what}: T5X writes it last, so the save was not finished or the copy is incomplete",
            uri=location.uri,
            cure="copy the checkpoint again, or use another step",
        )


def _open_arrays(home: Location, tree: T5xTree) -> tuple[Arrays, dict[KeyPath, str]]:
    """The arrays that leaves point to, and the leaves whose shape or dtype is unknown."""
    if not tree.stored:
        return Arrays(), {}
    entries = Glimpse(home).entries
    names = {
        path: leaf.name if leaf.spec is not None else _folder(leaf.name, entries)
        for path, leaf in tree.stored.items()
    }
    arrays = open_arrays(home, names, ocdbt=MANIFEST in entries)
    lost: dict[KeyPath, str] = {}
    for path, name in arrays.without.items():
        metadata = rebuilt_metadata(tree.stored[path].spec)
        if metadata is None:
            lost[path] = _NOTHING_STATES
        else:
            parsed = zarr.parse(as_bytes(metadata), 2, f"{home.uri}/{name}")
            arrays.found[path] = StoredArray(name, parsed, metadata)
    return arrays, lost


def _folder(name: str, entries: Mapping[str, object]) -> str:
    """The folder of a placeholder: its name, with or without the prefix of the Orbax trial."""
    prefix = f"{layout.OPTIMIZER}."
    choices = (name, f"{prefix}{name}", name.removeprefix(prefix))
    return next((choice for choice in choices if choice in entries), name)


def _specs(tree: T5xTree, arrays: Arrays) -> dict[KeyPath, TensorSpec]:
    """The tensors, in the order of the tree's branches."""
    stored = {
        path: TensorSpec(path, array.zarr.shape, array.zarr.dtype, chunks=array.zarr.chunks)
        for path, array in arrays.found.items()
    }
    specs = {**tree.contents.specs, **stored}
    if tree.version == layout.OLDEST_VERSION:
        specs = {path: replace(spec, dtype=_dtype_of_version_2(spec)) for path, spec in specs.items()}
    return dict(sorted(specs.items()))


def _dtype_of_version_2(spec: TensorSpec) -> str:
    state = spec.path[:1] == (layout.TARGET,) or spec.path[:2] == (layout.STATE, layout.PARAM_STATES)
    return "bfloat16" if state and spec.dtype == _BITS_OF_BFLOAT16 else spec.dtype


def _precise(
    detection: Detection, manifest: Manifest, tree: T5xTree, arrays: Arrays, file: Location
) -> Detection:
    """The detection refined with the whole tree."""
    rebuilt = sum(array.metadata is not None for array in arrays.found.values())
    pointers = sum(leaf.spec is None for leaf in tree.stored.values())
    seen = [
        Evidence(
            file.name,
            f"{len(tree.contents.specs)} tensors inline, {len(tree.stored) - pointers} tensorstore specs, "
            f"{pointers} placeholders",
        )
    ]
    if rebuilt:
        seen.append(
            Evidence(".", f"missing .zarray of {rebuilt} arrays; rebuilt from the specs in {file.name}")
        )
    wide = [spec for spec in manifest.tensors.values() if spec.dtype == _BITS_OF_BFLOAT16]
    bits = [
        spec
        for path, spec in manifest.tensors.items()
        if spec.dtype == "bfloat16" and _stored_as(path, tree, arrays)
    ]
    if bits:
        seen.append(Evidence(file.name, f"version 2: {len(bits)} tensors are bfloat16 stored as uint16 bits"))
    if wide and tree.version != layout.OLDEST_VERSION:
        seen.append(
            Evidence(file.name, f"{len(wide)} tensors stay uint16: only version 2 stores bfloat16 as uint16")
        )
    if manifest.origin.get("pinned"):
        seen.append(Evidence(layout.PINNED, layout.LOCK))
    return replace(
        detection.seen(*seen),
        format_version=format_version(tree.version, arrays=bool(tree.stored), rebuilt=bool(rebuilt)),
        writer=_writer(tree),
        step=manifest.step,
        kind=manifest.kind,
    )


def _stored_as(path: KeyPath, tree: T5xTree, arrays: Arrays) -> bool:
    array, spec = arrays.found.get(path), tree.contents.specs.get(path)
    return (array is not None and array.zarr.dtype == _BITS_OF_BFLOAT16) or (
        spec is not None and spec.dtype == _BITS_OF_BFLOAT16
    )


def format_version(version: int | None, *, arrays: bool, rebuilt: bool = False) -> str:
    """The text of the format version for a layout.

    Args:
        version: the number in the file.
        arrays: whether any tensor is stored outside the msgpack file.
        rebuilt: whether any of them lacks its `.zarray`.
    """
    number = f"t5x v{version}" if version is not None else "t5x, no version"
    where = "zarr2 directories" if arrays else "all arrays in the msgpack file"
    return f"{number}, {where}" + (" without .zarray" if rebuilt else "")


def _writer(tree: T5xTree) -> str:
    if tree.contents.marked:
        return "wherry (as t5x)"
    if any(leaf.spec is None for leaf in tree.stored.values()):
        return "t5x 2022-11 to 2023-01 (Orbax on trial)"
    if any(leaf.old_path for leaf in tree.stored.values()):
        return "t5x with tensorstore < 0.1.14"
    if tree.version == layout.OLDEST_VERSION:
        return "t5x before 2021-06"
    return "t5x with tensorstore >= 0.1.14" if tree.stored else "t5x"
