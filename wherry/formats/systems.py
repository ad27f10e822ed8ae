"""Systems: the form of the trees that a training system saves.

A container holds any tree. A system restores only trees of its own form, so a tree of another system becomes one of its
checkpoints through a family's layout, or not at all. The form is a property of key paths that every model of the system
has, not of one model: T5X restores what is below `target`, PaxML what is below `mdl_vars`. A tree of Flax's own, as a
training loop in JAX has it, is no system's: T5X, PaxML and Penzai take any model, MaxText its own models only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from wherry.core.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest


@dataclass(frozen=True, slots=True)
class TreeForm:
    """The form of the trees of a system in JAX.

    Attributes:
        is_own: whether a manifest has the system's own form.
        own: this form in words, for messages.
        flax: whether the system also restores a Flax tree of no system.
    """

    is_own: Callable[[Manifest], bool]
    own: str
    flax: bool = True

    def holds(self, manifest: Manifest) -> bool:
        """Whether the system restores such a tree: one of its own form, or a Flax tree of no system."""
        return (self.flax and is_flax(manifest)) or self.is_own(manifest)

    @property
    def words(self) -> str:
        """The trees that it restores, for messages: a clause after `MaxText restores`."""
        return f"{self.own}, or a Flax tree, with parameters below `{_PARAMS}`" if self.flax else self.own


_PARAMS = "params"
_OF_TORCH = ".weight"  # the end of a name of PyTorch's modules, in one part
_OF_MAXTEXT = frozenset({"decoder", "token_embedder"})  # whose own trees lie below `params` too


def is_flax(manifest: Manifest) -> bool:
    """Whether this is a Flax tree of no system: nested parameters below `params`, other collections next to them."""
    below = [path[1:] for path in manifest.tensors if path[:1] == (_PARAMS,)]
    wrapped = [path[1] for path in below if path[:1] == (_PARAMS,) and len(path) > 1]
    modules = any(part.endswith(_OF_TORCH) for path in below for part in path)
    return any(below) and not modules and not _OF_MAXTEXT.intersection(wrapped)
