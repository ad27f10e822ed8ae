"""Finds a PaxML checkpoint and determines its layout.

Facts (paxml 1.4.0 read and run): `<job>/checkpoints/checkpoint_<step>/`, eight digits, has the items `state/` and
`metadata/` (from version 1.0 on; before, the arrays are in the step folder itself). `state/` holds one zarr folder for
each array, or since 1.2 optionally an OCDBT database with Orbax's tree files, or with the Flax checkpoint type one
msgpack file `checkpoint` of `{flattened_state, str_pytree_state}`; its step folder has no leading zeros, and the oldest
are a file `checkpoint_<step>`. Temporary names are Orbax's, before 1.0 `tmp_<n>.checkpoint_<n>`.

PaxML's flat names: a key path as one folder name, and what the names show about optimizer and layers.

Facts (paxml 1.4.0, `extract_prefixed_keys_from_nested_map`): parts are joined with `.`; the index of a list or tuple
is appended to the part before it as `_<i>`, without brackets. Nothing on disk marks an appended index, so a name is
split at `.` only and keeps its index. `opt_states_<k>` is the k-th learner. With repeated layers a group follows,
`no_prefix_<j>` for single and `p#<dims>#<sharding>_<j>` for stacked variables, where j is the position in the optax
chain; without any stacked variable the index is appended to the learner, `opt_states_0_2`. Neither j nor the sharding
code is fixed: the group of the moments is the one that contains them (`m` and `v` for Adam).

The item `metadata` of a PaxML checkpoint: its version, and the shapes of arrays before padding.

Facts (paxml 1.4.0): `metadata/metadata` is one JSON object, `{"version": 1.1, "train_state_metadata": {"mdl_vars":
{…}}}`; a leaf has `_array_metadata_tag`, `is_optax_masked_node`, `unpadded_shape` and `dtype`. Version 1.0 has only the
version; before that there was no such item. Optimizer states are left out: a moment is padded like its parameter.
PaxML ignores further keys, so wherry's notes are stored there too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from enum import Enum
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from wherry.core.detection import Verdict, verdict_of_damage
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.steps import step_number
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnrepresentableError, WherryError
from wherry.formats.format import Glimpse, Signs
from wherry.formats.systems import TreeForm
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax.commit import missing_commit
from wherry.integrations.containers.orbax.detection import look
from wherry.integrations.containers.orbax.layout import read_json
from wherry.store.location import Location

SEPARATOR = "."
VARIABLES = "mdl_vars"
OPTIMIZER = "opt_states"
_STACKED = re.compile(r"p#((?:\d{1,18}\.)*(?:\d{1,18})?)#.*")
_LAYER = re.compile(r"x_layers_(\d{1,18})")
_REPEAT = "repeat"
_MOMENTS_OF = "params"
_OTHER_ROOTS = ("step", "extra_state")


def _is_train_state(manifest: Manifest) -> bool:
    """Whether every root is one of PaxML's train state, and its variables are there."""
    roots = {path[0] for path in manifest.tensors if path}
    own = {VARIABLES, OPTIMIZER, *_OTHER_ROOTS}
    known = all(root in own or root.startswith(f"{OPTIMIZER}_") for root in roots)
    return VARIABLES in roots and known


FORM = TreeForm(_is_train_state, f"a train state, with parameters below `{VARIABLES}`")


def flat_name(path: KeyPath, lists: Collection[KeyPath]) -> str:
    """The folder name of an array.

    Args:
        path: its key path; an index of a list or tuple is a separate part.
        lists: the paths of the nodes that are lists or tuples.

    Raises:
        UnrepresentableError: the path has no part that is a name, or starts with an index.
    """
    parts: list[str] = []
    for depth, part in enumerate(path):
        if path[:depth] not in lists:
            parts.append(part)
        elif parts:
            parts[-1] = f"{parts[-1]}_{part}"
        else:
            parts.append("")
    name = SEPARATOR.join(parts)
    if not name or name.startswith("_"):
        raise UnrepresentableError(
            "PaxML cannot name a bare leaf or a list at the root",
            path=render(path),
            cure="put it into a dict",
        )
    return name


def split_name(name: str) -> KeyPath:
    """Split a folder name into a key path; list indices stay appended to their parts."""
    return tuple(name.split(SEPARATOR))


def optimizer_groups(specs: Mapping[KeyPath, TensorSpec]) -> dict[str, dict[str, Any]]:
    """The groups of the optimizer, by their contents.

    Returns:
        Printed path of each group → its `fields` (`count`, `m`, `v`, …) and, if it is stacked according to its name,
        the extents of the stack.
    """
    groups: dict[str, dict[str, Any]] = {}
    for path in specs:
        if not path or not path[0].startswith(OPTIMIZER):
            continue
        depth = _field_depth(path)
        if depth is None:
            continue
        row = groups.setdefault(render(path[:depth]), {"fields": set[str]()})
        row["fields"].add(path[depth])
        stack = next((found for part in path[:depth] if (found := _STACKED.fullmatch(part))), None)
        if stack is not None:
            row["stacked"] = [int(extent) for extent in stack.group(1).split(".") if extent]
    return {name: {**row, "fields": sorted(row["fields"])} for name, row in sorted(groups.items())}


def layers(paths: Iterable[KeyPath]) -> dict[str, Any] | None:
    """The form of the layers: `repeated` (stacked on axis 0) with the sublayers of a block, or one by one."""
    variables = [path for path in paths if path[:1] == (VARIABLES,)]
    found = [(path, at) for path in variables for at, part in enumerate(path) if _LAYER.fullmatch(part)]
    if not found:
        return None
    numbers = {int(part[len("x_layers_") :]) for path, at in found for part in (path[at],)}
    return {"repeated": any(_REPEAT in path[:at] for path, at in found), "x_layers": len(numbers)}


def _field_depth(path: KeyPath) -> int | None:
    """Position of the field of an optimizer state in its path: before the moments' `params`, else last."""
    if _MOMENTS_OF in path:
        depth = path.index(_MOMENTS_OF) - 1
        return depth if depth > 0 else None
    return len(path) - 1 if len(path) > 1 else None


JsonObject: TypeAlias = dict[str, Any]

METADATA_FOLDER = "metadata"
METADATA_FILE = "metadata/metadata"
NOTES = "wherry"
_VERSION = "version"
_TREE = "train_state_metadata"
_TAG = "_array_metadata_tag"
_MASKED = "is_optax_masked_node"
_SHAPE = "unpadded_shape"
_DTYPE = "dtype"
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Metadata:
    """Contents of the item.

    Attributes:
        version: 1.0, 1.1 or 1.2; 0.0 without the item.
        unpadded: key path of each variable → its shape before padding.
        notes: notes of wherry's writer; empty for checkpoints of other writers.
    """

    version: float = 0.0
    unpadded: Mapping[KeyPath, tuple[int, ...]] = field(default_factory=dict[KeyPath, "tuple[int, ...]"])
    notes: JsonObject = field(default_factory=dict[str, Any])


def read_metadata(home: Location) -> Metadata:
    """Read the item of a step folder; version 0.0 if there is none.

    Raises:
        IncompleteError: the item is empty.
        CorruptError: the item does not have PaxML's form.
    """
    place = home.join(METADATA_FILE)
    if not place.exists():
        return Metadata()
    try:
        data = read_json(place)
    except IncompleteError as error:
        error.what = error.what.replace(place.name, METADATA_FILE, 1)
        raise
    version, tree, notes = data.get(_VERSION), data.get(_TREE), data.get(NOTES)
    if isinstance(version, bool) or not isinstance(version, (int, float)):
        raise CorruptError("missing key 'version' in the metadata", uri=place.uri)
    unpadded = dict(_shapes(tree, (), place.uri)) if isinstance(tree, dict) else {}
    return Metadata(float(version), unpadded, notes if isinstance(notes, dict) else {})


def unpad(specs: Mapping[KeyPath, TensorSpec], metadata: Metadata) -> dict[KeyPath, TensorSpec]:
    """Cut padded arrays to their shape before padding.

    A moment is below the path of its parameter (without `mdl_vars`) and is cut like the parameter if it is stored with
    the same shape.

    Args:
        specs: the stored arrays.
        metadata: the item.

    Returns:
        The tensors.

    Raises:
        CorruptError: an array is smaller than its shape before padding, or of another rank.
    """
    cut: dict[KeyPath, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for path, shape in metadata.unpadded.items():
        spec = specs.get(path)
        if spec is not None and spec.shape != shape:
            larger = len(shape) == len(spec.shape) and all(
                stored >= extent for stored, extent in zip(spec.shape, shape, strict=True)
            )
            if not larger:
                raise CorruptError(
                    f"stored shape {spec.shape} does not match the shape {shape} before padding",
                    path=spec.name,
                    cure="use another step; this one was saved by a mismatched model",
                )
            cut[path[1:]] = (spec.shape, shape)
    return {path: _cut(spec, cut) for path, spec in specs.items()}


def metadata_item(version: float, specs: Mapping[KeyPath, TensorSpec], notes: JsonObject) -> JsonObject:
    """Build the item for tensors to write; nothing is padded.

    Args:
        version: 1.1 or 1.2.
        specs: key path, with list indices as separate parts, → tensor.
        notes: wherry's notes.
    """
    tree: JsonObject = {VARIABLES: {}}
    for path, spec in sorted(specs.items()):
        if path[:1] == (VARIABLES,):
            node = tree
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = {_TAG: True, _MASKED: False, _SHAPE: list(spec.shape), _DTYPE: spec.dtype}
    return {_VERSION: version, _TREE: tree, NOTES: notes}


def _shapes(node: JsonObject, path: KeyPath, uri: str) -> Iterator[tuple[KeyPath, tuple[int, ...]]]:
    if node.get(_TAG) is True:
        shape = node.get(_SHAPE)
        if shape is not None:
            known = isinstance(shape, list) and all(type(extent) is int and extent >= 0 for extent in shape)
            if not known:
                raise CorruptError(
                    f"invalid {_SHAPE}: expected a shape, got {shape!r}", uri=uri, path=render(path)
                )
            yield path, tuple(shape)
        return
    if len(path) > _DEEPEST:
        raise CorruptError(f"{_TREE} is nested too deeply", uri=uri)
    for key, child in node.items():
        if isinstance(child, dict):
            yield from _shapes(child, (*path, key), uri)  # pyright: ignore[reportUnknownArgumentType]  JSON


def _cut(spec: TensorSpec, cut: Mapping[KeyPath, tuple[tuple[int, ...], tuple[int, ...]]]) -> TensorSpec:
    if not cut or not spec.path:
        return spec
    if spec.path[0] != VARIABLES and not spec.path[0].startswith(OPTIMIZER):
        return spec
    for start in range(1, len(spec.path)):
        found = cut.get(spec.path[start:])
        if found is not None and found[0] == spec.shape:
            return replace(spec, shape=found[1])
    return spec


STATE = "state"
MSGPACK = orbax.MSGPACK
COMMITTED = orbax.COMMITTED
NEWEST = 1.2
_ENVELOPE = b"\xafflattened_state"
_ENVELOPE_BYTES = 64
_TEMPORARY = re.compile(r"tmp_\d+\.checkpoint_\d+")
_NAME_MARKS = (f"{VARIABLES}.", f"{OPTIMIZER}_")


SIGNS = Signs(
    head=b".{0,48}" + _ENVELOPE,
    entries=frozenset({METADATA_FOLDER, MSGPACK}),
    folders=True,
    named=STATE,
    starts=(orbax.PROCESS_PREFIX,),
)


class StateLayout(Enum):
    """The storage of the state; the value is its wording in the format version."""

    ARRAYS = "per-array zarr2 directories"
    OCDBT = "ocdbt"
    FLAX = "one msgpack"


@dataclass(frozen=True, slots=True)
class Place:
    """A PaxML checkpoint.

    Attributes:
        home: the step folder; the folder or file of the state if it is separate.
        state: the folder of the arrays, or the msgpack file.
        layout: the storage of the state.
        metadata: the item `metadata`; version 0.0 if there is none.
        damage: the error of reading that item, if any.
    """

    home: Location
    state: Location
    layout: StateLayout
    metadata: Metadata
    damage: WherryError | None = None

    @property
    def version(self) -> str:
        """The text of the format version."""
        return f"paxml {self.metadata.version:.1f}, {self.layout.value}"

    @property
    def inner(self) -> str:
        """The name of the state in the checkpoint; empty if it is the checkpoint itself."""
        return self.state.path[len(self.home.path.rstrip("/")) :].strip("/")

    @property
    def step(self) -> int | None:
        """The step in the folder's name."""
        name = orbax.final_name(self.home.name)
        own = step_number(name.rpartition(".")[2])
        return step_number(self.home.parent.name) if own is None and self.home.name == STATE else own

    def verdict(self) -> tuple[Verdict, str | None]:
        """The verdict and its reason, from names only."""
        try:
            self.require_committed()
        except OSError:
            raise
        except WherryError as error:
            return verdict_of_damage(error.verdict), error.what
        return "ok", None

    def require_committed(self) -> None:
        """Refuse a save whose names and small files say that it was not committed.

        Raises:
            IncompleteError: a sign of the commit is missing.
            CorruptError: a small file is invalid.
        """
        if self.damage is not None:
            raise self.damage
        protocol, item = (
            self.home.store.protocol,
            self.state.parent if self.layout is StateLayout.FLAX else self.state,
        )
        alone = self.home == self.state
        if _TEMPORARY.fullmatch(self.home.name):
            reason = "the folder has the name of a save that was never committed"
        elif protocol in orbax.RENAMELESS and not alone and not self.home.join(COMMITTED).exists():
            reason = f"missing {COMMITTED}, which PaxML requires on {protocol}://"
        else:
            reason = None if alone and self.layout is StateLayout.FLAX else missing_commit(item)
        if reason is not None:
            raise IncompleteError(reason, uri=self.home.uri, cure="use another step")


_FOUND: WeakKeyDictionary[Glimpse, Place | None] = WeakKeyDictionary()


def find(glimpse: Glimpse) -> Place | None:
    """The PaxML checkpoint at a location, or around a state at a location, or None; searched once for each glimpse."""
    if glimpse not in _FOUND:
        _FOUND[glimpse] = _find(glimpse)
    return _FOUND[glimpse]


def _find(glimpse: Glimpse) -> Place | None:
    if glimpse.is_file:
        lone = step_number(glimpse.location.name) is not None and _is_flax(glimpse.head)
        return _alone(glimpse.location, StateLayout.FLAX) if lone else None
    if not glimpse.is_dir:
        return None
    if METADATA_FOLDER in glimpse.entries:
        return _in_step(glimpse)
    if glimpse.location.name == STATE and glimpse.location.parent.join(METADATA_FILE).exists():
        return _in_step(Glimpse(glimpse.location.parent))
    layout = _layout(glimpse)
    if layout is StateLayout.FLAX:
        return _alone(glimpse.location, layout, glimpse.location.join(MSGPACK))
    return _alone(glimpse.location, layout) if layout is StateLayout.ARRAYS and has_names(glimpse) else None


def _is_state(glimpse: Glimpse, layout: StateLayout) -> bool:
    """Whether the state itself shows that it is PaxML's; only of a step whose item `metadata` cannot be read."""
    if layout is not StateLayout.OCDBT:
        return layout is StateLayout.FLAX
    item = look(glimpse)
    return (
        item is not None
        and item.leaves is not None
        and any(path[:1] == (VARIABLES,) for path in item.leaves.arrays)
    )


def has_names(glimpse: Glimpse) -> bool:
    """Whether a folder has arrays with PaxML's names."""
    return any(entry.is_dir and name.startswith(_NAME_MARKS) for name, entry in glimpse.entries.items())


def _alone(home: Location, layout: StateLayout, state: Location | None = None) -> Place:
    return Place(home, state or home, layout, Metadata())


def _in_step(glimpse: Glimpse) -> Place | None:
    place = glimpse.location.join(STATE)
    inside = Glimpse(place)
    layout = _layout(inside)
    if layout is None and not (STATE in glimpse.entries or step_number(glimpse.location.name) is not None):
        return None
    found, damage = Metadata(), None
    try:
        found = read_metadata(glimpse.location)
    except OSError:
        raise
    except WherryError as error:
        damage = error
    if layout is None:
        lost = IncompleteError(
            "missing arrays: the state has none", uri=glimpse.location.uri, cure="use another step"
        )
        return Place(glimpse.location, place, StateLayout.ARRAYS, found, lost) if found.unpadded else None
    is_paxml = bool(found.version) and (
        bool(found.unpadded) or bool(found.notes) or layout is StateLayout.FLAX
    )
    if not (is_paxml or has_names(inside) or (damage is not None and _is_state(inside, layout))):
        return None
    return Place(
        glimpse.location, place.join(MSGPACK) if layout is StateLayout.FLAX else place, layout, found, damage
    )


def _layout(glimpse: Glimpse) -> StateLayout | None:
    """The storage of the state in a folder; None without a state."""
    entries = glimpse.entries
    if orbax.MANIFEST in entries or any(name.startswith(orbax.PROCESS_PREFIX) for name in entries):
        return StateLayout.OCDBT
    file = entries.get(MSGPACK)
    if file is not None and not file.is_dir:
        return StateLayout.FLAX if _is_flax(glimpse.location.join(MSGPACK).read(0, _ENVELOPE_BYTES)) else None
    folders = any(entry.is_dir and not orbax.is_reserved(name) for name, entry in entries.items())
    return StateLayout.ARRAYS if folders or orbax.STRINGS in entries else None


def _is_flax(head: bytes) -> bool:
    """Whether a msgpack map starts with PaxML's envelope; the headers of map and key may have several widths."""
    return _ENVELOPE in head[:_ENVELOPE_BYTES]
