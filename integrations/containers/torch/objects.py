"""From key paths back to the nested object that torch.save would have been given.

Nodes are dicts, or lists where the manifest says so; keys that were numbers are numbers again, and objects of a class
are (`torch_typed`), as far as the manifest's `custom` tells. Tensors stay TensorSpecs until they are pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from wherry.core.keypath import render
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.pickle.writer import PickleWriter
from wherry.integrations.containers.torch.typed import Typed, emit_typed, require_written
from wherry.integrations.containers.torch.writer import emit_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest

_EMPTIES: Mapping[str, Any] = {"dict": {}, "list": [], "tuple": (), "none": None}


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: Any


def build(manifest: Manifest, uri: str) -> Any:
    """The object that holds a manifest's tensors, values and empties.

    Raises:
        UnrepresentableError: a leaf lies below another leaf, a list has a gap, or something was an object of a
            class that is not written.
    """
    leaves: dict[KeyPath, _Leaf] = {path: _Leaf(spec) for path, spec in manifest.tensors.items()}
    leaves |= {path: _Leaf(value) for path, value in manifest.values.items()}
    leaves |= {path: _Leaf(_EMPTIES[kind]) for path, kind in manifest.empties.items()}
    if () in leaves and len(leaves) == 1:
        return _Finish(manifest, uri).node(leaves[()], ())
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        _insert(root, path, leaf, uri)
    return _Finish(manifest, uri).node(root, ())


def _insert(root: dict[str, Any], path: KeyPath, leaf: _Leaf, uri: str) -> None:
    node: Any = root
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            break
    if not path or not isinstance(node, dict) or path[-1] in node:
        raise UnrepresentableError(
            f"{render(path)!r} would have to be a leaf and a node at once",
            uri=uri,
            cure="rename it in the source",
        )
    node[path[-1]] = leaf


class _Finish:
    """Turns the tree of names into the object."""

    def __init__(self, manifest: Manifest, uri: str) -> None:
        said: Any = manifest.custom.get("pickle")
        notes: dict[str, Any] = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        self._types: dict[str, Any] = notes.get("types") or {}
        self._keys: dict[str, Any] = notes.get("keys") or {}
        self._lists = manifest.lists
        self._uri = uri

    def node(self, node: Any, path: KeyPath) -> Any:
        value = self._plain(node, path)
        kind = self._types.get(render(path)) if self._types else None
        if not isinstance(kind, str) or isinstance(value, TensorSpec):
            return value
        require_written(path, kind, value, self._uri)
        return Typed(kind, value)

    def _plain(self, node: Any, path: KeyPath) -> Any:
        if isinstance(node, _Leaf):
            return node.value
        children = {name: self.node(child, (*path, name)) for name, child in node.items()}
        if path not in self._lists:
            return {self._key((*path, name)): child for name, child in children.items()}
        names = [str(index) for index in range(len(children))]
        if set(names) != set(children):
            raise UnrepresentableError(f"the list {render(path)!r} has gaps", uri=self._uri)
        return [children[name] for name in names]

    def _key(self, path: KeyPath) -> Any:
        return self._keys.get(render(path), path[-1]) if self._keys else path[-1]


def pickled(root: Any) -> tuple[bytes, list[TensorSpec]]:
    """The pickle of an object, and its tensors in the order in which it numbers their storages."""
    out, specs = PickleWriter(), list[TensorSpec]()
    _emit(out, root, specs)
    return out.done(), specs


def _emit(out: PickleWriter, node: Any, specs: list[TensorSpec]) -> None:
    if isinstance(node, TensorSpec):
        emit_tensor(out, node, str(len(specs)))
        specs.append(node)
    elif isinstance(node, Typed):
        emit_typed(out, node, lambda child: _emit(out, child, specs))
    elif isinstance(node, dict):
        children = cast("dict[str, Any]", node)
        out.mapping((key, partial(_emit, out, child, specs)) for key, child in children.items())
    elif isinstance(node, list):
        out.sequence([partial(_emit, out, child, specs) for child in cast("list[Any]", node)])
    else:
        out.value(node)
