"""tree_reading: what each leaf of a tree is, which node holds the parameters, and what is wrapped around their names.

A trainer saves more than a model, and few save it under the model's own names: `torch.compile` puts `_orig_mod` between
them, data parallelism `module`, NNX a `value` below every parameter, a train state the node `params`. This module reads
a tree once, before any layout. Detection, `--only params`, layouts and merges use its answer.

    read_tree(manifest).leaves       # key path → what the leaf is, and by which evidence
    read_tree(manifest).parameters   # what `--only params` converts
    read_tree(manifest).whole        # the kind of the tree
    read_tree(manifest).trees        # the trees that its parameters may be, with fewer and fewer wrappers

**Kinds.** See `wherry.layout.kinds`.

**Wrappers.** Words that no model uses (`_orig_mod`) are removed wherever they are; roots (`model`, `params`, `module`)
only where every parameter is below them. A model may use these words too (`model.layers.0`), so each removal is a tree
of its own, and a layout decides by its names which of them it is. What is not promised: that a tree has a layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.units import plural
from wherry.layout.forms import BOX, OLD_VARIABLE, wrapped_leaves
from wherry.layout.kinds import AROUND, ROOTS, LeafKind, TreeLeaf, has_name, is_sure, kinds_of

if TYPE_CHECKING:
    from wherry.core.detection import Kind
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec


PLANNED = "planner_data"  # in a manifest's `custom`: one-part name → parts of its nested path (PyTorch DCP)

# Words that a framework puts between the names of modules → what does it. No model uses them.
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_fpw_module": "FullyShardedDataParallel of fairscale",
    "_checkpoint_wrapped_module": "activation checkpointing of torch",
    "_forward_module": "a strategy of Lightning",
    "_module": "GradSampleModule of Opacus",
}

_MOST_MODELS = 8  # nodes that may each be a model


@dataclass(frozen=True, slots=True)
class RemovedWrapper:
    """What a tree has around the names of a model, and its model does not.

    Attributes:
        text: as it is printed in key paths: `module.` in front, `/value` at the end, `._orig_mod` in between.
        tensors: from how many names it was removed.
        what: what put it there.
    """

    text: str
    tensors: int
    what: str

    @property
    def words(self) -> str:
        """A sentence about the removal, for plans and receipts."""
        return f"removed {self.text} from the names of {plural(self.tensors, 'tensor')}: {self.what}"


@dataclass(frozen=True, slots=True)
class ModelTree:
    """One way to see the parameters of a checkpoint: as a tree of a model's own names.

    Attributes:
        names: key path → name in the model, of the leaves that may be its parameters.
        outside: leaves that are no part of this model, and what they are.
        removed: the wrappers, outermost first.
    """

    names: Mapping[KeyPath, KeyPath] = field(default_factory=dict["KeyPath", "KeyPath"])
    outside: Mapping[KeyPath, LeafKind] = field(default_factory=dict["KeyPath", "LeafKind"])
    removed: tuple[RemovedWrapper, ...] = ()

    def name(self, path: KeyPath) -> KeyPath:
        """The name of a leaf in the model."""
        return self.names.get(path, path)

    @property
    def is_other(self) -> bool:
        """Whether a leaf has another name in the model than it is stored under."""
        return any(path != name for path, name in self.names.items())

    def over(self, stored: Mapping[KeyPath, KeyPath]) -> ModelTree:
        """The same tree by the key paths that its leaves are stored under, before a user's renaming."""
        if not stored:
            return self
        names = {**{path: path for path in self.outside}, **self.names}
        return replace(
            self,
            names={stored.get(path, path): name for path, name in names.items()},
            outside={stored.get(path, path): kind for path, kind in self.outside.items()},
        )

    def without_first(self) -> ModelTree | None:
        """The same tree without the word that every name begins with, whatever it is; None if they share none."""
        inner = {path: name for path, name in self.names.items() if path not in self.outside}
        first = _common_first(inner.values())
        if first is None:
            return None
        return replace(self, names={path: _without_first(name, first[1]) for path, name in inner.items()})

    def joined(self, separator: str) -> ModelTree:
        """The same tree with names of one part."""
        return replace(self, names={path: (separator.join(name),) for path, name in self.names.items()})

    def below(self, root: KeyPath, joint: str) -> ModelTree:
        """The same tree below a system's own root, such as `params/params`.

        Args:
            root: the parts of the root.
            joint: a root that is the start of one-part names instead, such as `model.`.
        """
        if not root and not joint:
            return self
        names = {
            path: name if path in self.outside else (*root, *_after(joint, name))
            for path, name in self.names.items()
        }
        return replace(self, names=names)


def _after(joint: str, name: KeyPath) -> KeyPath:
    return (joint + name[0], *name[1:]) if joint and name else name


@dataclass(frozen=True)  # without slots, so that its trees are found once
class TreeReading:
    """What a tree is.

    Attributes:
        leaves: what each tensor is.
        optimizer: whether the tree has the state of an optimizer, in tensors or in other leaves.
        others: whether it has leaves that are no tensors.
        stored: key path → the key path that it is stored under, of leaves that a user renamed.
    """

    leaves: Mapping[KeyPath, TreeLeaf]
    optimizer: bool
    others: bool = False
    stored: Mapping[KeyPath, KeyPath] = field(default_factory=dict["KeyPath", "KeyPath"])

    def kind(self, path: KeyPath) -> LeafKind:
        """The kind of a tensor."""
        return self.leaves[path].kind

    @property
    def whole(self) -> Kind:
        """The kind of the whole tree: a train state with an optimizer's state, parameters, or something else."""
        if self.optimizer:
            return "train-state"
        kinds = {leaf.kind for leaf in self.leaves.values()}
        return "params" if "parameter" in kinds and "unknown" not in kinds else "other"

    @property
    def whole_of_arrays(self) -> Kind:
        """The kind of a tree of JAX: as `whole`; also parameters if it has nothing but arrays, each with a name.

        A script saves its parameters alone in such a tree, under names of its own. None of them is that of a run.
        """
        plain = ("parameter", "statistic", "unknown")
        bare = not self.others and all(
            leaf.kind in plain and (leaf.kind != "unknown" or has_name(path))
            for path, leaf in self.leaves.items()
        )
        return "params" if bare and self.leaves else self.whole

    @property
    def unknown(self) -> list[KeyPath]:
        """The tensors of which nothing shows what they are."""
        return [path for path, leaf in self.leaves.items() if leaf.kind == "unknown"]

    @property
    def parameters(self) -> list[KeyPath]:
        """The parameters and statistics of the model.

        If some nodes hold nothing else, these are the leaves below them. Otherwise they are all leaves, if a node that
        may be a module is known to hold some, or if the kind of every leaf is known. Otherwise the result is empty.
        """
        found = {path: leaf.node for path, leaf in self.leaves.items() if leaf.kind in _OF_MODELS}
        roots = {node[-1] for path, node in found.items() if node and self.kind(path) == "parameter"}
        if any(is_sure(root) for root in roots):
            return [path for path, node in found.items() if node]
        known = roots or (not self.unknown and any(self.kind(path) == "parameter" for path in found))
        return list(found) if known else []

    @cached_property
    def trees(self) -> tuple[ModelTree, ...]:
        """The trees that the parameters may be by stored key path, the one with the fewest removals first."""
        return tuple(tree.over(self.stored) for tree in _trees(self.leaves))


_OF_MODELS = ("parameter", "statistic")
_OF_RUNS = ("optimizer", "counter", "key")
WEIGHTS = frozenset({*_OF_MODELS, "copy", "unknown"})  # kinds of leaves that a model may have


def read_tree(manifest: Manifest, renamed: Mapping[KeyPath, KeyPath] | None = None) -> TreeReading:
    """Read the tree of a checkpoint.

    A format that holds nothing but parameters says so by the manifest's kind, which proves what names do not show; not
    of leaves that have numbers in place of names.

    Args:
        manifest: what the checkpoint holds.
        renamed: key path → the name that a user gives the leaf, of those that are renamed.
    """
    planned, names = manifest.custom.get(PLANNED), renamed or {}
    stored = {name: path for path, name in names.items() if path != name}
    reading = read_leaves(
        [names.get(path, path) for path in manifest.tensors],
        [names.get(path, path) for path in manifest.values],
        [names.get(path, path) for path in manifest.empties],
        planned=planned if isinstance(planned, dict) else {},
        specs={names.get(path, path): spec for path, spec in manifest.tensors.items()}
        if stored
        else manifest.tensors,
        proven=manifest.kind == "params",
    )
    return replace(reading, stored=stored) if stored else reading


def read_leaves(
    paths: Iterable[KeyPath],
    others: Iterable[KeyPath] = (),
    empties: Iterable[KeyPath] = (),
    *,
    planned: Mapping[str, Any] | None = None,
    specs: Mapping[KeyPath, TensorSpec] | None = None,
    proven: bool = False,
) -> TreeReading:
    """Read a tree of which perhaps only the key paths are known.

    Args:
        paths: key paths of the tensors.
        others: key paths of the other leaves, which are evidence too.
        empties: key paths of nodes without leaves, which are no state of their own.
        planned: one-part name → parts of its nested path, where a planner joined them.
        specs: the tensors, if they are known.
        proven: whether the format holds nothing but parameters, unless names show otherwise.
    """
    parts = {path: _parts_of(path, planned or {}) for path in paths}
    values = [_parts_of(path, planned or {}) for path in others]
    hollow = [_parts_of(path, planned or {}) for path in empties]
    leaves, optimizer = kinds_of(parts, values, hollow, specs, proven=proven)
    return TreeReading(leaves, optimizer, bool(values))


def _parts_of(path: KeyPath, planned: Mapping[str, Any]) -> KeyPath:
    """A key path as the program had it: names that a planner joined are split."""
    if len(path) != 1:
        return path
    found = planned.get(path[0])
    if found:
        return tuple(map(str, found))
    return tuple(path[0].split("/")) if "/" in path[0] else path


def _trees(leaves: Mapping[KeyPath, TreeLeaf]) -> Iterator[ModelTree]:
    """See `TreeReading.trees`."""
    aside: dict[KeyPath, LeafKind] = {
        path: leaf.kind for path, leaf in leaves.items() if leaf.kind in _OF_RUNS
    }
    members = [path for path in leaves if path not in aside]
    yield ModelTree({path: path for path in members}, aside)
    by_node: defaultdict[KeyPath, list[KeyPath]] = defaultdict(list)
    for path in members:
        if len(path) > 1 or leaves[path].node:
            by_node[leaves[path].node or path[:1]].append(path)
    order = list(ROOTS)
    ranked = sorted(by_node, key=lambda node: order.index(node[-1]) if node[-1] in ROOTS else len(order))
    yield from _peel_wrappers(members, aside, whole=True)
    for node in ranked[:_MOST_MODELS]:
        if len(by_node[node]) < len(members):
            rest = set(members).difference(by_node[node])
            outside = dict(aside)
            outside.update({path: leaves[path].kind for path in members if path in rest})
            yield from _peel_wrappers(by_node[node], outside, whole=False)


def _peel_wrappers(
    group: list[KeyPath], outside: Mapping[KeyPath, LeafKind], *, whole: bool
) -> Iterator[ModelTree]:
    """The trees of some parameters: without what is within and after the names, then without one root after another."""
    if not group:
        return
    names, removed = _without_leaf_wrappers(_without_words(group))
    if len(set(names.values())) < len(names):
        return  # without the words two parameters have one name
    found = [RemovedWrapper(*row) for row in removed]
    if removed or not whole:
        yield ModelTree(names, outside, tuple(found))
    while (first := _common_first(names.values())) is not None:
        word, mark = first
        if not (word in ROOTS or word in AROUND or word.endswith("_params")):
            return
        names = {path: _without_first(name, mark) for path, name in names.items()}
        what = ROOTS.get(word) or AROUND.get(word) or "parameters"
        found.append(RemovedWrapper(f"{word}{mark}", len(names), what))
        yield ModelTree(names, outside, tuple(found))


def _without_words(group: Iterable[KeyPath]) -> tuple[dict[KeyPath, KeyPath], list[tuple[str, int, str]]]:
    """Names without the words that no model uses."""
    names: dict[KeyPath, KeyPath] = {}
    counts: defaultdict[str, int] = defaultdict(int)
    for path in group:
        tokens = [[token for token in part.split(".") if token not in WRAPPERS] for part in path]
        names[path] = tuple(".".join(some) for some in tokens if some)
        if names[path] != path:
            for word in {token for part in path for token in part.split(".")} & WRAPPERS.keys():
                counts[word] += 1
    return names, [(f"{word}.", count, WRAPPERS[word]) for word, count in counts.items()]


def _without_leaf_wrappers(
    seen: tuple[dict[KeyPath, KeyPath], list[tuple[str, int, str]]],
) -> tuple[dict[KeyPath, KeyPath], list[tuple[str, int, str]]]:
    """Names without the node that NNX and partition boxes put around a leaf, if every leaf has it."""
    names, removed = seen
    for word in (BOX, OLD_VARIABLE):
        if all(len(name) > 1 and name[-1] == word for name in names.values()):
            wrapped = wrapped_leaves(names.values(), word)
            if len(wrapped) == len(names):
                names = {path: name[:-1] for path, name in names.items()}
                removed = [
                    *removed,
                    (f"/{word}", len(names), "a variable of Flax NNX, or a box of Flax linen"),
                ]
    return names, removed


def framework_words(paths: Iterable[KeyPath]) -> set[str]:
    """The words of frameworks in the names of a tree, which no model uses (`_orig_mod`)."""
    return {word for path in paths for part in path for word in part.split(".") if word in WRAPPERS}


def share_first_word(paths: Collection[KeyPath]) -> bool:
    """Whether every name begins with one word, which may be a root, or the model's own."""
    return _common_first(paths) is not None


def _common_first(names: Collection[KeyPath]) -> tuple[str, str] | None:
    """The word that every name begins with, and the mark after it; None if they do not share one."""
    first = next(iter(names), ())
    if not first:
        return None
    head, dot, _rest = first[0].partition(".")
    if dot and all(name and name[0].startswith(f"{head}.") for name in names):
        return head, "."
    if not dot and all(len(name) > 1 and name[0] == head for name in names):
        return head, "/"
    return None


def _without_first(name: KeyPath, mark: str) -> KeyPath:
    return name[1:] if mark == "/" else (name[0].partition(".")[2], *name[1:])
