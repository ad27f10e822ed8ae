"""The item `metadata` of a PaxML checkpoint: its version, and the shapes of arrays before padding.

Facts (paxml 1.4.0): `metadata/metadata` is one JSON object, `{"version": 1.1, "train_state_metadata": {"mdl_vars":
{…}}}`; a leaf has `_array_metadata_tag`, `is_optax_masked_node`, `unpadded_shape` and `dtype`. Version 1.0 has only the
version; before that there was no such item. Optimizer states are left out: a moment is padded like its parameter.
PaxML ignores further keys, so wherry's notes are stored there too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry.core.keypath import KeyPath, render
from wherry.errors import CorruptError, IncompleteError
from wherry.integrations.containers.orbax.layout import read_json
from wherry.integrations.formats.paxml.names import OPTIMIZER, VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.core.tensorspec import TensorSpec
    from wherry.storage.location import Location

JsonObject: TypeAlias = dict[str, Any]

FOLDER = "metadata"
FILE = "metadata/metadata"
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
    place = home.join(FILE)
    if not place.exists():
        return Metadata()
    try:
        data = read_json(place)
    except IncompleteError as error:
        error.what = error.what.replace(place.name, FILE, 1)
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


def build(version: float, specs: Mapping[KeyPath, TensorSpec], notes: JsonObject) -> JsonObject:
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
