"""The msgpack tree of a legacy T5X checkpoint, without its envelope.

The envelope (`version`, `optimizer`) is not part of key paths. Leaves are divided by the location of their bytes: in
this file, or in an array that a spec or a placeholder names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath, render
from wherry.errors import CorruptError, UnsupportedError
from wherry.integrations.containers.msgpack.contents import MsgpackContents, gather
from wherry.integrations.containers.msgpack.index import Array, Node, Scalar, Table, index_file
from wherry.integrations.formats.t5x import layout
from wherry.integrations.formats.t5x.references import ArrayReference, stored_leaves

if TYPE_CHECKING:
    from wherry.storage.location import Location


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
