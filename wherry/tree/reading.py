"""reading: what a tree is: what each leaf is, which node holds the parameters, and what is wrapped around their names.

A trainer saves more than a model, and few save it under the model's own names: `torch.compile` puts `_orig_mod` between
them, data parallelism `module`, NNX a `value` below every parameter, a train state the node `params`. This module reads
a tree once, before any layout. Detection, `--only params`, layouts and merges use its answer.

    read_tree(manifest).kinds        # key path → what the leaf is
    read_tree(manifest).trees        # the trees that its parameters may be, with fewer and fewer wrappers

**Kinds.** A leaf is state of an optimizer, a counter or a key by the names of the nodes above it or by the leaves next
to it (`exp_avg`, `step`; `mu`, `nu`, `count`; `state` next to `param_groups`), at any depth. It is a parameter if a
node that is known to hold parameters is above it, or if its names are those of parameters (`weight`, `kernel`), or if
the format holds nothing else. Everything else is unknown: a number in place of a name proves nothing.

**Wrappers.** Words that no model uses (`_orig_mod`) are removed wherever they are; roots (`model`, `params`, `module`)
only where every parameter is below them. A model may use these words too (`model.layers.0`), so each removal is a tree
of its own, and a layout decides by its names which of them it is. What is not promised: that a tree has a layout.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from wherry.core.keypath import render
from wherry.core.units import plural
from wherry.tree.forms import BOX, OLD_VARIABLE, wrapped_leaves

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from wherry.core.detection import Kind
    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec

LeafKind: TypeAlias = Literal["parameter", "statistic", "optimizer", "counter", "key", "unknown"]
_Tokens: TypeAlias = tuple[str, ...]

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
# Nodes of a saved state that hold a model → what they are. A model may use these words as well.
ROOTS = {
    "module": "a wrapper of data parallelism",
    "model": "the model of a training state",
    "models": "the models of a training state",
    "net": "the model of a training state",
    "network": "the model of a training state",
    "state_dict": "a state dict",
    "model_state_dict": "a state dict",
    "model_state": "a state dict",
    "model_params": "the item of parameters",
    "params": "parameters of Flax",
    "param": "parameters",
    "target": "the parameters of a T5X train state",
    "mdl_vars": "the variables of a PaxML train state",
    "base": "the base model of a fine-tuned one",
    "variables": "variables of Flax",
    "trainable_variables": "trainable variables of Keras",
    "non_trainable_variables": "non-trainable variables of Keras",
}
# Nodes around both a model and the state of its run.
_AROUND = {
    "app": "an application state of torch",
    "state": "a training state",
    "train_state": "a training state",
    "training_state": "a training state",
    "trainer": "a trainer",
    "checkpoint": "a checkpoint",
    "items": "the item of a step",
    "default": "the item of a step",
}
_OPTIMIZER_WORD = re.compile(
    r"(?:\w+_)?optimi[sz]ers?(?:_\w+)?"
    r"|(?:\w+_)?(?:optim|opt)_(?:states?|state_dict|vars|variables|\d+)(?:_\w+)?"
    r"|last_optimizer_state|param_states"
)
_OPTIMIZER_ROOTS = frozenset({"opt", "opts", "optim", "optims"})  # only where no module can be
# Leaves that optimizers of torch keep for a parameter and that no module has.
_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta"}
    | {"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_diff", "grad_avg", "previous_grad", "prev_grad"}
)
_GROUPS, _STATE = "param_groups", "state"  # what torch's Optimizer.state_dict has
# Fields of the states of optax: one of the first with one of the others is such a state.
_FIRST_FIELDS = frozenset({"mu", "nu", "trace", "v_row", "v_col"})
_OTHER_FIELDS = frozenset({"count", "mu", "nu", "trace", "v_row", "v_col", "v"})
_KEYS = frozenset(
    {"rng", "rngs", "prng", "prng_key", "rng_key", "rng_state", "rng_states", "random_state"}
    | {"cuda_rng_state", "torch_rng_state", "numpy_rng_state", "dropout_rng"}
)
_KEY_FIELDS = frozenset({"key", "count"})  # below a key's node of NNX
_STATISTICS = frozenset({"batch_stats", "non_trainable_variables"})
_STATISTIC_LEAVES = frozenset(
    {"running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance", "moving_var"}
)
_RUN_NODES = frozenset(
    {"scaler", "grad_scaler", "amp_scaler", "loss_scaler", "loss_scale", "scheduler", "schedulers"}
    | {"lr_scheduler", "lr_schedulers", "opt_param_scheduler", "metrics", "metrics_variables", "callbacks"}
    | {"loops", "dataloader", "dataloaders", "train_dataloader", "sampler", "data_iterator", "ema_step"}
)
_COUNTERS = frozenset(
    {
        "step",
        "steps",
        "global_step",
        "iteration",
        "iterations",
        "iter",
        "iter_num",
        "epoch",
        "epochs",
        "count",
    }
    | {"num_steps", "step_count", "train_step", "tokens", "tokens_seen", "best_val_loss", "best_loss"}
    | {"lr", "learning_rate", "loss"}
)
_PARAMETER_LEAF = re.compile(
    r"(?:\w*_)?(?:weights?|bias|kernel|embeddings?|lora_[ab]|w|b)(?:_[a-z]+\d*)*|scale|gamma|beta",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"(?:arr_)?\d+")
_TARGET = "target"
_NEAR = 2  # words from the top in which a node of the run may be
_MOST_MODELS = 8  # nodes that may each be a model
_ALONE = 1  # elements of a number of the run


class Leaf(NamedTuple):
    """What a leaf is.

    Attributes:
        kind: its kind.
        node: the node that is known to hold parameters, for a parameter below one; else empty.
        why: the evidence, in words.
    """

    kind: LeafKind
    node: KeyPath
    why: str


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
        """For plans and receipts."""
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
        return ModelTree(
            {path: (*root, *_after(joint, name)) for path, name in self.names.items()},
            self.outside,
            self.removed,
        )


def _after(joint: str, name: KeyPath) -> KeyPath:
    return (joint + name[0], *name[1:]) if joint and name else name


@dataclass(frozen=True)  # without slots, so that its trees are found once
class TreeReading:
    """What a tree is.

    Attributes:
        leaves: what each tensor is.
        optimizer: whether the tree has the state of an optimizer, in tensors or in other leaves.
        stored: key path → the key path that it is stored under, of leaves that a user renamed.
    """

    leaves: Mapping[KeyPath, Leaf]
    optimizer: bool
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
    def unknown(self) -> list[KeyPath]:
        """The tensors of which nothing shows what they are."""
        return [path for path, leaf in self.leaves.items() if leaf.kind == "unknown"]

    @property
    def parameters(self) -> list[KeyPath]:
        """The parameters and statistics of the model: below the nodes known to hold some if there are any, else all."""
        found = {path: leaf.node for path, leaf in self.leaves.items() if leaf.kind in _OF_MODELS}
        rooted = any(found.values())
        return [path for path, node in found.items() if node or not rooted]

    @cached_property
    def trees(self) -> tuple[ModelTree, ...]:
        """The trees that the parameters may be by stored key path, the one with the fewest removals first."""
        return tuple(tree.over(self.stored) for tree in _trees(self.leaves))


_OF_MODELS = ("parameter", "statistic")
_OF_RUNS = ("optimizer", "counter", "key")
WEIGHTS = frozenset({*_OF_MODELS, "unknown"})  # kinds of leaves that a model may have


def read_tree(manifest: Manifest, renamed: Mapping[KeyPath, KeyPath] | None = None) -> TreeReading:
    """Read the tree of a checkpoint.

    A format that holds nothing but parameters says so by the manifest's kind, which proves what names do not show.

    Args:
        manifest: what the checkpoint holds.
        renamed: key path → the name that a user gives the leaf, of those that are renamed.
    """
    planned, names = manifest.custom.get(PLANNED), renamed or {}
    stored = {name: path for path, name in names.items() if path != name}
    reading = read_leaves(
        [names.get(path, path) for path in manifest.tensors],
        [names.get(path, path) for path in (*manifest.values, *manifest.empties)],
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
    *,
    planned: Mapping[str, Any] | None = None,
    specs: Mapping[KeyPath, TensorSpec] | None = None,
    proven: bool = False,
) -> TreeReading:
    """Read a tree of which perhaps only the key paths are known.

    Args:
        paths: key paths of the tensors.
        others: key paths of the other leaves, which are evidence too.
        planned: one-part name → parts of its nested path, where a planner joined them.
        specs: the tensors, if they are known.
        proven: whether the format holds nothing but parameters, unless names show otherwise.
    """
    parts = {path: _parts_of(path, planned or {}) for path in paths}
    around = [_parts_of(path, planned or {}) for path in others]
    states = _StateNodes.among([*map(_tokens, parts.values()), *map(_tokens, around)])
    leaves = {path: _leaf(own, states, specs[path] if specs else None) for path, own in parts.items()}
    by_names = _scopes_of_parameters(parts, leaves)
    rooted = any(leaf.node for leaf in leaves.values())
    for path, leaf in leaves.items():
        if leaf.kind != "unknown":
            continue
        if rooted and not proven and specs and specs[path].size == _ALONE and not specs[path].shape:
            leaves[path] = Leaf("counter", (), "a number outside the model")
        elif _scope(parts[path]) in by_names or () in by_names:
            leaves[path] = Leaf("parameter", (), "named as parameters are")
        elif proven:
            leaves[path] = Leaf("parameter", (), "the format holds parameters only")
    optimizer = any(leaf.kind == "optimizer" for leaf in leaves.values()) or any(
        _optimizer_words(own, states) for own in around
    )
    return TreeReading(leaves, optimizer)


def _parts_of(path: KeyPath, planned: Mapping[str, Any]) -> KeyPath:
    """A key path as the program had it: names that a planner joined are split."""
    found = planned.get(path[0]) if len(path) == 1 else None
    return tuple(map(str, found)) if found else path


def _tokens(parts: KeyPath) -> _Tokens:
    """The words of a key path: its parts, and the modules of a name of torch."""
    return parts if not any("." in part for part in parts) else tuple(".".join(parts).split("."))


@dataclass(frozen=True, slots=True)
class _StateNodes:
    """The nodes that are the state of an optimizer by what is in them.

    Attributes:
        whole: nodes of which everything is its state.
        fields: node → the fields in it that are its state.
    """

    whole: frozenset[_Tokens]
    fields: Mapping[_Tokens, frozenset[str]]

    @staticmethod
    def among(every: Collection[_Tokens]) -> _StateNodes:
        """The nodes of a tree, from the words of all its leaves."""
        whole: set[_Tokens] = set()
        seen: defaultdict[_Tokens, set[str]] = defaultdict(set)
        for tokens in every:
            for place, token in enumerate(tokens):
                if token in _MOMENTS:
                    whole.add(tokens[:place])
                elif token == _GROUPS:
                    seen[tokens[:place]] |= {_GROUPS, _STATE}
                elif token in _OTHER_FIELDS:
                    seen[tokens[:place]].add(token)
        fields = {
            node: frozenset(found)
            for node, found in seen.items()
            if _GROUPS in found or (found & _FIRST_FIELDS and (len(found) > 1 or _is_link(node)))
        }
        return _StateNodes(frozenset(whole), fields)

    def holds(self, tokens: _Tokens) -> bool:
        """Whether a leaf is in one of them."""
        if not self.whole and not self.fields:
            return False
        return any(
            tokens[:place] in self.whole or token in self.fields.get(tokens[:place], ())
            for place, token in enumerate(tokens)
        )


def _is_link(node: _Tokens) -> bool:
    """Whether a node is a link of a chain of optax: an index, which no module of a field `trace` has."""
    return bool(node) and node[-1].isdecimal()


@lru_cache(1 << 14)
def _is_optimizer(token: str) -> bool:
    return _OPTIMIZER_WORD.fullmatch(token.lower()) is not None


def _optimizer_words(parts: KeyPath, states: _StateNodes) -> bool:
    """Whether a leaf is state of an optimizer, by the nodes above it or by the leaves next to it."""
    tokens = _tokens(parts)
    if states.holds(tokens) or any(map(_is_optimizer, tokens)):
        return not _is_target(tokens)
    first = next((token for token in tokens if token not in _AROUND), "")
    return first.lower() in _OPTIMIZER_ROOTS and len(tokens) > 1


def _is_target(tokens: _Tokens) -> bool:
    """Whether a leaf is a parameter that an `Optimizer` of Flax before 0.6 held: `optimizer/target/…`."""
    return len(tokens) > 2 and _is_optimizer(tokens[0]) and tokens[1] == _TARGET  # noqa: PLR2004


def _leaf(parts: KeyPath, states: _StateNodes, spec: TensorSpec | None) -> Leaf:
    """What a leaf is by its own names; unknown if they do not show it."""
    if _optimizer_words(parts, states):
        return Leaf("optimizer", (), "state of an optimizer, by its node or by the leaves next to it")
    node = _root_of(parts)
    words = [token for token in _tokens(parts) if token not in (BOX, OLD_VARIABLE)]
    outside = words[: words.index(node[-1])] if node else words
    typed = spec is not None and spec.tags is not None and "prng" in spec.tags
    if typed or not _KEYS.isdisjoint(outside) or (not _KEYS.isdisjoint(words) and words[-1] in _KEY_FIELDS):
        return Leaf("key", (), "a random-number key or its counter")
    if not _STATISTICS.isdisjoint(words) or not _STATISTIC_LEAVES.isdisjoint(words[-1:]):
        return Leaf("statistic", node, "a statistic of the data")
    if node:
        return Leaf("parameter", node, f"below {render(node)}")
    if not _RUN_NODES.isdisjoint(words[:_NEAR]) or _is_counter(words, spec):
        return Leaf("counter", (), "state of the run: a counter, a schedule or a metric")
    return Leaf("unknown", (), "no name shows what it is")


def _is_counter(words: list[str], spec: TensorSpec | None) -> bool:
    """Whether a leaf is a number of the run: named so, near the top of the tree, and alone in its tensor."""
    near = all(word in _AROUND for word in words[:-1])
    return near and bool(words) and words[-1].lower() in _COUNTERS and (spec is None or spec.size == _ALONE)


def _root_of(parts: KeyPath) -> KeyPath:
    """The node that is known to hold parameters, above a leaf; only nodes around such ones may be above it."""
    if _is_target(parts):
        return parts[:2]
    for place, part in enumerate(parts[:-1]):
        if part in ROOTS or part.endswith("_params"):
            return parts[: place + 1]
        if part not in _AROUND:
            return ()
    return ()


def _scope(parts: KeyPath) -> KeyPath:
    """The part of a tree in which one name of a parameter speaks for all: the top node, or the whole of a flat tree."""
    inner = [part for part in parts if part not in _AROUND]
    return tuple(inner[:1]) if len(inner) > 1 else ()


def _scopes_of_parameters(parts: Mapping[KeyPath, KeyPath], leaves: Mapping[KeyPath, Leaf]) -> set[KeyPath]:
    """The scopes of which a name shows that they hold parameters."""
    found: set[KeyPath] = set()
    for path, own in parts.items():
        if leaves[path].kind == "unknown":
            tokens = [token for token in _tokens(own) if token not in (BOX, OLD_VARIABLE)]
            if (
                len(tokens) > 0
                and _PARAMETER_LEAF.fullmatch(tokens[-1])
                and not _NUMBERED.fullmatch(tokens[-1])
            ):
                found.add(_scope(own))
    return found


def _trees(leaves: Mapping[KeyPath, Leaf]) -> Iterator[ModelTree]:
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
    yield from _peeled(members, aside, whole=True)
    for node in ranked[:_MOST_MODELS]:
        if len(by_node[node]) < len(members):
            rest = set(members).difference(by_node[node])
            outside = dict(aside)
            outside.update({path: leaves[path].kind for path in members if path in rest})
            yield from _peeled(by_node[node], outside, whole=False)


def _peeled(group: list[KeyPath], outside: Mapping[KeyPath, LeafKind], *, whole: bool) -> Iterator[ModelTree]:
    """The trees of some parameters: without what is within and after the names, then without one root after another."""
    if not group:
        return
    names, removed = _without_leaf_wrappers(_without_words(group))
    if len(set(names.values())) < len(names):
        return  # without the words two parameters have one name
    found = [RemovedWrapper(*row) for row in removed]
    if removed or not whole:
        yield ModelTree(names, outside, tuple(found))
    while (first := _common_first(names.values())) is not None and _is_root(first[0]):
        word, mark = first
        names = {path: _without_first(name, mark) for path, name in names.items()}
        what = ROOTS.get(word) or _AROUND.get(word) or "parameters"
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


def _is_root(word: str) -> bool:
    return word in ROOTS or word in _AROUND or word.endswith("_params")


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
