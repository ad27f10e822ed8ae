"""tree_reading: what each leaf of a tree is, which node holds the parameters, and what is wrapped around their names.

A trainer saves more than a model, and few save it under the model's own names: `torch.compile` puts `_orig_mod` between
them, data parallelism `module`, NNX a `value` below every parameter, a train state the node `params`. This module reads
a tree once, before any layout. Detection, `--only params`, layouts and merges use its answer.

    read_tree(manifest).leaves       # key path → what the leaf is, and by which evidence
    read_tree(manifest).parameters   # what `--only params` converts
    read_tree(manifest).whole        # the kind of the tree
    read_tree(manifest).trees        # the trees that its parameters may be, with fewer and fewer wrappers

**Kinds.** What a leaf is follows from structure first, at any depth. An optimizer's state is what torch and optax save:
a moment (`exp_avg`), `state` next to `param_groups`, a node with nothing but fields of an optax state (`count`, `mu`,
`nu`), and what is below a word that no model uses (`opt_state`). Words that a model may use (`optimizer`, `opt`) count
where such structure is below them, or where they are next to the node of the parameters, or repeat its names. A leaf is
a parameter if a node that is known to hold parameters is above it, or if its names are those of parameters (`weight`,
`kernel`), or if the format holds nothing else. Everything else is unknown: a number in place of a name proves nothing.

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
from wherry.tree.optimizers import (
    HELD,
    SLOTS,
    WRAPPED,
    Repeats,
    StateNodes,
    Tokens,
    may_be_optimizer,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from wherry.core.detection import Kind
    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec

LeafKind: TypeAlias = Literal["parameter", "statistic", "copy", "optimizer", "counter", "key", "unknown"]

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
# Roots that no module is called: what is next to them is no part of the model.
_SURE_ROOTS = frozenset(
    {"params", "target", "mdl_vars", "state_dict", "model_state_dict", "trainable_variables", "variables"}
)
_KEYS = frozenset(
    {"rng", "rngs", "prng", "prng_key", "rng_key", "rng_state", "rng_states", "random_state"}
    | {"cuda_rng_state", "torch_rng_state", "numpy_rng_state", "dropout_rng", "cpu_rng_state"}
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
    | {
        "lr",
        "learning_rate",
        "loss",
        "save_counter",
        "num_updates",
        "global_steps",
        "current_step",
        "opt_step",
    }
)
_MOMENT_WORDS = frozenset(
    {"mu", "nu", "trace", "momentum", "velocity"}
)  # next to parameters, never among them
_COPY_WORD = re.compile(r"(?:\w+_)?(?:ema|swa|shadow|polyak)(?:_\w+)?")
_COPY_OF = "target_"  # in front of the name of the node that it follows
_PARAMETER_LEAF = re.compile(
    r"(?:\w*_)?(?:weights?|bias|kernel|embeddings?|lora_[ab]|w|b)(?:_[a-z]+\d*)*|scale|gamma|beta",
    re.IGNORECASE,
)
_LETTERS = frozenset({"w", "b"})  # names of a parameter together, or below the name of a module
_NUMBERED = re.compile(r"(?:arr_)?\d+")
_NEAR = 2  # words from the top in which a node of the run may be
_MOST_MODELS = 8  # nodes that may each be a model
_ALONE = 1  # elements of a number of the run
_WHOLE_NUMBERS = ("int", "uint", "bool")


class LeafReading(NamedTuple):
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

    leaves: Mapping[KeyPath, LeafReading]
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
            leaf.kind in plain and (leaf.kind != "unknown" or _has_name(path))
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

        Below nodes that hold nothing else, if there are any; else all, if a node that may be a module is known to hold
        some, or if it is known of every leaf what it is. Empty if it is not.
        """
        found = {path: leaf.node for path, leaf in self.leaves.items() if leaf.kind in _OF_MODELS}
        roots = {node[-1] for path, node in found.items() if node and self.kind(path) == "parameter"}
        if any(_is_sure(root) for root in roots):
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
    words = {path: tokens_of(own) for path, own in parts.items()}
    values = [(own, tokens_of(own)) for own in (_parts_of(path, planned or {}) for path in others)]
    tops = {path: top for path, own in parts.items() if (top := _top_of(own))}
    states = StateNodes.among(
        (*((own, words[path]) for path, own in parts.items()), *values),
        [tokens_of(_parts_of(path, planned or {})) for path in empties],
        {parts[path] for path, top in tops.items() if _is_sure(top[-1])},
    )
    tops = {path: top for path, top in tops.items() if may_be_optimizer(top[-1]) and top not in states.whole}
    leaves = {
        path: _OF_OPTIMIZERS
        if states.holds(words[path])
        else _leaf(own, words[path], states, tops.get(path, ()), specs[path] if specs else None)
        for path, own in parts.items()
    }
    doubtful = _settle(leaves, parts, words, tops, specs)
    if states.doubtful:
        doubtful |= {path for path, tokens in words.items() if states.may_hold(tokens)}
    _name(leaves, parts, words, specs, proven, doubtful)
    _find_copies(leaves, parts)
    optimizer = any(leaf.kind == "optimizer" for leaf in leaves.values()) or any(
        states.holds(tokens) for _, tokens in values
    )
    return TreeReading(leaves, optimizer, bool(values))


def _parts_of(path: KeyPath, planned: Mapping[str, Any]) -> KeyPath:
    """A key path as the program had it: names that a planner joined are split."""
    if len(path) != 1:
        return path
    found = planned.get(path[0])
    if found:
        return tuple(map(str, found))
    return tuple(path[0].split("/")) if "/" in path[0] else path


@lru_cache(1 << 14)
def _is_parameter_name(token: str) -> bool:
    return _PARAMETER_LEAF.fullmatch(token) is not None


def _has_name(path: KeyPath) -> bool:
    """Whether a leaf has a name, not only its number in a list."""
    return any(part not in WRAPPED and not _NUMBERED.fullmatch(part) for part in path)


def _is_sure(root: str) -> bool:
    return root in _SURE_ROOTS or root.endswith("_params")


def _is_around(part: str) -> bool:
    return part in _AROUND or part.isdecimal()


def _top_of(parts: KeyPath) -> KeyPath:
    """The node of a leaf that is not around both a model and its run; empty if the leaf itself is there."""
    place = next((at for at, part in enumerate(parts) if not _is_around(part)), len(parts))
    return parts[: place + 1] if place < len(parts) - 1 else ()


_OF_OPTIMIZERS = LeafReading(
    "optimizer", (), "state of an optimizer, by its node or by the leaves next to it"
)


def _leaf(
    parts: KeyPath, tokens: Tokens, states: StateNodes, top: KeyPath, spec: TensorSpec | None
) -> LeafReading:
    """What a leaf is by its own names; unknown if they do not show it."""
    node = _root_of(parts, states, top)
    words = tokens if WRAPPED.isdisjoint(tokens) else tuple(one for one in tokens if one not in WRAPPED)
    if _is_key(words, node, spec):
        return LeafReading("key", (), "a random-number key or its counter")
    if not _STATISTICS.isdisjoint(parts):
        own = next(parts[: at + 1] for at, part in enumerate(parts) if part in _STATISTICS)
        return LeafReading("statistic", node or own, "a statistic of the data")
    if words and words[-1] in _STATISTIC_LEAVES:
        return LeafReading("statistic", node, "a statistic of the data")
    if node:
        return _below(node)
    return _COUNTER if _is_counter(words, spec) else _UNKNOWN


_UNKNOWN = LeafReading("unknown", (), "no name shows what it is")
_COUNTER = LeafReading("counter", (), "a number of the run, by its name")


@lru_cache(1 << 10)
def _below(node: KeyPath) -> LeafReading:
    return LeafReading("parameter", node, f"below {render(node)}")


def _is_key(words: Tokens, node: KeyPath, spec: TensorSpec | None) -> bool:
    """Whether a leaf is the key of a random-number generator: by its type, or by a name, and not of floats."""
    if spec is not None and spec.tags is not None and "prng" in spec.tags:
        return True
    if _KEYS.isdisjoint(words) or (spec is not None and "float" in spec.dtype):
        return False
    outside = words[: words.index(node[-1])] if node else words
    named = spec is None and _is_parameter_name(words[-1])
    return (not _KEYS.isdisjoint(outside) and not named) or words[-1] in _KEY_FIELDS


def _is_counter(words: Tokens, spec: TensorSpec | None) -> bool:
    """Whether a leaf is a number of the run: named so, near the top of the tree, and alone in its tensor."""
    if not words or words[-1].lower() not in _COUNTERS or (spec is not None and spec.size != _ALONE):
        return False
    return all(map(_is_around, words[:-1]))


def _root_of(parts: KeyPath, states: StateNodes, top: KeyPath) -> KeyPath:
    """The node that is known to hold parameters, above a leaf; only nodes around such ones may be above it."""
    for place, part in enumerate(parts[:-1]):
        if part in ROOTS or part.endswith("_params"):
            return parts[: place + 1]
        if _is_around(part):
            continue
        node = parts[: place + 1]
        holds = may_be_optimizer(part) and (node == top or node in states.whole)
        if not (holds and parts[place + 1] in HELD):
            return ()
    return ()


def _settle(
    leaves: dict[KeyPath, LeafReading],
    parts: Mapping[KeyPath, KeyPath],
    words: Mapping[KeyPath, Tokens],
    tops: Mapping[KeyPath, KeyPath],
    specs: Mapping[KeyPath, TensorSpec] | None,
) -> set[KeyPath]:
    """Decide what depends on the rest of the tree: words that a module may have too, and numbers.

    Returns:
        The leaves that are as likely parameters as state of an optimizer.
    """
    roots = {leaf.node[-1] for leaf in leaves.values() if leaf.kind == "parameter"}
    rooted, sure = bool(roots), any(map(_is_sure, roots))
    optimizer = any(leaf.kind == "optimizer" for leaf in leaves.values())
    judged = _judge_tops(parts, tops, rooted=rooted, optimizer=optimizer)
    doubtful: set[KeyPath] = set()
    flat = not optimizer and all(len(own) == 1 for own in parts.values())
    dotted = flat and any(len(tokens) > 1 for tokens in words.values())
    for path, leaf in leaves.items():
        if leaf.kind == "counter" and dotted:
            leaves[path] = _UNKNOWN
        if leaf.kind != "unknown" or not (rooted or optimizer or tops):
            continue
        found = judged.get(tops[path], False) if path in tops else False
        if found is None:
            doubtful.add(path)
        elif found:
            leaves[path] = LeafReading(
                "optimizer", (), "in a node called as an optimizer, next to the parameters"
            )
        elif sure and not _MOMENT_WORDS.isdisjoint(words[path]):
            leaves[path] = LeafReading("optimizer", (), "a moment, next to the parameters")
        elif (rooted or optimizer) and _is_of_run(words[path], specs[path] if specs else None):
            leaves[path] = LeafReading(
                "counter", (), "in a node of the run: a schedule, a scaler or a metric"
            )
        elif rooted and specs and specs[path].size == _ALONE and not specs[path].shape:
            leaves[path] = LeafReading("counter", (), "a number outside the model")
    return doubtful


def _judge_tops(
    parts: Mapping[KeyPath, KeyPath], tops: Mapping[KeyPath, KeyPath], *, rooted: bool, optimizer: bool
) -> dict[KeyPath, bool | None]:
    """Whether nodes are the state of an optimizer, whose word may also be that of a module; None if both may be."""
    if not tops:
        return {}
    below: defaultdict[KeyPath, list[Tokens]] = defaultdict(list)
    for path, top in tops.items():
        below[top].append(tokens_of(parts[path][len(top) :]))
    repeats = Repeats(frozenset(map(tokens_of, parts.values())))
    found: dict[KeyPath, bool | None] = {}
    for top, rest in below.items():
        heads, named = {one[0] for one in rest}, any(_is_parameter_name(one[-1]) for one in rest)
        moments = bool(heads & SLOTS) and heads <= SLOTS | _COUNTERS
        found[top] = rooted or moments or (optimizer and not named)
        if not found[top] and min(map(len, rest)) > 1 and repeats.has(tokens_of(top), rest):
            found[top] = None
    return found


def _is_of_run(tokens: Tokens, spec: TensorSpec | None) -> bool:
    """Whether a leaf is in a node of a scaler, a schedule or the like, and no parameter of a module of that name."""
    if _RUN_NODES.isdisjoint(tokens[:_NEAR]):
        return False
    return not _is_parameter_name(tokens[-1]) or (
        tokens[-1] == "scale" and spec is not None and not spec.shape
    )


def _scope(parts: KeyPath) -> KeyPath:
    """The part of a tree in which one name of a parameter speaks for all: the top node, or the whole of a flat tree."""
    inner = [part for part in parts if part not in _AROUND]
    return tuple(inner[:1]) if len(inner) > 1 else ()


def _name(
    leaves: dict[KeyPath, LeafReading],
    parts: Mapping[KeyPath, KeyPath],
    words: Mapping[KeyPath, Tokens],
    specs: Mapping[KeyPath, TensorSpec] | None,
    proven: bool,
    doubtful: Collection[KeyPath],
) -> None:
    """Find the parameters that names show, and those that nothing else than parameters is around."""
    open_ = {
        path: _scope(parts[path])
        for path, leaf in leaves.items()
        if leaf.kind == "unknown" and path not in doubtful
    }
    if not open_:
        return
    by_names, letters = _scopes_of_parameters(open_, words)
    run = any(leaf.kind in ("optimizer", "counter", "key") or leaf.node for leaf in leaves.values())
    some = bool(by_names or letters)
    for path, scope in open_.items():
        if scope in by_names or () in by_names or path in letters:
            leaves[path] = _NAMED
        elif proven and _has_name(parts[path]):
            leaves[path] = LeafReading("parameter", (), "the format holds parameters only")
        elif some and not run and specs and _has_name(parts[path]) and not _is_whole_number(specs[path]):
            leaves[path] = LeafReading("parameter", (), "in a tree of parameters, without the state of a run")


_NAMED = LeafReading("parameter", (), "named as parameters are")


def _is_whole_number(spec: TensorSpec) -> bool:
    return spec.dtype.startswith(_WHOLE_NUMBERS)


def _scopes_of_parameters(
    open_: Mapping[KeyPath, KeyPath], words: Mapping[KeyPath, Tokens]
) -> tuple[set[KeyPath], set[KeyPath]]:
    """The scopes of which a name shows that they hold parameters; and leaves of which only their own name does."""
    found: set[KeyPath] = set()
    letters: dict[str, KeyPath] = {}
    for path, scope in open_.items():
        if scope in found:
            continue
        tokens = [token for token in words[path] if token not in WRAPPED]
        if not tokens or not _is_parameter_name(tokens[-1]):
            continue
        if tokens[-1].lower() in _LETTERS and not (scope or len(tokens) > 1):
            letters[tokens[-1].lower()] = path
        else:
            found.add(scope)
    return found, set(letters.values()) if len(letters) == len(_LETTERS) else set()


def _find_copies(leaves: dict[KeyPath, LeafReading], parts: Mapping[KeyPath, KeyPath]) -> None:
    """Find averages and target networks next to the parameters that they follow, in a tree with the state of a run."""
    tops: defaultdict[str, list[KeyPath]] = defaultdict(list)
    for path, leaf in leaves.items():
        if leaf.kind in _OF_MODELS and len(parts[path]) > 1:
            tops[next((part for part in parts[path] if part not in _AROUND), "")].append(path)
    run = any(leaf.kind == "optimizer" or leaf.node for leaf in leaves.values())
    copies = {top for top in tops if run and _is_copy(top, tops)}
    if not copies or copies == set(tops):
        return
    for top in copies:
        for path in tops[top]:
            leaves[path] = LeafReading(
                "copy", leaves[path].node, f"a copy of the parameters that training follows: {top}"
            )


def _is_copy(top: str, tops: Collection[str]) -> bool:
    """Whether a node is called as an average of parameters, or as the target of a node next to it."""
    target = top.startswith(_COPY_OF) and top.removeprefix(_COPY_OF) in tops
    return target or _COPY_WORD.fullmatch(top) is not None


def _trees(leaves: Mapping[KeyPath, LeafReading]) -> Iterator[ModelTree]:
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
