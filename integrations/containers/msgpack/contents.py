"""Converts a flax-style msgpack tree to the engine's terms.

`gather` turns the tree of an index into TensorSpecs, values and empties. Python's own numbers and bools become
tensors of rank 0, as when flax restores a state; text is a value, nil and empty nodes are empties.

**Marks.** flax turns lists into maps and cannot distinguish a number from an array of rank 0, so wherry's writer keeps
this information in the *form* of heads, which every msgpack reader ignores: the first key of the root has a
head of five bytes (three if the root is a list), the first key of a list has one of two, an empty list is a map head
of three bytes, and an empty tuple one of five. No packer produces such heads. In marked files native numbers are
values. See `layout.py`.
"""

from __future__ import annotations

from dataclasses import field

from wherry.core.detection import Kind
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest, Value
from wherry.core.tensorspec import TensorSpec
from wherry.formats.format import Extent
from wherry.integrations.containers.flat.reader import Place
from wherry.integrations.containers.msgpack.heads import EMPTY_MARKS
from wherry.integrations.containers.msgpack.index import SCALAR, Array, Blob, Node, Sequence, Table, canonical
from wherry.store.location import Location

ROOT_MARKS = {5: "dict", 3: "list"}
LIST_MARK = 2
# A numpy scalar and an array of rank 0 differ only in their ext type, which the tag records.
SCALAR_TAG = {"numpy": "scalar"}


@dataclass(slots=True)
class MsgpackContents:
    """The leaves of a tree.

    Attributes:
        specs: the tensors, in stored order.
        places: the extents of their bytes in files, or the bytes themselves if they are not an array's.
        values: texts, and in marked files numbers.
        empties: empty nodes and nil.
        lists: nodes that are sequences.
        marked: whether wherry wrote it.
    """

    marked: bool = False
    specs: dict[KeyPath, TensorSpec] = field(default_factory=dict[KeyPath, TensorSpec])
    places: dict[KeyPath, Place] = field(default_factory=dict[KeyPath, Place])
    values: dict[KeyPath, Value] = field(default_factory=dict[KeyPath, Value])
    empties: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    lists: set[KeyPath] = field(default_factory=set[KeyPath])

    def manifest(self, step: int | None, kind: Kind) -> Manifest:
        """The leaves as those of a checkpoint of this step and kind."""
        lists = frozenset(self.lists)
        return Manifest(
            self.specs, values=self.values, empties=self.empties, lists=lists, step=step, kind=kind
        )


def gather(root: Node, file: Location) -> MsgpackContents:
    """Collect the leaves of a tree by kind.

    Args:
        root: the tree from `index_file`.
        file: the file that holds the arrays.
    """
    kind = ROOT_MARKS.get(root.mark) if isinstance(root, Table) else None
    found = MsgpackContents(marked=kind is not None)
    if kind == "list":
        found.lists.add(())
    _sort(root, (), file, found)
    return found


def _sort(node: Node, path: KeyPath, file: Location, found: MsgpackContents) -> None:
    if isinstance(node, (Table, Sequence)):
        _sort_children(node, path, file, found)
    elif isinstance(node, Array):
        tags = SCALAR_TAG if node.code == SCALAR else None
        found.specs[path] = TensorSpec(path, node.shape, node.dtype, tags=tags)
        found.places[path] = tuple(Extent(file, piece.offset, piece.length) for piece in node.pieces)
    elif isinstance(node, Blob):
        found.values[path] = f"<bytes of {node.piece.length}>"
    elif node.value is None:
        found.empties[path] = "none"
    elif isinstance(node.value, str) or (found.marked and not isinstance(node.value, complex)):
        found.values[path] = node.value
    else:
        dtype, data = canonical(node.value)
        found.specs[path] = TensorSpec(path, (), dtype)
        found.places[path] = data


def _sort_children(node: Table | Sequence, path: KeyPath, file: Location, found: MsgpackContents) -> None:
    if isinstance(node, Sequence):
        children = [(str(number), child) for number, child in enumerate(node.items)]
        empty = "list"
    else:
        children = list(node.entries.items())
        empty = EMPTY_MARKS[node.width]
    if not children:
        found.empties[path] = empty
    elif isinstance(node, Sequence) or (found.marked and node.mark == LIST_MARK):
        found.lists.add(path)
    for key, child in children:
        _sort(child, (*path, key), file, found)
