"""Reads the msgpack tree of an Orbax item, and combines it with `_METADATA`.

Facts: up to 0.5.15 the file `checkpoint` is a msgpack tree. A leaf is an array (aggregated: `Array` ext 1), a number,
a string, nil, or `PLACEHOLDER://<stored name>` (up to 0.0.20 `AGGREGATED://`), which points to an array in the store.
Nil and empty nodes exist only there before 0.4.4, which began to write `_METADATA`. If both files exist, `_METADATA`
states which nodes are lists, and the msgpack tree states where the bytes are: T5X saves whose `_METADATA` has
`skip_deserialize` keep those arrays in the msgpack tree, and one file mixes both kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.keypath import render
from wherry.errors import CorruptError
from wherry.integrations.containers.orbax import tree
from wherry.integrations.containers.orbax.layout import MSGPACK, TREE, JsonObject, OrbaxItem

if TYPE_CHECKING:
    from wherry.integrations.containers.msgpack.contents import MsgpackContents
    from wherry.integrations.containers.orbax.tree import ItemTree
    from wherry.storage.location import Location

PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")


def read_tree(location: Location, item: OrbaxItem, metadata: JsonObject) -> ItemTree:
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
    described = tree.parse_tree(metadata, location.uri) if item.tree else None
    packed = msgpack_tree(location.join(MSGPACK)) if item.msgpack else None
    if described is None or packed is None:
        return described or packed or tree.ItemTree()
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
    return tree.ItemTree(
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

    Raises: what `read_tree` does.
    """
    from wherry.integrations.containers.msgpack.contents import gather
    from wherry.integrations.containers.msgpack.index import index_file

    return from_contents(gather(index_file(file), file), file.uri)


def from_contents(contents: MsgpackContents, uri: str) -> ItemTree:
    """The same for contents that the caller has gathered, whole or in part.

    Raises:
        CorruptError: two placeholders refer to the same array.
    """
    found = tree.ItemTree(
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
    tree.refuse_shared_names(found.arrays, uri)
    return found


def placeholder(value: object) -> str | None:
    """The stored name that a leaf points to; None for a leaf that is not a placeholder."""
    if not isinstance(value, str):
        return None
    return next((value[len(prefix) :] for prefix in PLACEHOLDERS if value.startswith(prefix)), None)
