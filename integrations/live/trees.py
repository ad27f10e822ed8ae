"""Trees: a live training state as key paths and leaves, and the same state with other leaves.

    for leaf in flatten(state):            # JAX pytrees, linen boxes, NNX modules and states, Penzai models
        leaf.path, leaf.value, leaf.axes   # and NamedArrays, torch modules, optimizers and state dicts, nested
    tree = survey(state)                   # the same leaves, and the empty nodes and sequences of a Manifest
    state = rebuilt(state, change)         # every leaf replaced by what `change(leaf)` returns

Every leaf has two key paths. `stored` is the key path in Orbax's spelling, with the `value` of a box or variable and
the `data_array` of a NamedArray; an export uses it, so that wherry writes what the framework itself would write. `path`
is the parameter's name without them; it is compared when a state is filled. A mutable Penzai variable is identified by
its label below its model, as in Penzai's own label dicts. JAX trees are never changed, a new tree is returned; torch
modules, optimizers and NNX modules are changed in place, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import UnrepresentableError
from wherry.integrations.live.leaves import dtype_of, is_plain, prng_of, shape_of, sharding_of
from wherry.integrations.live.nodes import Node, WrapperFacts, is_penzai, is_torch, open_node
from wherry.live.match import LABEL as _LABEL
from wherry.live.match import Leaf

__all__ = ["Leaf", "StateTree", "flatten", "rebuilt", "survey"]


@dataclass(slots=True)
class StateTree:
    """A flattened live state.

    Attributes:
        leaves: arrays, numbers and text in the order of the tree.
        empties: stored key path → `dict`, `list`, `tuple` or `none`: nodes without children.
        lists: stored key paths of the nodes that are sequences.
    """

    leaves: list[Leaf] = field(default_factory=list[Leaf])
    empties: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    lists: set[KeyPath] = field(default_factory=set[KeyPath])


@dataclass(slots=True)
class _StateWalk:
    """The leaves and nodes that one walk over a state has found.

    Attributes:
        variables: label → the Penzai variable with that label.
        made: label → the rebuilt variable.
        memories: identity of a torch tensor's memory → key path of the first tensor in it.
        taken: stored key paths of the leaves so far.
    """

    variables: dict[str, Any] = field(default_factory=dict[str, Any])
    made: dict[str, Any] = field(default_factory=dict[str, Any])
    memories: dict[Any, KeyPath] = field(default_factory=dict[Any, KeyPath])
    taken: set[KeyPath] = field(default_factory=set[KeyPath])


def flatten(state: Any) -> Iterator[Leaf]:
    """The leaves of a live state in the order of the tree; no bytes are touched, nothing is gathered.

    Args:
        state: a JAX pytree (nested dicts, lists, dataclasses, TrainState, optax states, linen boxes, `nnx.State`),
            an NNX module, a Penzai model, a torch module, optimizer or state dict (DTensor included).

    Raises:
        UnsupportedError: a leaf is not an array, a number or text; the error names it.
        UnrepresentableError: two leaves have the same key path, or two Penzai variables the same label.
    """
    yield from survey(state).leaves


def survey(state: Any) -> StateTree:
    """The leaves with the empty nodes and sequences around them; raises the errors of `flatten`."""
    tree = StateTree()
    _survey(state, (), (), WrapperFacts(), tree, _StateWalk())
    return tree


def rebuilt(state: Any, change: Callable[[Leaf], Any]) -> Any:
    """Rebuild a state with other leaves.

    Args:
        state: as for `flatten`.
        change: returns the new value of a leaf; called once for each leaf, and once for tied weights and shared
            variables.

    Returns:
        A new JAX tree; or the same torch module, optimizer or NNX module, changed after all its leaves were made.
    """
    return _rebuilt(state, (), (), WrapperFacts(), change, _StateWalk())


def _survey(
    node: Any, path: KeyPath, stored: KeyPath, facts: WrapperFacts, tree: StateTree, walk: _StateWalk
) -> None:
    found = open_node(node)
    if found is None:
        tree.leaves.append(_leaf(node, path, stored, facts, walk))
        return
    if found.variable and _was_seen(node, found, walk):
        return
    if not found.children:
        tree.empties[stored] = found.kind
    elif found.kind in ("list", "tuple"):
        tree.lists.add(stored)
    facts = _within(node, path, facts)
    for part, child in found.children:
        _survey(child, *_below(found, part, path, stored, facts), tree, walk)


def _rebuilt(
    node: Any,
    path: KeyPath,
    stored: KeyPath,
    facts: WrapperFacts,
    change: Callable[[Leaf], Any],
    walk: _StateWalk,
) -> Any:
    found = open_node(node)
    if found is None:
        return change(_leaf(node, path, stored, facts, walk))
    if found.variable and _was_seen(node, found, walk):
        return walk.made[found.facts[_LABEL]]
    facts = _within(node, path, facts)
    made = found.remake(
        [
            _rebuilt(child, *_below(found, part, path, stored, facts), change, walk)
            for part, child in found.children
        ]
    )
    if found.variable:
        walk.made[found.facts[_LABEL]] = made
    return made


def _below(
    found: Node, part: str, path: KeyPath, stored: KeyPath, facts: WrapperFacts
) -> tuple[KeyPath, KeyPath, WrapperFacts]:
    """Both key paths of a child, and its wrapper facts."""
    child_facts = facts._replace(**found.facts) if found.facts else facts
    if found.variable:
        label = (*(facts.root or ()), str(found.facts[_LABEL]))
        return label, label, child_facts
    return (path if found.wrapper else (*path, part)), (*stored, part), child_facts


def _within(node: Any, path: KeyPath, facts: WrapperFacts) -> WrapperFacts:
    return facts._replace(root=path) if facts.root is None and is_penzai(node) else facts


def _was_seen(node: Any, found: Node, walk: _StateWalk) -> bool:
    """Whether a mutable variable was seen before; it may occur at several places, but its label must be unique."""
    label: str = found.facts[_LABEL]
    if label not in walk.variables:
        walk.variables[label] = node
        return False
    if walk.variables[label] is not node:
        raise UnrepresentableError(f"duplicate Penzai variable label {label!r}", path=label)
    return True


def _leaf(value: Any, path: KeyPath, stored: KeyPath, facts: WrapperFacts, walk: _StateWalk) -> Leaf:
    name = render(path)
    if stored in walk.taken:
        raise UnrepresentableError("duplicate key path in the state", path=render(stored))
    walk.taken.add(stored)
    if is_plain(value):
        return Leaf(path, stored, value, (), None)
    dtype = dtype_of(value, name)
    alias = walk.memories.setdefault(_memory(value), path) if is_torch(value) else path
    return Leaf(
        path, stored, value, shape_of(value), dtype, facts.axes, sharding_of(value, facts), facts.box,
        facts.collection, facts.label, prng_of(value), alias if alias != path else None,
    )  # fmt: skip


def _memory(tensor: Any) -> Any:
    """Identity of a torch tensor: memory, shape and strides; a tensor without memory is distinct from all others."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.is_meta or str(local.layout) != "torch.strided" or not local.numel():
        return id(tensor)
    return (local.device, local.data_ptr(), local.dtype, tuple(tensor.shape), tuple(local.stride()))
