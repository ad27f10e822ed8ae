"""Recognises from the key paths of a tree what held it: Flax boxes, NNX variables, Penzai arrays, PyTorch modules.

Facts (from files of each release): a linen box (`nn.Partitioned`, `LogicallyPartitioned`) is a node with
the one child `value`; its axis names are lost, and some parameters of a tree may have no box. A saved
`nnx.State` wraps every variable: `raw_value` in Flax 0.8, `value` since 0.9. A Penzai `NamedArray` keeps only its
`data_array`. A parameter may be named `value`, so a node counts only if it has no other child. Hugging Face names a
tensor by the modules that hold it, in one part: `model.norm.weight`. The key paths are not changed; the marks are
evidence only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.detection import Evidence
from wherry.tree.forms import BOX, OLD_VARIABLE, wrapped_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wherry.core.keypath import KeyPath

__all__ = ["BOX", "NAMED_ARRAY", "OLD_VARIABLE", "wrapped_leaves", "wrappers"]
NAMED_ARRAY = "data_array"
_PARAMS = "params"
_OF_MODULES = (".weight", ".bias")


def wrappers(paths: Iterable[KeyPath]) -> list[Evidence]:
    """Evidence of boxes and wrappers in a tree."""
    every = list(paths)
    boxes, old, named = (len(wrapped_leaves(every, word)) for word in (BOX, OLD_VARIABLE, NAMED_ARRAY))
    found: list[Evidence] = []
    if old:
        found.append(
            Evidence(".", f"{old} of {len(every)} arrays are NNX variables (`{OLD_VARIABLE}`, Flax 0.8)")
        )
    if boxes and not named:
        found.append(Evidence(".", f"{boxes} of {len(every)} arrays are {_holder(every, boxes)}"))
    if named:
        found.append(
            Evidence(".", f"{named} of {len(every)} arrays are Penzai NamedArrays (`{NAMED_ARRAY}`)")
        )
    modules = sum(len(path) == 1 and path[0].endswith(_OF_MODULES) for path in every)
    if 2 * modules > len(every):
        found.append(
            Evidence(
                ".",
                f"{modules} of {len(every)} arrays have names of PyTorch modules, as Hugging Face has them",
            )
        )
    return found


def _holder(paths: list[KeyPath], boxes: int) -> str:
    """The kind of box: linen boxes some parameters, below `params`; an NNX state wraps every variable."""
    if boxes < len(paths) or any(_PARAMS in path for path in paths):
        return f"in linen partition boxes (`{BOX}`); their axis names are not stored in the tree"
    return f"NNX variables (`{BOX}`, Flax 0.9 and later)"
