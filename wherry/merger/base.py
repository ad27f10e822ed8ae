"""BaseWeights: the weights of a base by the names of its model, without what is wrapped around them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath
from wherry.tree.memory_names import memory_name, memory_names
from wherry.tree.tree_reading import read_tree

if TYPE_CHECKING:
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.checkpoint import Checkpoint


class BaseWeights:
    """The weights of a base, under their own names and under those in memory.

    Attributes:
        uri: of the base.
        tensors: key path → spec, of the base and of what was added to it.
        names: name → key path, of the tree that is merged.
    """

    def __init__(self, base: Checkpoint, kind: object, wanted: Collection[str]) -> None:
        """Nothing is read.

        Args:
            base: the base.
            kind: its model type.
            wanted: names of an adapter: of the trees that the base may be, the one that has most of them is taken.
        """
        self.uri = base.uri
        self.tensors: dict[KeyPath, TensorSpec] = dict(base.manifest.tensors)
        self._kind = kind
        trees = [
            {name[0]: path for path, name in tree.names.items() if len(name) == 1}
            for tree in read_tree(base.manifest).trees
        ]
        inside = [{memory_name(kind, name): path for name, path in names.items()} for names in trees]
        fits = [
            sum(name in names or memory_name(kind, name) in memory for name in wanted)
            for names, memory in zip(trees, inside, strict=True)
        ]
        chosen = max(range(len(trees)), key=fits.__getitem__)
        self.names, self._in_memory = trees[chosen], inside[chosen]
        self._first_words = {name.partition(".")[0] for name in self._in_memory}

    def find(self, name: str) -> KeyPath | None:
        """The key path of a tensor, of which an adapter may have a name that the base has not; None if there is none.

        A checkpoint of a bare model lacks the first word of the names, as that of `gpt2` does.
        """
        found = self.names.get(name) or self._in_memory.get(memory_name(self._kind, name))
        first, _dot, rest = memory_name(self._kind, name).partition(".")
        return found or (self._in_memory.get(rest) if first not in self._first_words else None)

    def is_name(self, name: str, wanted: str) -> bool:
        """Whether two names are those of one tensor, published and in memory."""
        return memory_name(self._kind, name) == memory_name(self._kind, wanted)

    def experts(self, name: str) -> list[list[KeyPath]]:
        """The tensors that a name in memory is made of: for each expert those that follow one another along its rows.

        Args:
            name: of a parameter of experts, `model.layers.0.mlp.experts.gate_up_proj`.

        Returns:
            Nothing if the base has no such tensors, or stores them as one.
        """
        own = memory_names().get(self._kind) if isinstance(self._kind, str) else None
        for merge in own.merged if own else ():
            if name.endswith(f".{merge.memory}"):
                start = name.removesuffix(merge.memory)
                rows: list[list[KeyPath]] = []
                while found := self._of_expert(start, merge.saved, len(rows)):
                    rows.append(found)
                return rows
        return []

    def _of_expert(self, start: str, saved: Collection[str], number: int) -> list[KeyPath]:
        paths = [self.find(start + end.replace("*", str(number))) for end in saved]
        return [path for path in paths if path is not None] if None not in paths else []

    def add(self, name: str, spec: TensorSpec) -> None:
        """Add a tensor that the base has not."""
        self.tensors[spec.path] = spec
        self.names[name] = spec.path
        self._in_memory[memory_name(self._kind, name)] = spec.path
