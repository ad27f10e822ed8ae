"""The msgpack tree by which PaxML 1.2 finds its arrays: a placeholder for each array, and nil and empty nodes.

Facts (orbax 0.5.9, with which paxml 1.4.0 restores): `state/checkpoint` must name every leaf that `_METADATA` names;
an array is the text `PLACEHOLDER://<stored name>`. Lists are msgpack arrays.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import render
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.orbax.tree import stored_name

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest

_EMPTY: dict[str, Any] = {"none": None, "dict": {}, "list": [], "tuple": []}
# first byte of short maps, arrays and texts with the largest count that it can hold, then the longer headers.
_MAP, _ARRAY, _TEXT = (0x80, 15, 0xDE), (0x90, 15, 0xDC), (0xA0, 31, 0xDA)
_NIL = b"\xc0"
_SHORT = 1 << 16


def placeholder_file(manifest: Manifest) -> bytes:
    """Build the file for a manifest.

    Raises:
        UnrepresentableError: a leaf is below another leaf.
    """
    tree: dict[str, Any] = {}
    for path, value in manifest.values.items():
        _put(tree, path, None if value is None else _placeholder(path))
    for path in manifest.tensors:
        _put(tree, path, _placeholder(path))
    for path, kind in manifest.empties.items():
        _put(tree, path, _EMPTY[kind])
    return _pack(tree, (), manifest.lists)


def _placeholder(path: KeyPath) -> str:
    return f"PLACEHOLDER://{stored_name(path)}"


def _put(tree: dict[str, Any], path: KeyPath, leaf: Any) -> None:
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise UnrepresentableError("conflicting key path: it is below another leaf", path=render(path))
    if not path or path[-1] in node:
        raise UnrepresentableError(
            "conflicting key path: it is empty, or a node with other leaves", path=render(path)
        )
    node[path[-1]] = leaf


def _pack(node: Any, path: KeyPath, lists: frozenset[KeyPath]) -> bytes:
    if node is None:
        return _NIL
    if isinstance(node, str):
        data = node.encode()
        return _head(_TEXT, len(data)) + data
    if isinstance(node, list):
        return _head(_ARRAY, 0)
    rows: dict[str, Any] = node
    if path in lists and all(str(number) in rows for number in range(len(rows))):
        items = [_pack(rows[str(number)], (*path, str(number)), lists) for number in range(len(rows))]
        return _head(_ARRAY, len(items)) + b"".join(items)
    pairs = [_pack(key, (), lists) + _pack(child, (*path, key), lists) for key, child in rows.items()]
    return _head(_MAP, len(pairs)) + b"".join(pairs)


def _head(form: tuple[int, int, int], count: int) -> bytes:
    short, most, long = form
    if count <= most:
        return bytes([short + count])
    if count < _SHORT:
        return struct.pack(">BH", long, count)
    return struct.pack(">BI", long + 1, count)
