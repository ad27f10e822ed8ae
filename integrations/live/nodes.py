"""One level of a live state: the children of a node, and how to rebuild the node with other children.

Facts (Flax 0.12.8, Penzai 0.2.5, JAX 0.10.2, torch 2.13): a linen box is a pytree node with the one child `value` and
static names; so is an NNX variable, whose names are metadata (`out_sharding`, formerly `sharding_names` or `sharding`);
an NNX module is filled through its state, in place. A mutable Penzai variable is not a pytree node and may occur at
several places; a frozen one is a node with the child `value`; a `NamedArray` has the child `data_array` and static
names. A torch module has a flat state dict.

No framework is imported here: the types in the state have been imported by the program that made it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.errors import UnsupportedError

if TYPE_CHECKING:
    from wherry.core.tensorspec import AxisName

_NNX_NAMES = ("out_sharding", "sharding_names", "sharding")
_NNX_OBJECTS = ("Module", "Optimizer", "Pytree", "Object")
_NNX_VARIABLES = ("Variable", "VariableState")


class WrapperFacts(NamedTuple):
    """What the wrappers around an array state about it.

    Attributes:
        axes: logical names of its axes, None for an axis without one.
        rules: logical name → mesh axes.
        box: class of the linen box.
        collection: class of the NNX variable.
        label: label of the Penzai variable.
        root: key path of the enclosing Penzai model.
    """

    axes: tuple[AxisName, ...] | None = None
    rules: tuple[tuple[str, AxisName], ...] = ()
    box: str | None = None
    collection: str | None = None
    label: str | None = None
    root: tuple[str, ...] | None = None


class Node(NamedTuple):
    """A node that has been opened.

    Attributes:
        children: part of the key path → child.
        remake: returns the node with other children, in the order of `children`.
        kind: `dict`, `list`, `tuple` or `none`; what the node counts as if it has no children.
        wrapper: whether it only describes its one child, so that its part is not part of the parameter's name.
        facts: what it states, by the field names of `WrapperFacts`.
        variable: whether it is a mutable Penzai variable, identified by its label wherever it occurs.
    """

    children: tuple[tuple[str, Any], ...]
    remake: Callable[[Sequence[Any]], Any]
    kind: str = "dict"
    wrapper: bool = False
    facts: dict[str, Any] = {}  # noqa: RUF012  never changed
    variable: bool = False


def open_node(node: Any) -> Node | None:
    """Open one node; None if it is a leaf.

    Raises:
        UnsupportedError: an object of a framework that cannot be flattened.
    """
    if node is None:
        return Node((), _nothing, "none")
    for owner, open_ in (("torch", _torch), ("flax", _flax), ("penzai", _penzai)):
        found = open_(node) if owner in sys.modules else None
        if found is not None:
            return found
    return _builtin(node) or _registered_node(node) or _dataclass(node)


def is_torch(value: Any) -> bool:
    """Whether the value is a PyTorch tensor."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_penzai(value: Any) -> bool:
    """Whether the value is a model, a layer or another structure of Penzai."""
    return "penzai" in sys.modules and "Struct" in ancestors(value, "penzai")


def ancestors(value: Any, owner: str) -> set[str]:
    """Names of the classes of a package that a value is an instance of."""
    return {one.__name__ for one in type(value).__mro__ if one.__module__.split(".")[0] == owner}


def _torch(node: Any) -> Node | None:
    torch: Any = sys.modules["torch"]
    if not isinstance(node, torch.nn.Module | torch.optim.Optimizer):
        return None
    whole = isinstance(node, torch.nn.Module)
    given: dict[str, Any] = node.state_dict(**({"keep_vars": True} if whole else {}))
    once = {id(value): value.detach() if is_torch(value) else value for value in given.values()}
    held = {name: once[id(value)] for name, value in given.items()}

    def remake(children: Sequence[Any]) -> Any:
        made = dict(zip(held, children, strict=True))
        if not whole:
            node.load_state_dict(made)
        elif any(is_torch(value) and value.is_meta for value in held.values()):
            node.load_state_dict(made, assign=True)
            _tie(node, held)
        else:
            node.load_state_dict(made)
        return node

    return Node(tuple(held.items()), remake)


def _tie(module: Any, held: dict[str, Any]) -> None:
    """Tie parameters again that were tied before a module on `meta` was given tensors by name."""
    first: dict[int, str] = {}
    for name, tensor in held.items():
        other = first.setdefault(id(tensor), name)
        if other != name:
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, module.get_parameter(other))


def _flax(node: Any) -> Node | None:
    classes = ancestors(node, "flax")
    if not classes:
        return None
    if "AxisMetadata" in classes:
        return _box(node, classes)
    if classes & set(_NNX_VARIABLES):
        return _variable(node)
    nnx: Any = sys.modules.get("flax.nnx")
    if (
        nnx is None
        or "State" in classes
        or not classes & set(_NNX_OBJECTS)
        or "linen" in type(node).__module__
    ):
        return None
    if isinstance(node, type):
        return None
    state = open_node(nnx.state(node))
    if state is None:
        raise UnsupportedError(f"unsupported NNX type {type(node).__name__}: it has no state")

    def remake(children: Sequence[Any]) -> Any:
        nnx.update(node, state.remake(children))
        return node

    return Node(state.children, remake, state.kind)


def _box(node: Any, classes: set[str]) -> Node:
    """A linen box of one of Flax's own two classes; the names of other metadata classes have no general meaning."""
    if "Partitioned" not in classes:
        raise UnsupportedError(
            f"unsupported box class {type(node).__name__}", cure="unbox it with flax.linen.meta.unbox"
        )
    kind = "LogicallyPartitioned" if "LogicallyPartitioned" in classes else "Partitioned"
    rules = tuple((str(name), _entry(axes)) for name, axes in getattr(node, "rules", None) or ())
    facts: dict[str, Any] = {"axes": tuple(map(_entry, node.names)), "box": kind, "rules": rules}

    def remake(children: Sequence[Any]) -> Any:
        return node.replace_boxed(children[0])

    return Node((("value", node.value),), remake, wrapper=True, facts=facts)


def _variable(node: Any) -> Node:
    metadata: dict[str, Any] = node.get_metadata() if hasattr(node, "get_metadata") else vars(node)
    names = next((metadata[name] for name in _NNX_NAMES if metadata.get(name) is not None), None)
    kind = getattr(node, "type", type(node)) if "VariableState" in ancestors(node, "flax") else type(node)
    facts: dict[str, Any] = {"collection": kind.__name__}
    if isinstance(names, tuple | list):
        facts["axes"] = tuple(map(_entry, names))
        facts["rules"] = tuple(
            (str(name), _entry(axes)) for name, axes in metadata.get("sharding_rules") or ()
        )
    value = node.get_raw_value() if hasattr(node, "get_raw_value") else getattr(node, "raw_value", None)
    value = node.value if value is None else value

    def remake(children: Sequence[Any]) -> Any:
        return node.replace(children[0])

    return Node((("value", value),), remake, wrapper=True, facts=facts)


def _penzai(node: Any) -> Node | None:
    classes = ancestors(node, "penzai")
    if "LabeledVariable" in classes:
        label = str(node.label)

        def thaw(children: Sequence[Any]) -> Any:
            return dataclasses.replace(node.freeze(), value=children[0]).unfreeze_as_copy()

        return Node((("value", node.value),), thaw, wrapper=True, facts={"label": label}, variable=True)
    if "LabeledVariableValue" in classes:
        facts = {"label": str(node.label)}
        return Node((("value", node.value),), _replacing(node, ["value"]), wrapper=True, facts=facts)
    if "NamedArrayBase" not in classes:
        return None
    named = node.as_namedarray() if "NamedArrayView" in classes else node
    axes = (*(None for _ in named.positional_shape), *map(str, named.named_axes))
    child = ("data_array", named.data_array)
    return Node((child,), _replacing(named, ["data_array"]), wrapper=True, facts={"axes": axes})


def _builtin(node: Any) -> Node | None:
    """Mappings and sequences of Python; a named tuple without fields counts as `none`, as in Orbax."""
    if type(node) in (dict, OrderedDict):
        keys: list[Any] = list(node)

        def rebuild_mapping(children: Sequence[Any]) -> Any:
            return type(node)(zip(keys, children, strict=True))

        return Node(tuple((str(key), node[key]) for key in keys), rebuild_mapping)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        fields: tuple[str, ...] = getattr(node, "_fields")  # noqa: B009  a tuple of no known class

        def rebuild_fields(children: Sequence[Any]) -> Any:
            return type(node)(*children)

        return Node(tuple(zip(fields, node, strict=True)), rebuild_fields, "dict" if fields else "none")
    if type(node) in (list, tuple):
        kind = type(node)
        return Node(tuple((str(number), child) for number, child in enumerate(node)), kind, kind.__name__)
    return None


def _registered_node(node: Any) -> Node | None:
    """A node that is registered with JAX; JAX returns an array unchanged."""
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return None

    def other(one: Any) -> bool:
        return one is not node

    found, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=other)
    if len(found) == 1 and not found[0][0]:
        return None
    sequence = bool(found) and all(hasattr(path[0], "idx") for path, _ in found)
    return Node(
        tuple((_part(path[0]), child) for path, child in found),
        structure.unflatten,
        "list" if sequence else "dict",
    )


def _dataclass(node: Any) -> Node | None:
    if not dataclasses.is_dataclass(node) or isinstance(node, type) or hasattr(node, "dtype"):
        return None
    names = [field.name for field in dataclasses.fields(node) if field.init]
    return Node(tuple((name, getattr(node, name)) for name in names), _replacing(node, names))


def _nothing(_children: Sequence[Any]) -> None:
    """Remake a node without children."""


def _replacing(node: Any, names: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """How to rebuild a dataclass with other values of these fields."""

    def remake(children: Sequence[Any]) -> Any:
        return dataclasses.replace(node, **dict(zip(names, children, strict=True)))

    return remake


def _part(key: Any) -> str:
    """A part of a JAX key path as a checkpoint spells it: key of a dict, index, or attribute."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def _entry(name: Any) -> AxisName:
    return tuple(map(str, name)) if isinstance(name, tuple | list) else None if name is None else str(name)
