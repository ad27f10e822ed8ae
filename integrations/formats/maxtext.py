"""MaxText: an Orbax checkpoint whose tree, item and scan form are MaxText's.

Read: `<step>/items` and the files around it, a separate item, and the emergency managers' `state`; OCDBT or one folder
per array, zarr 2 or 3, parameters or train state, `nnx_aux`. Written: the step folder as its CheckpointManager writes
it. How the tree is detected follows; the arrays are Orbax's.

The checkpoint is the step folder. `<step>/items` resolves to the step folder too, so that sidecar and lineage have one
place. If the hosts of a run wrote to their own disks, missing parts are reported in hosts and bytes.

Finds and opens a MaxText checkpoint: the step folder around the item `items`.

Facts (MaxText 0.2.5 with Orbax 0.12.8; older releases from their source): `<run>/checkpoints/<step>/` holds
`_CHECKPOINT_METADATA`, `items/` and, with grain, `iter/`. `load_parameters_path` points at `<step>/items`, so a
separate item is a checkpoint too. Emergency managers name the item `state`. Since mid-2026 `custom_metadata` of the
step has `scan_layers`; the tree always determines it.

The MaxText tree: how to detect it, and whether its layers are scanned.

Facts (MaxText 0.2.5 and its Linen era): parameters are below `params/params` (`decoder`, `token_embedder`); the
optimizer repeats one `params` level (`opt_state/0/mu/params/decoder/…`, `adam_pax` without the `0`); `nnx_aux/model`
holds every variable that is not a parameter. Fine-tuned and RL states lack the wrappers: `decoder` is at the root, or
below `base`, `model_params` or a single `params`; T5X has such trees too, so then the item's name or the recorded
`scan_layers` must confirm MaxText.

Scanned layers share one node (`decoder/layers/…`, also `dense_layers`, `moe_layers`, `scanned_blocks`, and blocks such
as `layers/layers_0`) and have a layer axis, `param_scan_axis`, by default 1. Unscanned layers are `layers_<i>`,
`dense_layers_<i>`, `moe_layers_<j>`; releases with a faulty renaming wrote `layers/<i>` and `dense_layer_<i>`.

The layout of a MaxText step folder: `items/` as Orbax would write it, in the files of a CheckpointManager.

Facts (MaxText 0.2.5): the step folder has `_CHECKPOINT_METADATA`, which names the handler of `items` and states in
`custom_metadata` whether layers are scanned, and `commit_success.txt`; the item has another `commit_success.txt` and no
`_CHECKPOINT_METADATA`. MaxText refuses to load if the recorded `scan_layers` differs from its config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from wherry.core.detection import Detection, Evidence, Kind
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.cures import Command, Cure
from wherry.errors import IncompleteError, WherryError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Option, Options
from wherry.formats.systems import TreeForm
from wherry.integrations.containers.orbax import detection, layout, tree
from wherry.integrations.containers.orbax import write as orbax
from wherry.integrations.containers.orbax.detection import SIGNS, other_items
from wherry.integrations.containers.orbax.item import open_item
from wherry.integrations.containers.orbax.tree import msgpack_tree, own_notes
from wherry.integrations.containers.orbax.write import MARKER, arrays_of, checkpoint_file, item_files
from wherry.integrations.containers.zarr.metadata import STORABLE
from wherry.integrations.containers.zarr.reader import ArrayReader, WithinReader
from wherry.layout.tree_reading import read_leaves
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Scene, map_of_chunks, within

WRAPPED: KeyPath = ("params", "params")
_OTHER_ROOTS: tuple[KeyPath, ...] = (("params",), ("base",), ("model_params",), ())
_MODEL_PARTS = frozenset({"decoder", "token_embedder"})
_FOREIGN_PARTS = frozenset({"encoder", "target"})
_OF_TORCH = "weight"  # a name of PyTorch's modules; Flax has kernel, scale and embedding
_SCANNED = re.compile(r"layers|dense_layers|moe_layers|scanned_blocks")
_UNSCANNED = re.compile(r"(layers|dense_layers|dense_layer|moe_layers|moe_layer)_\d+")
_ALIASES = re.compile(r"(dense_layer|moe_layer)_\d+")
_DEFAULT_AXIS = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Structure of a MaxText tree.

    Attributes:
        root: key path of the node that holds `decoder`.
        scanned: whether layers are scanned; None if the tree has no layers, or both forms.
        groups: scanned group → (axis of the layers or None if unknown, their number).
        aliases: names of layers that only faulty releases wrote.
        mixed: whether the tree has both forms.
        nnx_aux: whether the tree has variables that are not parameters.
    """

    root: KeyPath
    scanned: bool | None = None
    groups: Mapping[str, tuple[int | None, int | None]] = field(
        default_factory=dict[str, tuple[int | None, int | None]]
    )
    aliases: tuple[str, ...] = ()
    mixed: bool = False
    nnx_aux: bool = False

    def to_json(self) -> dict[str, Any]:
        """The JSON form for the manifest's `custom["maxtext"]`."""
        groups = {name: {"axis": axis, "layers": layers} for name, (axis, layers) in self.groups.items()}
        fields: dict[str, Any] = {"parameters": "/".join(self.root), "nnx_aux": self.nnx_aux}
        if self.scanned is not None:
            fields["scan_layers"] = self.scanned
        return (
            fields
            | ({"scanned": groups} if groups else {})
            | ({"aliases": list(self.aliases)} if self.aliases else {})
        )


def parameter_root(paths: Iterable[KeyPath], *, confirmed: bool) -> KeyPath | None:
    """The root of the model's parameters, if this is a MaxText tree.

    Args:
        paths: key paths of the arrays.
        confirmed: whether other evidence confirms MaxText, so that trees without its wrappers count too.
    """
    seen = list(paths)
    if _has_model(seen, WRAPPED):
        return WRAPPED
    if not confirmed or any(part in _FOREIGN_PARTS for path in seen for part in path[:2]):
        return None
    return next((root for root in _OTHER_ROOTS if _has_model(seen, root)), None)


def _is_train_state(manifest: Manifest) -> bool:
    """Whether this is a MaxText tree: its decoder below the wrappers, or without any, as other trees have them."""
    paths = [path for path in manifest.tensors if path]
    if any(path[0] == WRAPPED[0] for path in paths):
        return _has_model(paths, WRAPPED)
    foreign = any(path[-1] == _OF_TORCH for path in paths)
    return not foreign and parameter_root(paths, confirmed=True) is not None


FORM = TreeForm(_is_train_state, "a train state, with its `decoder` below `params/params`", flax=False)


def look(specs: Mapping[KeyPath, TensorSpec] | Iterable[KeyPath], root: KeyPath) -> Shape:
    """Determine the structure of a tree.

    Args:
        specs: the arrays; with only key paths, the axes of scanned layers remain unknown.
        root: the result of `parameter_root`.
    """
    paths = list(specs)
    decoder = (*root, "decoder")
    below = [path for path in paths if path[: len(decoder)] == decoder]
    groups: dict[KeyPath, list[KeyPath]] = {}
    unscanned: set[str] = set()
    aliases: set[str] = set()
    for path in below:
        group, single = _layer_node(path, len(decoder))
        if group is not None:
            groups.setdefault(group, []).append(path)
        if single is not None:
            unscanned.add(single)
            aliases |= {single} if "/" in single or _ALIASES.fullmatch(single) else set()
    known = specs if hasattr(specs, "items") else {}
    return Shape(
        root=root,
        scanned=None if bool(groups) == bool(unscanned) else bool(groups),
        groups={"/".join(group): _axis(members, known) for group, members in sorted(groups.items())},  # pyright: ignore[reportArgumentType]
        aliases=tuple(sorted(aliases)),
        mixed=bool(groups) and bool(unscanned),
        nnx_aux=any(path[0] == "nnx_aux" for path in paths if path),
    )


def _has_model(paths: list[KeyPath], root: KeyPath) -> bool:
    depth = len(root)
    return any(
        len(path) > depth + 1 and path[:depth] == root and path[depth] in _MODEL_PARTS for path in paths
    )


def _layer_node(path: KeyPath, depth: int) -> tuple[KeyPath | None, str | None]:
    """The scanned group of an array, or the name of its unscanned layer; neither for other arrays.

    A pipeline's node may be between the decoder and its layers; `layers_remainder` holds the remainder of scanned
    blocks.
    """
    for at in range(depth, len(path) - 1):
        part = path[at]
        if part == "layers_remainder":
            return None, None
        if _SCANNED.fullmatch(part):
            if path[at + 1].isdecimal():
                return None, f"{part}/{path[at + 1]}"
            return path[: at + 1], None
        if _UNSCANNED.fullmatch(part):
            return None, part
    return None, None


def _axis(members: list[KeyPath], specs: Mapping[KeyPath, TensorSpec]) -> tuple[int | None, int | None]:
    """The axis with one extent in all arrays of a group, and that extent; the default axis if several qualify."""
    shapes = [specs[path].shape for path in members if path in specs]
    rank = min((len(shape) for shape in shapes), default=0)
    fitting = [axis for axis in range(rank) if len({shape[axis] for shape in shapes}) == 1]
    if _DEFAULT_AXIS in fitting:
        return _DEFAULT_AXIS, shapes[0][_DEFAULT_AXIS]
    return (fitting[0], shapes[0][fitting[0]]) if len(fitting) == 1 else (None, None)


ITEM = "items"
NAME = "maxtext"
_ITEMS = (ITEM, "state")
_STEP_FILES = (layout.CHECKPOINT, layout.COMMITTED)


@dataclass(frozen=True, slots=True)
class MaxTextStep:
    """A MaxText checkpoint.

    Attributes:
        home: the step folder, or the item if it is separate.
        item: the Orbax item in the folder of the arrays.
        shape: structure of its tree; None for another kind of tree that wherry wrote in MaxText's layout.
        scan_layers: the value in the step's `custom_metadata`, if any.
        kind: parameters or a train state, from the tree; None for another kind of tree.
    """

    home: Location
    item: detection.FoundItem
    shape: Shape | None
    scan_layers: bool | None = None
    kind: Kind | None = None

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Why this is a MaxText checkpoint, and the form of its layers."""
        place = _relative(self.home, self.item.location)
        rows: list[Evidence] = []
        if self.shape is None:
            rows.append(Evidence(f"{place}{layout.TREE}", "written by wherry as a MaxText checkpoint"))
        else:
            root = "/".join(self.shape.root) or "the root"
            rows.append(Evidence(f"{place}{layout.TREE}", f"a MaxText decoder below {root}"))
            rows.append(Evidence(f"{place}{layout.TREE}", _scan_words(self.shape)))
        if self.scan_layers is not None:
            rows.append(
                Evidence(
                    layout.CHECKPOINT, f"custom_metadata has scan_layers={str(self.scan_layers).lower()}"
                )
            )
        return tuple(rows)

    @property
    def form(self) -> bool | None:
        """Whether layers are scanned: from the tree, else from the record."""
        return self.scan_layers if self.shape is None or self.shape.scanned is None else self.shape.scanned


def version_words(arrays: str, scanned: bool | None) -> str:
    """The format version: the storage of the arrays, and whether layers are scanned."""
    words = {True: ", scan_layers", False: ", unscanned", None: ""}
    return f"{NAME}, {arrays}{words[scanned]}"


def find(glimpse: Glimpse) -> MaxTextStep | None:
    """The MaxText checkpoint at a location, or None.

    Raises:
        AmbiguousError: a step has several items with arrays and none has a usual name.
    """
    item = detection.look(glimpse)
    if item is None or item.item is None:
        return None
    home, place = glimpse.location, item.location
    if home == place:
        in_step = place.name in _ITEMS and place.parent.join(layout.CHECKPOINT).exists()
        home = place.parent if in_step else place
    scan_layers = _recorded_scan(home)
    paths = _paths(item)
    confirmed = scan_layers is not None or item.location.name == ITEM
    root = parameter_root(paths, confirmed=confirmed)
    if root is not None:
        # The decoder shows parameters; moments make them a train state.
        kind: Kind = "train-state" if read_leaves(paths).optimizer else "params"
        return MaxTextStep(home, item, look(paths, root), scan_layers, kind)
    ours = own_notes(item.metadata).get("format") == NAME
    return MaxTextStep(home, item, None, scan_layers) if ours else None


def open_found(found: MaxTextStep) -> Opened:
    """Open the result of `find`. Raises the errors of opening an Orbax item."""
    opened = open_item(found.item.location, found.item.detection)
    assert isinstance(opened.reader, ArrayReader)
    manifest = opened.manifest
    seen = look(manifest.tensors, found.shape.root) if found.shape else None
    if seen is not None:
        custom = {**manifest.custom, NAME: seen.to_json()}
        manifest = replace(manifest, kind=found.kind or manifest.kind, custom=custom)
    item = replace(found.item, detection=opened.detection)
    around = _STEP_FILES if found.home != found.item.location else ()
    parts = {_relative(found.home, found.item.location).rstrip("/"): found.item.location}
    parts |= {name: found.home.join(name) for name in around}
    reader = WithinReader(opened.reader, parts, manifest.tensors)
    ignored = other_items(found.item.location, found.home)
    return Opened(describe_step(replace(found, shape=seen, item=item)), manifest, reader, ignored)


def describe_step(found: MaxTextStep) -> Detection:
    """Turn Orbax's detection of the item into one of the MaxText checkpoint around it."""
    item, place = found.item.detection, _relative(found.home, found.item.location)
    evidence = [replace(row, file=_below(place, row.file)) for row in item.evidence]
    return replace(
        item,
        uri=found.home.uri,
        format=NAME,
        format_version=version_words(item.format_version or "", found.form),
        kind=found.kind or item.kind,
        evidence=(*found.evidence, *evidence),
    )


def _paths(item: detection.FoundItem) -> list[KeyPath]:
    """Key paths of the arrays; of a msgpack tree only if the item has MaxText's name."""
    location = item.location
    try:
        if item.leaves is not None:
            return list(item.leaves.arrays)
        if item.metadata:
            return list(tree.parse_tree(item.metadata, location.uri).arrays)
        if item.item is not None and item.item.msgpack and location.name == ITEM:
            return list(msgpack_tree(location.join(layout.MSGPACK)).tensors)
    except OSError:
        raise
    except WherryError:
        return []  # Orbax's own detection of the item reports the error
    return []


def _below(place: str, file: str) -> str:
    """Path of a file of the item, relative to the checkpoint."""
    if not place or file.startswith("../"):
        return file.removeprefix("../") if place else file
    return place.rstrip("/") if file == "." else f"{place}{file}"


def _recorded_scan(home: Location) -> bool | None:
    """`scan_layers` of the step's custom metadata."""
    place = home.join(layout.CHECKPOINT)
    if not place.exists():
        return None
    try:
        custom = layout.read_json(place).get("custom_metadata")
    except OSError:
        raise
    except WherryError:
        return None  # as above
    value = custom.get("scan_layers") if isinstance(custom, dict) else None
    return value if isinstance(value, bool) else None


def _relative(home: Location, item: Location) -> str:
    inner = item.path[len(home.path.rstrip("/")) :].strip("/")
    return f"{inner}/" if inner else ""


def _scan_words(seen: Shape) -> str:
    if seen.mixed:
        return "both scanned and unscanned layers"
    if seen.scanned is None:
        return "no layers"
    aliases = f" (names of a faulty release: {', '.join(seen.aliases[:3])})" if seen.aliases else ""
    if not seen.scanned:
        return f"layers are unscanned: one node for each layer{aliases}"
    words = [
        f"{name.rpartition('/')[2]}" + (f": {layers} on axis {axis}" if axis is not None else "")
        for name, (axis, layers) in seen.groups.items()
    ]
    return f"layers are scanned ({', '.join(words)}){aliases}"


_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


def lay_out(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """The files of a step."""
    step = record_scan(manifest)
    files = [*item_files(step, options, {"format": NAME}), MARKER]
    item = within(ITEM, map_of_chunks(arrays_of(step, options, scene), files))
    around = checkpoint_file({ITEM: _HANDLER}, scene.created_ns, step), MARKER
    return replace(item, files=(*item.files, *around))


def scan_form(manifest: Manifest) -> bool | None:
    """Whether the layers of a tree are scanned, as MaxText determines it; None without layers."""
    root = parameter_root(manifest.tensors, confirmed=True)
    found = look(manifest.tensors, root) if root is not None else None
    if found is not None and found.scanned is not None:
        return found.scanned
    value = (manifest.custom.get("checkpoint") or {}).get("scan_layers")
    return value if isinstance(value, bool) else None


def record_scan(manifest: Manifest) -> Manifest:
    """The manifest with `scan_layers` added to the step's `custom_metadata`."""
    form = scan_form(manifest)
    if form is None:
        return manifest
    around = {**(manifest.custom.get("checkpoint") or {}), "scan_layers": form}
    return replace(manifest, custom={**manifest.custom, "checkpoint": around})


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect a step folder around an item with a MaxText tree, or such an item; None if it is neither.

    Raises:
        AmbiguousError: a step has several items with arrays and none has a usual name.
    """
    found = find(glimpse)
    return found and describe_step(found)


def open_maxtext(location: Location, detection: Detection) -> Opened:
    """See Format.

    Raises: the errors of opening an Orbax item.
    """
    found = find(Glimpse(location))
    if found is None:
        raise IncompleteError(
            "MaxText item not found", uri=detection.uri, cure=Cure("run {} on the folder", Command("detect"))
        )
    opened = open_found(found)
    known = {*describe_step(found).evidence, *opened.detection.evidence}
    chosen = tuple(
        row for row in detection.evidence if row not in known
    )  # why this step of the run was selected
    precise = replace(opened.detection, evidence=(*chosen, *opened.detection.evidence))
    return replace(opened, detection=precise)


def version(manifest: Manifest, options: Options) -> str:
    """The format version that these options give."""
    return version_words(orbax.version(manifest, options), scan_form(manifest))


FORMATS = (
    Format(
        name=NAME,
        title="MaxText",
        detect=detect,
        signs=SIGNS,
        open=open_maxtext,
        layout=lay_out,
        holds=Holds(dtypes=STORABLE, zero_size=False, values=True, empties=True, companions=True),
        refines=("orbax",),
        system=NAME,
        form=FORM,
        companion_folder=f"{ITEM}/{layout.ASSETS}/",
        commit_members=(layout.COMMITTED,),
        options={
            "zarr": Option("3", "zarr version", ("2", "3")),
            "ocdbt": Option(default=True, help="write one OCDBT database instead of one folder per array"),
            "compression": Option("none", "compression of chunks", ("none", "zstd")),
            "chunks": Option("auto", orbax.CHUNK_HELP),
            "data_file_size": orbax.FILE_OPTION,
        },
        loaded_by="orbax-checkpoint 0.12.8 as MaxText calls it: CheckpointManager and v1, item `items`",
        version=version,
        step_folder=str,
        in_store=orbax.in_store,
        prepare=orbax.prepare,
    ),
)
