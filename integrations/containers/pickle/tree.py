"""Converts an inert value to key paths: the contents of a pickled object, as a tree.

Dicts and sequences become nodes, with list and tuple indices as decimal strings; tensors and plain scalars are
leaves; None and empty containers are empties. Facts that key paths cannot express are stored separately: which keys
were numbers, and the class of every node and value that is more than a plain dict, list or scalar, so that a writer can
restore it, or refuse it by name. A small pickle can be huge as a tree, because it may refer to one list a thousand
times; the number of nodes is limited by the length of the pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Value
from wherry.errors import CorruptError, HostileError, UnsupportedError, WherryError
from wherry.integrations.containers.pickle.harmless import unwrap_config
from wherry.integrations.containers.pickle.values import Attributes, CallRecord, Far, Global, Opaque

if TYPE_CHECKING:
    from collections.abc import Mapping

Key: TypeAlias = int | bool | None
_MAX_DEPTH = 100
_FREE_NODES = 10_000
_MOST_BYTES = 1 << 20  # of one byte string that is kept as a value
LONG = "bytes, not kept"


@dataclass(slots=True)
class PickleTree:
    """The leaves of a pickled object by key path; see `Manifest` for the meaning of the first fields.

    Attributes:
        types: class of a node or value that is more than a dict, list, or plain scalar.
        keys: path of a child → its key in the dict, if that is not a string.
    """

    tensors: dict[KeyPath, Any] = field(default_factory=dict[KeyPath, Any])
    values: dict[KeyPath, Value] = field(default_factory=dict[KeyPath, Value])
    empties: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    lists: set[KeyPath] = field(default_factory=set[KeyPath])
    types: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    keys: dict[KeyPath, Key] = field(default_factory=dict[KeyPath, Key])

    @property
    def custom(self) -> Mapping[str, Any]:
        """`types` and `keys` as a manifest keeps them, paths printed."""
        parts = {"types": self.types, "keys": self.keys}
        found = {
            name: {render(path): said for path, said in part.items()} for name, part in parts.items() if part
        }
        return {"pickle": found} if found else {}


def plant(root: Any, pickle_bytes: int, tensor: type, uri: str | None = None) -> PickleTree:
    """List the leaves of an inert value.

    Args:
        root: the value from the machine.
        pickle_bytes: length of the pickle, which limits the number of nodes.
        tensor: the type of tensors in this format.
        uri: the file, for errors.

    Raises:
        HostileError: the tree exceeds the limit of levels, or of nodes for a pickle of that length.
        CorruptError: two keys of one dict print alike.
        UnsupportedError: a key has an unsupported type.
    """
    walk = _TreeWalk(pickle_bytes + _FREE_NODES, tensor)
    try:
        walk.node((), root)
    except WherryError as error:
        error.uri = error.uri or uri
        raise
    return walk.tree


class _TreeWalk:
    """One walk with its limit of nodes."""

    def __init__(self, allowance: int, tensor: type) -> None:
        self.tree = PickleTree()
        self._left = allowance
        self._tensor = tensor
        self._above: set[int] = set()

    def node(self, path: KeyPath, value: Any) -> None:
        self._left -= 1
        if self._left < 0 or len(path) > _MAX_DEPTH:
            raise HostileError(
                "the tree of the pickle exceeds the limit of nodes or levels", cure="do not use this file"
            )
        if isinstance(value, self._tensor):
            self.tree.tensors[path] = value
        elif isinstance(value, dict):
            self._mapping(path, value)
        elif type(value) in (list, tuple):
            self._sequence(path, value)
        elif isinstance(value, (set, frozenset)):
            self._add_typed(path, type(value).__name__, sorted(value, key=repr))
        elif isinstance(value, CallRecord):
            self._record(path, value)
        elif isinstance(value, Opaque):
            self._add_typed(path, value.kind, value.value)
        elif value is None:
            self.tree.empties[path] = "none"
        else:
            self._leaf(path, value)

    def _leaf(self, path: KeyPath, value: Any) -> None:
        if isinstance(value, bytes):
            kept = len(value) <= _MOST_BYTES
            self.tree.types[path] = self.tree.types.get(path, "bytes") if kept else LONG
            value = value.decode("latin-1") if kept else f"<{len(value)} bytes>"
        elif isinstance(value, Global):
            self.tree.types[path] = "global"
            value = str(value)
        elif isinstance(value, Far):
            self.tree.types[path] = LONG
            value = f"<{value.length} bytes>"
        elif not isinstance(value, (str, bool, int, float)):
            raise UnsupportedError(
                f"unsupported value of type {type(value).__name__} in the pickle", path=render(path)
            )
        self.tree.values[path] = value

    def _add_typed(self, path: KeyPath, kind: str, value: Any) -> None:
        self.tree.types[path] = kind
        self.node(path, value)

    def _record(self, path: KeyPath, record: CallRecord) -> None:
        """An object of a class that is not interpreted: its arguments, state and items, once."""
        if id(record) in self._above:
            self.tree.values[path] = f"<the {record.kind} above>"
            return
        self._above.add(id(record))
        inner = unwrap_config(record)
        if inner is None:
            said = {"args": record.args, "state": record.state, "items": record.items}
            self._add_typed(path, str(record.kind), {name: part for name, part in said.items() if part})
        elif inner[0]:
            self._add_typed(path, *inner)
        else:
            self.node(path, inner[1])
        self._above.discard(id(record))

    def _mapping(self, path: KeyPath, value: dict[Any, Any]) -> None:
        if isinstance(value, Attributes):
            self.tree.types[path] = value.kind
        if not value:
            self.tree.empties[path] = "dict"
        if len({_key_text(key, path) for key in value}) != len(value):
            raise CorruptError("duplicate keys of a dict, when printed", path=render(path))
        for key, child in value.items():
            below = (*path, _key_text(key, path))
            if not isinstance(key, str):
                self.tree.keys[below] = key
            self.node(below, child)

    def _sequence(self, path: KeyPath, value: list[Any] | tuple[Any, ...]) -> None:
        if not value:
            self.tree.empties[path] = "list" if isinstance(value, list) else "tuple"
            return
        self.tree.lists.add(path)
        if isinstance(value, tuple):
            self.tree.types.setdefault(path, "tuple")
        for index, child in enumerate(value):
            self.node((*path, str(index)), child)


_LONGEST_SHOWN = 100  # characters of a key in an error


def _key_text(key: Any, path: KeyPath) -> str:
    if key is None or isinstance(key, (str, int)):
        return str(key)
    shown = repr(key)[:_LONGEST_SHOWN] if type(key) is tuple else type(key).__name__
    raise UnsupportedError(
        f"unsupported dict key {shown} of type {type(key).__name__}",
        path=render(path) or None,
        cure="save the dict with strings or numbers as keys",
    )
