"""From key paths back to the nested object that torch.save would have been given.

Nodes are dicts, or lists where the manifest says so; tensors stay TensorSpecs until they are pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from wherry.errors import UnrepresentableError
from wherry.integrations.containers.pickle_writer import PickleWriter
from wherry.integrations.containers.torch_zip_writer import emit_tensor
from wherry.keypath import render
from wherry.tensorspec import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.keypath import KeyPath
    from wherry.manifest import Manifest

_EMPTIES: Mapping[str, Any] = {"dict": {}, "list": [], "tuple": (), "none": None}


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: Any


def build(manifest: Manifest, uri: str) -> Any:
    """The object that holds a manifest's tensors, values and empties.

    Raises:
        UnrepresentableError: a leaf lies below another leaf, or a list has a gap.
    """
    leaves: dict[KeyPath, _Leaf] = {path: _Leaf(spec) for path, spec in manifest.tensors.items()}
    leaves |= {path: _Leaf(value) for path, value in manifest.values.items()}
    leaves |= {path: _Leaf(_EMPTIES[kind]) for path, kind in manifest.empties.items()}
    if () in leaves and len(leaves) == 1:
        return leaves[()].value
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        _insert(root, path, leaf, uri)
    return _finished(root, (), manifest.lists, uri)


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


def _finished(node: Any, path: KeyPath, lists: frozenset[KeyPath], uri: str) -> Any:
    if isinstance(node, _Leaf):
        return node.value
    children = {name: _finished(child, (*path, name), lists, uri) for name, child in node.items()}
    if path not in lists:
        return children
    names = [str(index) for index in range(len(children))]
    if set(names) != set(children):
        raise UnrepresentableError(f"the list {render(path)!r} has gaps", uri=uri)
    return [children[name] for name in names]


def pickled(root: Any) -> tuple[bytes, list[TensorSpec]]:
    """The pickle of an object, and its tensors in the order in which it numbers their storages."""
    out, specs = PickleWriter(), list[TensorSpec]()
    _emit(out, root, specs)
    return out.done(), specs


def _emit(out: PickleWriter, node: Any, specs: list[TensorSpec]) -> None:
    if isinstance(node, TensorSpec):
        emit_tensor(out, node, str(len(specs)))
        specs.append(node)
    elif isinstance(node, dict):
        children = cast("dict[str, Any]", node)
        out.mapping((key, partial(_emit, out, child, specs)) for key, child in children.items())
    elif isinstance(node, list):
        out.sequence([partial(_emit, out, child, specs) for child in cast("list[Any]", node)])
    else:
        out.value(node)
