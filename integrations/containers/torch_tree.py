"""From the inert value of a torch pickle to key paths.

Dicts and sequences become nodes, with list and tuple indices as decimal strings; tensors and plain scalars are
leaves; None and empty containers are empties; anything else (a dtype, a set, bytes) is a value that describes it.
A small pickle can be huge as a tree, because it may name one list a thousand times; nodes are counted against the
length of the pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, HostileError
from wherry.integrations.containers.inert_values import Global, Record
from wherry.integrations.containers.torch_values import TorchTensor
from wherry.keypath import KeyPath, render
from wherry.manifest import Value

if TYPE_CHECKING:
    from collections.abc import Collection

    from wherry.detection import Kind

_MAX_DEPTH = 100
_FREE_NODES = 10_000
_OPTIMIZERS = frozenset({"optimizer", "optimizers", "optim", "opt"})
_OPTIMIZER_STATES = ("optimizer_state", "optimizer_states", "optimizer_state_dict", "last_optimizer_state")
_PARAMETER_NAMES = ("weight", "bias")


@dataclass(slots=True)
class Tree:
    """The leaves of a torch object by key path; see `Manifest` for the meaning of the fields."""

    tensors: dict[KeyPath, TorchTensor] = field(default_factory=dict[KeyPath, TorchTensor])
    values: dict[KeyPath, Value] = field(default_factory=dict[KeyPath, Value])
    empties: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    lists: set[KeyPath] = field(default_factory=set[KeyPath])

    @property
    def kind(self) -> Kind:
        """See `kind_of`."""
        return kind_of(self.tensors, (*self.values, *self.empties))


def kind_of(tensors: Collection[KeyPath], others: Collection[KeyPath]) -> Kind:
    """`train-state` where an optimizer lies beside the rest, `params` for a flat state dict, else `other`.

    Args:
        tensors: nested key paths of tensors.
        others: those of other leaves.
    """
    tops = {path[0].lower() for path in (*tensors, *others) if path}
    if tops & _OPTIMIZERS or tops & set(_OPTIMIZER_STATES):
        return "train-state"
    names = [path[-1].rsplit(".", 1)[-1] for path in tensors if path]
    return "params" if any(name in _PARAMETER_NAMES for name in names) else "other"


def flatten(root: Any, pickle_bytes: int) -> Tree:
    """List the leaves of an inert value.

    Args:
        root: what the machine made.
        pickle_bytes: length of the pickle; an honest tree has fewer nodes.

    Raises:
        HostileError: the tree is deeper or larger than an honest pickle of that length makes.
        CorruptError: two keys of one dict print alike, or the tree contains itself.
    """
    walk = _Walk(pickle_bytes + _FREE_NODES)
    walk.node((), root)
    return walk.tree


class _Walk:
    """One walk with its allowance of nodes."""

    def __init__(self, allowance: int) -> None:
        self.tree = Tree()
        self._left = allowance

    def node(self, path: KeyPath, value: Any) -> None:
        self._left -= 1
        if self._left < 0 or len(path) > _MAX_DEPTH:
            raise HostileError(
                "a tree larger or deeper than its pickle can honestly be", cure="do not use this file"
            )
        if isinstance(value, dict):
            self._mapping(path, value)
        elif type(value) in (list, tuple):
            self._sequence(path, value)
        elif isinstance(value, TorchTensor):
            self.tree.tensors[path] = value
        elif value is None:
            self.tree.empties[path] = "none"
        else:
            self.tree.values[path] = _described(value)

    def _mapping(self, path: KeyPath, value: dict[Any, Any]) -> None:
        if not value:
            self.tree.empties[path] = "dict"
        names = {_key_text(key, path) for key in value}
        if len(names) != len(value):
            raise CorruptError("two keys of one dict print alike", path=render(path))
        for key, child in value.items():
            self.node((*path, _key_text(key, path)), child)

    def _sequence(self, path: KeyPath, value: list[Any] | tuple[Any, ...]) -> None:
        if not value:
            self.tree.empties[path] = "list" if isinstance(value, list) else "tuple"
            return
        self.tree.lists.add(path)
        for index, child in enumerate(value):
            self.node((*path, str(index)), child)


def _key_text(key: Any, path: KeyPath) -> str:
    if isinstance(key, (str, int)):
        return str(key)
    raise CorruptError(f"a {type(key).__name__} as the key of a dict", path=render(path))


def _described(value: Any) -> Value:
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (Global, Record)):
        return f"<{value if isinstance(value, Global) else value.kind}>"
    size = f" of {len(value)}" if isinstance(value, (bytes, set, frozenset)) else ""
    return f"<{type(value).__name__}{size}>"
