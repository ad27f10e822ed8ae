"""Opens a legacy T5X checkpoint: combines the msgpack tree with the zarr arrays next to it.

The envelope (`version`, `optimizer`) is not part of key paths. The content of each leaf determines where its bytes are:
in the msgpack file, in the array that a spec names, or in the array that a placeholder names; one file mixes all three.
In version 2 the bits of bfloat16 are stored as uint16, only below `target` and `state/param_states`. In the months when
T5X tried Orbax (2022-11 to 2023-01) array folders have an extra `optimizer.` in their names.

Users often copy the parameters without the optimizer state: then the checkpoint opens, its parameters can be read, and
the missing arrays are listed as absent.

Leaves of a T5X msgpack tree that refer to an array elsewhere: tensorstore specs and placeholders.

Facts: a **spec** is a map with at least `driver`, `kvstore` and `metadata`. Its path is `kvstore.path` (with or
without a trailing slash) or, from tensorstore before 0.1.14, `path` of the spec. The element type is `dtype` of the
spec (`float32`) or of the metadata (`<f4`). Driver `file`, `gfile` or `gcs` and the bucket state the original location,
not the current one: they are ignored, and the path is relative to the folder of the msgpack file. `.zarray` takes
precedence over the spec; if that file is missing (copy tools drop dot-files), the spec and T5X's constants (`order` C,
no filters, no fill value) rebuild it exactly. A **placeholder** is the text `PLACEHOLDER://<name>` (`AGGREGATED://` in
the oldest) and has only the name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, HostileError, IncompleteError, UnsupportedError
from wherry.formats.format import Glimpse, Opened
from wherry.integrations.containers.flat.reader import FlatReader, Surroundings
from wherry.integrations.containers.msgpack.contents import MsgpackContents, gather
from wherry.integrations.containers.msgpack.index import Array, Node, Scalar, Sequence, Table, index_file
from wherry.integrations.containers.orbax.layout import MANIFEST
from wherry.integrations.containers.orbax.tree import placeholder
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr.metadata import JsonObject
from wherry.integrations.containers.zarr.reader import (
    ArrayReader,
    Arrays,
    StoredArray,
    WithinReader,
    open_arrays,
)
from wherry.integrations.formats.t5x import layout
from wherry.integrations.formats.t5x.item import checked_step, extra_files
from wherry.layout.tree_reading import read_leaves
from wherry.store.location import Location

_SPEC_KEYS = frozenset({"driver", "kvstore", "metadata"})
_KNOWN_SPEC_KEYS = _SPEC_KEYS | {
    "dtype",
    "path",
    "transform",
    "recheck_cached_data",
    "recheck_cached_metadata",
}
_TRANSFORM_KEYS = frozenset({"input_inclusive_min", "input_exclusive_max", "input_labels", "output"})
_KVSTORES = frozenset({"file", "gfile", "gcs"})
_ZARR = "zarr"
_GDA = "//GDAPlaceholder:"


@dataclass(frozen=True, slots=True)
class ArrayReference:
    """A leaf that refers to an array.

    Attributes:
        name: the folder of the array, relative to that of the msgpack file.
        spec: the tensorstore spec; None for a placeholder.
        old_path: whether the spec has its path in the position of tensorstore before 0.1.14.
    """

    name: str
    spec: JsonObject | None = None
    old_path: bool = False


def stored_leaves(root: Node, uri: str) -> dict[KeyPath, ArrayReference]:
    """Every leaf of a tree that refers to an array, by key path.

    Raises:
        HostileError: a spec names storage that T5X never writes to, or a path that is absolute or has `..`.
        UnsupportedError: a spec of another driver, or a view of an array.
        CorruptError: a spec without a path, or with an invalid form.
    """
    return dict(_stored_references(root, (), uri))


def is_spec(node: Node) -> bool:
    """Whether a node is a tensorstore spec instead of a part of the tree."""
    return (
        isinstance(node, Table)
        and node.entries.keys() >= _SPEC_KEYS
        and isinstance(node.entries["driver"], Scalar)
        and isinstance(node.entries["driver"].value, str)
    )


def rebuilt_metadata(spec: JsonObject | None) -> JsonObject | None:
    """The `.zarray` rebuilt from a spec; None if the spec lacks shape, chunks, compressor or dtype."""
    if spec is None:
        return None
    metadata = cast("JsonObject", spec["metadata"])
    dtype = metadata.get("dtype") or zarr.ZARR2_STRINGS.get(str(spec.get("dtype")))
    if dtype is None or any(key not in metadata for key in ("shape", "chunks", "compressor")):
        return None
    # flax turns lists into maps, and an empty list into an empty map, which is ambiguous.
    metadata = {
        key: [] if key in ("shape", "chunks") and value == {} else value for key, value in metadata.items()
    }
    fixed = {"zarr_format": 2, "order": "C", "filters": None, "fill_value": None, "dimension_separator": "."}
    return {**fixed, **metadata, "dtype": dtype}


def _stored_references(node: Node, path: KeyPath, uri: str) -> Iterator[tuple[KeyPath, ArrayReference]]:
    if isinstance(node, Table):
        if is_spec(node):
            yield path, _from_spec(cast("JsonObject", _plain(node, path, uri)), path, uri)
            return
        for key, child in node.entries.items():
            yield from _stored_references(child, (*path, key), uri)
    elif isinstance(node, Sequence):
        for number, child in enumerate(node.items):
            yield from _stored_references(child, (*path, str(number)), uri)
    elif isinstance(node, Scalar) and isinstance(node.value, str):
        name = placeholder(node.value)
        if name is not None:
            yield path, ArrayReference(_checked_name(name, path, uri))
        elif node.value.startswith(_GDA):
            raise UnsupportedError(
                "unsupported placeholder of flax's multi-process format in a T5X checkpoint",
                uri=uri,
                path=render(path),
            )


def _from_spec(spec: JsonObject, path: KeyPath, uri: str) -> ArrayReference:
    unknown = set(spec) - _KNOWN_SPEC_KEYS
    kvstore = spec["kvstore"]
    if unknown or spec["driver"] != _ZARR:
        odd = f"driver {spec['driver']!r}" if spec["driver"] != _ZARR else ", ".join(sorted(unknown))
        raise UnsupportedError(f"unsupported tensorstore spec with {odd}", uri=uri, path=render(path))
    if not isinstance(kvstore, dict) or not isinstance(spec["metadata"], dict):
        raise CorruptError(
            "invalid tensorstore spec: missing kvstore or metadata", uri=uri, path=render(path)
        )
    driver = kvstore.get("driver")
    if not isinstance(driver, str) or driver not in _KVSTORES:
        raise HostileError(
            f"tensorstore spec with forbidden driver {driver!r}",
            uri=uri,
            path=render(path),
            cure="do not use this checkpoint; T5X writes only file, gfile and gcs",
        )
    transform, shape = spec.get("transform"), spec["metadata"].get("shape")
    if transform is not None and not (isinstance(transform, dict) and _is_whole(transform, shape)):
        raise UnsupportedError("unsupported tensorstore spec: a view of an array", uri=uri, path=render(path))
    name = kvstore.get("path") or spec.get("path")
    if not isinstance(name, str):
        raise CorruptError("invalid tensorstore spec: missing path", uri=uri, path=render(path))
    return ArrayReference(_checked_name(name, path, uri), spec, old_path="path" not in kvstore)


def _checked_name(name: str, path: KeyPath, uri: str) -> str:
    """The folder of an array; a name that points outside is refused."""
    parts = name.rstrip("/").split("/")
    if name.startswith("/") or "\\" in name or "\0" in name or any(part in ("..", ".", "") for part in parts):
        raise HostileError(
            f"a path in the data points outside its folder: {name!r}",
            uri=uri,
            path=render(path),
            cure="do not use this checkpoint; it was created or altered to reach other files",
        )
    return "/".join(parts)


def _is_whole(transform: JsonObject, shape: object) -> bool:
    """Whether a transform maps every element to itself; bounds in brackets are implicit."""
    stops = transform.get("input_exclusive_max", shape)
    if not isinstance(stops, list) or not isinstance(shape, list):
        return False
    bounds = [stop[0] if isinstance(stop, list) and stop else stop for stop in stops]
    straight = [{"input_dimension": axis} for axis in range(len(shape))]
    return (
        set(transform) <= _TRANSFORM_KEYS
        and bounds == shape
        and not any(transform.get("input_inclusive_min", ()))
        and transform.get("output", straight) == straight
    )


def _plain(node: Node, path: KeyPath, uri: str) -> Any:
    """A spec as JSON values; maps that flax has made from lists become lists again."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [_plain(item, path, uri) for item in node.items]
    if isinstance(node, Table):
        fields = {key: _plain(child, path, uri) for key, child in node.entries.items()}
        numbered = list(fields) == [str(number) for number in range(len(fields))]
        return list(fields.values()) if fields and numbered else fields
    raise CorruptError("invalid tensorstore spec: it contains an array", uri=uri, path=render(path))


def as_bytes(metadata: JsonObject) -> bytes:
    """Array metadata as the bytes of a file."""
    return json.dumps(metadata).encode()


@dataclass(frozen=True, slots=True)
class T5xTree:
    """A msgpack tree without its envelope.

    Attributes:
        version: the version in the file; None without one.
        contents: the leaves whose bytes are in the file.
        stored: the leaves that refer to arrays.
    """

    version: int | None
    contents: MsgpackContents
    stored: dict[KeyPath, ArrayReference]


def read_tree(file: Location) -> T5xTree:
    """Index the file and divide its leaves.

    Raises:
        UnsupportedError: a version before 2, or a leaf of an unsupported form.
        CorruptError: the file is not such a tree, or two leaves refer to the same array.
        HostileError: a leaf points outside the folder.
    """
    root = index_file(file)
    if not isinstance(root, Table) or not root.entries:
        raise CorruptError("expected a tree in the msgpack file", uri=file.uri)
    version = _version(root.entries.get(layout.VERSION), file)
    wrapped = layout.OPTIMIZER in root.entries and not set(root.entries) - {layout.OPTIMIZER, layout.VERSION}
    below = root.entries[layout.OPTIMIZER] if wrapped else root
    stored = stored_leaves(below, file.uri)
    owners: dict[str, KeyPath] = {}
    for path, leaf in stored.items():
        other = owners.setdefault(leaf.name, path)
        if other != path:
            raise CorruptError(
                f"{render(other)} and {render(path)} have the same array {leaf.name!r}: one tensor is lost",
                uri=file.uri,
                cure="save it again with other names; the files do not show which tensor was kept",
            )
    contents = _without(gather(root, file), 1 if wrapped else 0, set(stored))
    return T5xTree(version, contents, stored)


def _version(node: Node | None, file: Location) -> int | None:
    """The version, if the file states one.

    Raises:
        UnsupportedError: a version before 2.
        CorruptError: the version is not a number.
    """
    if node is None or (isinstance(node, Scalar) and isinstance(node.value, str)):
        return None  # a placeholder, of the months of the Orbax trial
    value: object = node.value if isinstance(node, Scalar) else None
    if isinstance(node, Array) and "int" in node.dtype and not node.shape:
        (piece,) = node.pieces
        value = int.from_bytes(file.read(piece.offset, piece.offset + piece.length), "little", signed=True)
    if type(value) is not int:
        raise CorruptError("the version in the msgpack file is not a number", uri=file.uri)
    if value < layout.OLDEST_VERSION:
        raise UnsupportedError(
            f"{layout.TOO_OLD}. Got version: {value}",
            uri=file.uri,
            cure="restore it with the code that wrote it and save it again; no public T5X can read it",
        )
    return value


def _without(contents: MsgpackContents, depth: int, stored: set[KeyPath]) -> MsgpackContents:
    """The leaves below the envelope, without the parts of specs and the texts of placeholders."""

    def is_kept(path: KeyPath) -> bool:
        if path[:1] == (layout.VERSION,) and depth:
            return False
        below = path[depth:]
        return not any(below[:cut] in stored for cut in range(len(below) + 1))

    specs = {
        path[depth:]: replace(spec, path=path[depth:])
        for path, spec in contents.specs.items()
        if is_kept(path)
    }
    return MsgpackContents(
        marked=contents.marked,
        specs=specs,
        places={path[depth:]: place for path, place in contents.places.items() if path[depth:] in specs},
        values={path[depth:]: value for path, value in contents.values.items() if is_kept(path)},
        empties={path[depth:]: kind for path, kind in contents.empties.items() if is_kept(path)},
        lists={path[depth:] for path in contents.lists if is_kept(path) and len(path) >= depth},
    )


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
    placed = FlatReader(location, tree.contents.places, (), packs=False)
    inner = ArrayReader(
        home, arrays.found, arrays.listing, None, ocdbt=ocdbt, zeros_stored=True, inline=placed
    )
    inner.lost = lost
    step = checked_step(location, specs, tree.contents.values, inner)
    folders = {leaf.name.split("/")[0] for leaf in tree.stored.values()}
    extra = extra_files(home, folders) if home == location else Surroundings()
    kind = read_leaves(specs, tree.contents.values, tree.contents.empties, specs=specs).whole_of_arrays
    manifest = replace(
        tree.contents.manifest(detection.step if step is None else step, kind),
        tensors=specs,
        companions=extra.listed,
        origin={"pinned": True} if home == location and home.join(layout.PINNED).exists() else {},
    )
    parts = {"": home}
    if home != location:
        folders = {array.name: home.join(array.name) for array in arrays.found.values()}
        parts = {location.name: location, **folders}
    reader = WithinReader(inner, parts, specs, companions=(location, extra.names))
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
    stored = {path: array.spec(path) for path, array in arrays.found.items()}
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
