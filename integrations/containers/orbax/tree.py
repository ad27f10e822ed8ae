"""The tree of an Orbax item: `_METADATA` and the small files next to it, read into a Manifest and written from one.

Facts: `tree_metadata` maps the repr of a tuple to `key_metadata` (the parts, each with `key_type` 1 for an index of
a sequence or 2 for a key of a mapping) and `value_metadata` (`value_type`, `skip_deserialize`). The repr is never
parsed. The stored name of a leaf is its parts joined with `.`, so `a.b` and `a/b` collide: two leaves with one
name are one array on disk, and one of them was lost during the save. `_sharding` maps base64 of the name to a JSON
string (0.4.1: raw names with empty strings). Only `array_metadatas/process_<n>` identifies typed PRNG keys.

Reads the msgpack tree of an Orbax item, and combines it with `_METADATA`.

Facts: up to 0.5.15 the file `checkpoint` is a msgpack tree. A leaf is an array (aggregated: `Array` ext 1), a number,
a string, nil, or `PLACEHOLDER://<stored name>` (up to 0.0.20 `AGGREGATED://`), which points to an array in the store.
Nil and empty nodes exist only there before 0.4.4, which began to write `_METADATA`. If both files exist, `_METADATA`
states which nodes are lists, and the msgpack tree states where the bytes are: T5X saves whose `_METADATA` has
`skip_deserialize` keep those arrays in the msgpack tree, and one file mixes both kinds.
"""

from __future__ import annotations

import base64
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field
from itertools import islice
from typing import TYPE_CHECKING, Any

from wherry.core.json_document import DROPPED, parse_json
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import JsonLimits
from wherry.core.manifest import Manifest, Value
from wherry.core.tensorspec import AxisName, Sharding, TensorSpec
from wherry.errors import CorruptError, UnsupportedError, describe_exception
from wherry.integrations.containers.orbax.layout import (
    ARRAY_METADATAS,
    MSGPACK,
    PLACEHOLDERS,
    SHARDING,
    STRINGS,
    TREE,
    JsonObject,
    OrbaxItem,
    read_json,
)

if TYPE_CHECKING:
    from wherry.integrations.containers.flat.reader import Place
    from wherry.integrations.containers.msgpack.contents import MsgpackContents
    from wherry.store.location import Location


SEQUENCE, MAPPING = 1, 2
JAX_ARRAY, NUMPY_ARRAY, SCALAR = "jax.Array", "np.ndarray", "scalar"
PRNG = "prng"  # in a tensor's tags: the implementation of the typed keys that the tensor is the data of
SCALAR_TAG = {"python": SCALAR}  # in a tensor's tags: Orbax restores a Python number, and no array of rank 0
_ARRAY_TYPES = frozenset({JAX_ARRAY, NUMPY_ARRAY, SCALAR})
_KEY_DTYPE = "uint32"
_KEY_IMPL = "random_key_impl"
# Every device there is, one copy on each: a number of -1 fits any, so that no topology is stored.
_ANYWHERE = {"sharding_type": "NamedSharding", "shape": [-1], "axis_names": ["device"], "partition_spec": []}
# Orbax's word for an empty node → wherry's. An empty NamedTuple (optax EmptyState) is usually stored as `None`.
_EMPTIES = {"None": "none", "Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "tuple"}
_EMPTY_WORDS = {"none": "None", "dict": "Dict", "list": "List", "tuple": "Tuple"}
_INDEX = re.compile(r"[0-9]{1,18}")  # of a list
_MOST_UNKNOWN = 8  # fields of a row that are reported
_ROW_FIELDS = frozenset({"value_type", "skip_deserialize", "write_shape"})
_PLAIN = frozenset({str, int, type(None)})  # types of a key and of its kind
_ONE_SHARDING = JsonLimits(nbytes=1 << 16, nodes=1 << 10)
_SMALL_TREE = 256 << 10  # bytes; sharing takes longer than it saves memory
_LONGEST_TYPE = 100  # characters
_SINGLE = "SingleDeviceSharding"
_SHARDINGS_WITHOUT_MESH = frozenset({_SINGLE, "PositionalSharding", "GSPMDSharding"})


@dataclass(slots=True)
class ItemTree:
    """The leaves of an item.

    Attributes:
        arrays: key path of each leaf that is an array on disk → its stored name.
        aggregated: those whose bytes should be in the msgpack tree.
        scalars: key paths of the leaves, here or in the msgpack tree, that Orbax restores as Python numbers.
        strings: key path of each string leaf → its stored name.
        empties: key path of each node without children → its kind.
        lists: paths of the nodes that are sequences.
        inline: key path of each tensor whose bytes are in the msgpack tree → its spec.
        places: the extents of those bytes, or the bytes themselves.
        texts: key path of each string, number or bool in the msgpack tree → its value.
        unknown: fields of the rows that no release up to 0.12.8 writes.
    """

    arrays: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    aggregated: set[KeyPath] = field(default_factory=set[KeyPath])
    scalars: set[KeyPath] = field(default_factory=set[KeyPath])
    strings: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    empties: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    lists: set[KeyPath] = field(default_factory=set[KeyPath])
    inline: dict[KeyPath, TensorSpec] = field(default_factory=dict[KeyPath, TensorSpec])
    places: dict[KeyPath, Place] = field(default_factory=dict[KeyPath, "Place"])
    texts: dict[KeyPath, Value] = field(default_factory=dict[KeyPath, "Value"])
    unknown: set[str] = field(default_factory=set[str])

    @property
    def tensors(self) -> tuple[KeyPath, ...]:
        """Key paths of all arrays, wherever their bytes are stored."""
        return (*self.arrays, *self.inline)

    @property
    def others(self) -> tuple[KeyPath, ...]:
        """Key paths of the leaves that are not arrays."""
        return (*self.strings, *self.texts)


def stored_name(path: KeyPath) -> str:
    """The name under which Orbax stores a leaf."""
    return ".".join(path)


def parse_tree(metadata: JsonObject, uri: str) -> ItemTree:
    """Read `_METADATA`.

    Raises:
        CorruptError: it is not valid, or two leaves have the same stored name.
        UnsupportedError: the type of a leaf is unknown.
    """
    tree = ItemTree()
    try:
        for row in metadata["tree_metadata"].values():
            path = _path(row["key_metadata"], tree.lists, uri)
            _leaf(tree, path, row["value_metadata"], uri)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"invalid {TREE}: {describe_exception(error)}", uri=uri) from error
    refuse_shared_names({**tree.arrays, **tree.strings}, uri)
    return tree


def read_tree(location: Location) -> JsonObject:
    """`_METADATA` of an item; of a large one only what is read of its rows, with equal parts shared.

    Raises: what `read_json` does.
    """
    file = location.join(TREE)
    entry = file.stat() if file.store.capabilities.local else None
    if entry is not None and entry.size <= _SMALL_TREE:
        tree = read_json(file)
        tree.pop("value_metadata_tree", None)
        return tree
    return read_json(file, {"tree_metadata": _RowReduction(), "value_metadata_tree": DROPPED})


def own_notes(metadata: JsonObject) -> dict[str, Any]:
    """The notes of wherry's writer in `custom_metadata`; empty for items of other writers."""
    custom = metadata.get("custom_metadata")
    own = custom.get("wherry") if isinstance(custom, dict) else None
    return own if isinstance(own, dict) else {}


class _RowReduction:
    """Reduces rows of a tree to what is read of them; a key or type that occurs in many rows is kept once."""

    def __init__(self) -> None:
        self._keys: dict[tuple[Any, Any], JsonObject] = {}
        self._values: dict[tuple[Any, ...], JsonObject] = {}
        self._last: tuple[Any, JsonObject | None] = (None, None)

    def __call__(self, _key: Any, row: Any) -> Any:
        if type(row) is not dict or type(row.get("key_metadata")) is not list:
            return None  # which `parse_tree` refuses
        value, known, keys = row.get("value_metadata"), self._keys, list[Any]()
        if value != self._last[0]:
            self._last = (value, self._value(value) if type(value) is dict else None)
        for key in row["key_metadata"]:  # most of the work for large trees, so without a call for each
            found = None
            if type(key) is dict:
                name, kind = key.get("key"), key.get("key_type")
                if type(name) in _PLAIN and type(kind) in _PLAIN:
                    found = known.get((name, kind))
                    if found is None:
                        found = known[name, kind] = {
                            field: key[field] for field in ("key", "key_type") if field in key
                        }
            keys.append(found)
        return {"key_metadata": keys, "value_metadata": self._last[1]}

    def _value(self, value: JsonObject) -> JsonObject:
        word, skipped = value.get("value_type"), bool(value.get("skip_deserialize"))
        if type(word) is not str:
            return {}
        unknown = tuple(islice((name for name in value if name not in _ROW_FIELDS), _MOST_UNKNOWN))
        known = (word, skipped, *unknown)
        if known not in self._values:
            self._values[known] = {"value_type": word, "skip_deserialize": skipped, **dict.fromkeys(unknown)}
        return self._values[known]


def read_strings(location: Location, tree: ItemTree) -> dict[KeyPath, str]:
    """The string leaves.

    Raises:
        CorruptError: one is missing from `_strings.json`.
    """
    if not tree.strings:
        return {}
    texts = read_json(location.join(STRINGS))
    missing = [path for path, name in tree.strings.items() if not isinstance(texts.get(name), str)]
    if missing:
        raise CorruptError(f"string leaf missing from {STRINGS}", uri=location.uri, path=render(missing[0]))
    return {path: texts[name] for path, name in tree.strings.items()}


def read_shardings(
    location: Location, names: Collection[str] = ()
) -> tuple[dict[str, Sharding], frozenset[str]]:
    """Stored name → how the writer sharded the array over devices; and the unknown sharding types.

    Args:
        location: the item folder.
        names: the stored names of its arrays; if every key is one of them, keys are not encoded (0.4.1).

    Raises:
        CorruptError: an entry is not base64 or not JSON.
    """
    shardings: dict[str, Sharding] = {}
    unknown: set[str] = set()
    parsed: dict[str, Sharding | str] = {}
    rows = read_json(location.join(SHARDING), lambda _key, text: text if type(text) is str else None)
    plain = all(key in names for key in rows)
    for key, text in rows.items():
        if not text:
            continue  # a single-device array of 0.4.1
        try:
            name = key if plain else base64.urlsafe_b64decode(key).decode()
            if text not in parsed:
                parsed[text] = _sharding(text, location)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, CorruptError):
                raise
            raise CorruptError(
                f"invalid entry in {SHARDING}: {describe_exception(error)}", uri=location.uri
            ) from error
        found = parsed[text]
        if isinstance(found, Sharding):
            shardings[name] = found
        elif found not in _SHARDINGS_WITHOUT_MESH:
            unknown.add(found)
    return shardings, frozenset(unknown)


def _sharding(text: str, location: Location) -> Sharding | str:
    """A sharding over a mesh, or the type of another one."""
    fields = parse_json(text.encode(), SHARDING, uri=location.uri, limits=_ONE_SHARDING)
    if fields == _ANYWHERE:
        return _SINGLE
    kind = fields["sharding_type"]
    if kind != "NamedSharding":
        return str(kind)[:_LONGEST_TYPE]
    mesh = tuple(
        (str(name), int(extent)) for name, extent in zip(fields["axis_names"], fields["shape"], strict=True)
    )
    return Sharding(mesh=mesh, spec=tuple(axis_of_json(axis) for axis in fields["partition_spec"]))


def read_prng_impls(location: Location) -> dict[str, str]:
    """Stored name → implementation, for the arrays that are typed PRNG keys.

    Raises:
        CorruptError: a file of `array_metadatas` is invalid.
    """
    impls: dict[str, str] = {}

    def keep(_number: int, row: Any) -> Any:
        fields = row["array_metadata"]
        impl = (fields.get("ext_metadata") or {}).get(_KEY_IMPL)
        if impl:
            impls[str(fields["param_name"])] = str(impl)
        return DROPPED

    for entry in location.join(ARRAY_METADATAS).entries():
        try:
            rows = read_json(location.join(ARRAY_METADATAS).member(entry.name), {"array_metadatas": keep})
            list.__len__(rows["array_metadatas"])  # TypeError for anything else
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptError(
                f"invalid {ARRAY_METADATAS}/{entry.name}: {describe_exception(error)}", uri=location.uri
            ) from error
    return impls


def key_data(manifest: Manifest) -> dict[KeyPath, str]:
    """The tensors that are the data of typed PRNG keys → the implementation of the keys."""
    return {
        path: spec.tags[PRNG]
        for path, spec in manifest.tensors.items()
        if spec.tags and PRNG in spec.tags and spec.dtype == _KEY_DTYPE and spec.shape
    }


def array_metadatas_json(keys: Mapping[KeyPath, str], specs: Mapping[KeyPath, TensorSpec]) -> JsonObject:
    """`array_metadatas/process_0` for the data of typed keys; Orbax needs no row of another array.

    Args:
        keys: what `key_data` returns.
        specs: the tensors with their chunks.
    """
    rows = [
        {
            "param_name": stored_name(path),
            "write_shape": specs[path].shape,
            "chunk_shape": specs[path].chunks,
            "ext_metadata": {_KEY_IMPL: impl},
        }
        for path, impl in keys.items()
    ]
    return {"array_metadatas": [{"array_metadata": row} for row in rows]}


def shardings_json(keys: Iterable[KeyPath]) -> JsonObject:
    """`_sharding` for arrays that Orbax restores as `jax.Array`, on whatever devices there are."""
    return {
        base64.urlsafe_b64encode(stored_name(path).encode()).decode(): json.dumps(_ANYWHERE) for path in keys
    }


def tree_json(
    manifest: Manifest, *, zarr3: bool, ocdbt: bool, custom: Mapping[str, Any], keys: Collection[KeyPath] = ()
) -> JsonObject:
    """`_METADATA` for a manifest.

    Arrays are `np.ndarray`, so that every Orbax API can load them, with and without a target and on any
    devices; `jax.Array` needs `_sharding`. Only those can be typed keys.

    Args:
        manifest: the leaves.
        zarr3: whether arrays are stored as zarr 3.
        ocdbt: whether they are in an OCDBT database.
        custom: the free metadata of the item.
        keys: tensors that are restored as typed keys.
    """
    scalars = [
        path
        for path, spec in manifest.tensors.items()
        if spec.tags is not None and not spec.shape and SCALAR_TAG.items() <= spec.tags.items()
    ]
    rows: dict[KeyPath, str] = {
        **dict.fromkeys(manifest.tensors, NUMPY_ARRAY),
        **dict.fromkeys(scalars, SCALAR),
        **dict.fromkeys(keys, JAX_ARRAY),
        **{path: _value_type(value) for path, value in manifest.values.items()},
        **{path: _EMPTY_WORDS[kind] for path, kind in manifest.empties.items()},
    }
    return {
        "tree_metadata": {
            repr(path): {
                "key_metadata": [
                    {"key": part, "key_type": SEQUENCE if path[:depth] in manifest.lists else MAPPING}
                    for depth, part in enumerate(path)
                ],
                "value_metadata": {"value_type": word, "skip_deserialize": word in _EMPTIES},
            }
            for path, word in sorted(rows.items(), key=_natural)
        },
        "use_ocdbt": ocdbt,
        "use_zarr3": zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": dict(custom),
    }


def _natural(row: tuple[KeyPath, str]) -> list[tuple[int, int, str]]:
    """Sequence indices in numeric order: Orbax rebuilds a list in the order of the rows."""
    return [(0, int(part), "") if _INDEX.fullmatch(part) else (1, 0, part) for part in row[0]]


def _value_type(value: object) -> str:
    if value is None:
        return "None"
    return "string" if isinstance(value, str) else SCALAR


def _path(keys: list[JsonObject], lists: set[KeyPath], uri: str) -> KeyPath:
    path: KeyPath = ()
    for key in keys:
        if key["key_type"] not in (SEQUENCE, MAPPING):
            raise UnsupportedError(
                f"unsupported key type {key['key_type']!r}, which Orbax up to 0.12.8 does not write", uri=uri
            )
        if key["key_type"] == SEQUENCE:
            lists.add(path)
        path = (*path, str(key["key"]))
    return path


def _leaf(tree: ItemTree, path: KeyPath, fields: JsonObject, uri: str) -> None:
    word = fields["value_type"]
    tree.unknown |= fields.keys() - _ROW_FIELDS
    if word in _ARRAY_TYPES:
        tree.arrays[path] = stored_name(path)
        if word == SCALAR:
            tree.scalars.add(path)
        if fields.get("skip_deserialize"):
            tree.aggregated.add(path)
    elif word == "string":
        tree.strings[path] = stored_name(path)
    elif word in _EMPTIES:
        tree.empties[path] = _EMPTIES[word]
    else:
        raise UnsupportedError(f"unsupported leaf type {word!r}", uri=uri, path=render(path))


def refuse_shared_names(names: Mapping[KeyPath, str], uri: str) -> None:
    """Refuse a tree in which two leaves were stored under one name.

    Raises:
        CorruptError: two leaves have the same name; the error names both.
    """
    owners: defaultdict[str, list[KeyPath]] = defaultdict(list)
    for path, name in names.items():
        owners[name].append(path)
    shared = next((paths for paths in owners.values() if len(paths) > 1), None)
    if shared:
        raise CorruptError(
            f"{' and '.join(render(path) for path in shared)} have the same stored name {names[shared[0]]!r}: "
            "Orbax kept only one of them when it saved this checkpoint",
            uri=uri,
            cure="rename the leaves and save again; the checkpoint does not record which tensor was kept",
        )


def axis_of_json(axis: object) -> AxisName:
    """The name of an axis, or the names of several that are one, as JSON has them."""
    if isinstance(axis, list):
        return tuple(str(name) for name in axis)  # pyright: ignore[reportUnknownArgumentType]  JSON
    return None if axis is None else str(axis)


def item_tree(location: Location, item: OrbaxItem, metadata: JsonObject) -> ItemTree:
    """The leaves of an item, from `_METADATA`, the msgpack tree, or both.

    Args:
        location: the item folder.
        item: the files of the item.
        metadata: its `_METADATA`; empty if it has none.

    Raises:
        CorruptError: a file is damaged, two leaves have the same stored name, or the two trees conflict.
        UnsupportedError: the type of a leaf is unknown.
        HostileError: the tree exceeds a limit.
    """
    described = parse_tree(metadata, location.uri) if item.tree else None
    packed = msgpack_tree(location.join(MSGPACK)) if item.msgpack else None
    if described is None or packed is None:
        return described or packed or ItemTree()
    # `_METADATA` with the bytes of the msgpack tree, and with the leaves that only the latter has.
    leaves = {*described.arrays, *described.strings}
    clash = next((path for path in described.empties if path in packed.inline or path in packed.arrays), None)
    if clash is not None:
        raise CorruptError(
            f"conflict between {TREE} and {MSGPACK}: {described.empties[clash]} in the first, an array in the second",
            uri=location.uri,
            path=render(clash),
        )
    owned = set(described.arrays.values())
    new = {path: name for path, name in packed.arrays.items() if path not in leaves and name not in owned}
    # `_METADATA` states of every node above its leaves whether it is a list.
    nodes = {path[:depth] for path in leaves for depth in range(len(path))}
    return ItemTree(
        arrays={
            **{
                path: packed.arrays.get(path, name)
                for path, name in described.arrays.items()
                if path not in packed.inline
            },
            **new,
        },
        aggregated=described.aggregated,
        scalars=described.scalars | packed.scalars,
        strings={path: name for path, name in described.strings.items() if path not in packed.texts},
        empties={
            **{path: kind for path, kind in packed.empties.items() if path not in leaves},
            **described.empties,
        },
        lists=described.lists | (packed.lists - nodes),
        inline=packed.inline,
        places=packed.places,
        texts=packed.texts,
        unknown=described.unknown,
    )


def msgpack_tree(file: Location) -> ItemTree:
    """The leaves of a msgpack tree with placeholders and aggregated arrays; no tensor is read.

    Raises: what `item_tree` does.
    """
    from wherry.integrations.containers.msgpack.contents import gather
    from wherry.integrations.containers.msgpack.index import index_file

    return from_contents(gather(index_file(file), file), file.uri)


def from_contents(contents: MsgpackContents, uri: str) -> ItemTree:
    """The tree in contents that the caller has gathered, whole or in part.

    Raises:
        CorruptError: two placeholders refer to the same array.
    """
    found = ItemTree(
        inline=dict(contents.specs),
        places=dict(contents.places),
        scalars={path for path, place in contents.places.items() if isinstance(place, bytes)},
        empties=dict(contents.empties),
        lists=set(contents.lists),
    )
    for path, value in contents.values.items():
        name = placeholder(value)
        if name is None:
            found.texts[path] = value
        else:
            found.arrays[path] = name
    refuse_shared_names(found.arrays, uri)
    return found


def placeholder(value: object) -> str | None:
    """The stored name that a leaf points to; None for a leaf that is not a placeholder."""
    if not isinstance(value, str):
        return None
    return next((value[len(prefix) :] for prefix in PLACEHOLDERS if value.startswith(prefix)), None)
