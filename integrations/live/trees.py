"""Trees: a live training state as key paths and leaves, and the same state with other leaves.

    for leaf in flatten(state):            # JAX pytrees, linen boxes, NNX modules and states, Penzai models
        leaf.path, leaf.value, leaf.axes   # and NamedArrays, torch modules, optimizers and state dicts, nested
    tree = survey(state)                   # the same leaves, and the empty nodes and sequences of a Manifest
    state = rebuilt(state, change)         # what `change(leaf)` gives at the place of every leaf

Every leaf has two key paths. `stored` is how Orbax spells it: with the `value` of a box or variable and the
`data_array` of a NamedArray; an export has these, so that what wherry writes is what the framework itself would have
written. `path` is the parameter's name without them, which is what is compared when a state is filled. A mutable
Penzai variable is known by its label below its model, as in Penzai's own label dicts. Trees of JAX are never changed, a
new one is returned; torch modules, optimizers and NNX modules are changed in place, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import KeyPath, render
from wherry.errors import UnrepresentableError
from wherry.integrations.live.leaves import dtype_of, is_plain, prng_of, shape_of, sharding_of
from wherry.integrations.live.nodes import Node, WrapperFacts, is_penzai, is_torch, opened
from wherry.live.match import LABEL as _LABEL
from wherry.live.match import Leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Leaf", "StateTree", "flatten", "rebuilt", "survey"]


@dataclass(slots=True)
class StateTree:
    """A live state, laid out.

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
    """What one walk has seen.

    Attributes:
        variables: label → the Penzai variable that has it.
        made: label → what it became.
        memories: torch tensors by identity of their memory → key path of the first.
        taken: stored key paths that leaves have.
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
        UnsupportedError: a leaf is neither array nor number nor text; it is named.
        UnrepresentableError: two leaves have one key path, or two Penzai variables one label.
    """
    yield from survey(state).leaves


def survey(state: Any) -> StateTree:
    """The leaves with the empty nodes and sequences around them; raises what `flatten` does."""
    tree = StateTree()
    _survey(state, (), (), WrapperFacts(), tree, _StateWalk())
    return tree


def rebuilt(state: Any, change: Callable[[Leaf], Any]) -> Any:
    """The state with other leaves.

    Args:
        state: as for `flatten`.
        change: gives the new value of a leaf; called once for each, tied weights and shared variables included once.

    Returns:
        A new tree of JAX; torch modules, optimizers and NNX modules themselves, changed when all their leaves are made.
    """
    return _rebuilt(state, (), (), WrapperFacts(), change, _StateWalk())


def _survey(
    node: Any, path: KeyPath, stored: KeyPath, facts: WrapperFacts, tree: StateTree, walk: _StateWalk
) -> None:
    found = opened(node)
    if found is None:
        tree.leaves.append(_leaf(node, path, stored, facts, walk))
        return
    if found.variable and _seen(node, found, walk):
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
    found = opened(node)
    if found is None:
        return change(_leaf(node, path, stored, facts, walk))
    if found.variable and _seen(node, found, walk):
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
    """Both key paths of a child, and what is known of it."""
    told = facts._replace(**found.facts) if found.facts else facts
    if found.variable:
        label = (*(facts.root or ()), str(found.facts[_LABEL]))
        return label, label, told
    return (path if found.wrapper else (*path, part)), (*stored, part), told


def _within(node: Any, path: KeyPath, facts: WrapperFacts) -> WrapperFacts:
    return facts._replace(root=path) if facts.root is None and is_penzai(node) else facts


def _seen(node: Any, found: Node, walk: _StateWalk) -> bool:
    """Whether a mutable variable was met before; it may stand at several places, but no other may have its label."""
    label: str = found.facts[_LABEL]
    if label not in walk.variables:
        walk.variables[label] = node
        return False
    if walk.variables[label] is not node:
        raise UnrepresentableError(f"two Penzai variables have the label {label!r}", path=label)
    return True


def _leaf(value: Any, path: KeyPath, stored: KeyPath, facts: WrapperFacts, walk: _StateWalk) -> Leaf:
    name = render(path)
    if stored in walk.taken:
        raise UnrepresentableError("two leaves of the state have this key path", path=render(stored))
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
    """What torch tensors have in common that are one: memory, shape and strides; one without memory is alone."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.is_meta or str(local.layout) != "torch.strided" or not local.numel():
        return id(tensor)
    return (local.device, local.data_ptr(), local.dtype, tuple(tensor.shape), tuple(local.stride()))
