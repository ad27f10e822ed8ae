"""From the inert value of a torch pickle to key paths, and what a tree says of what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.integrations.containers.pickle.tree import Tree, plant
from wherry.integrations.containers.torch.values import TorchTensor

if TYPE_CHECKING:
    from collections.abc import Collection

    from wherry.core.detection import Kind
    from wherry.core.keypath import KeyPath

__all__ = ["Tree", "flatten", "kind_of", "tree_kind"]
_OPTIMIZERS = frozenset({"optimizer", "optimizers", "optim", "opt", "opt_state"})
_OPTIMIZER_STATES = (
    *("optimizer_state", "optimizer_states", "optimizer_state_dict", "last_optimizer_state"),
    "optimizer_history",
)
_PARAMETER_NAMES = ("weight", "bias")


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


def tree_kind(tree: Tree) -> Kind:
    """`kind_of` for a tree."""
    return kind_of(tree.tensors, (*tree.values, *tree.empties))


def flatten(root: Any, pickle_bytes: int) -> Tree:
    """List the leaves of an inert value; see `inert_tree.plant`."""
    return plant(root, pickle_bytes, TorchTensor)
