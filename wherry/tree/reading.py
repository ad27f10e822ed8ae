"""reading: what a tree is: what each leaf is, which node holds the parameters, and what is wrapped around their names.

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
from dataclasses import dataclass, field
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

LeafKind: TypeAlias = Literal["parameter", "statistic", "copy", "optimizer", "counter", "key", "unknown"]
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
# Roots that no module is called: what is next to them is no part of the model.
_SURE_ROOTS = frozenset(
    {"params", "target", "mdl_vars", "state_dict", "model_state_dict", "trainable_variables", "variables"}
)
# Words that only the state of an optimizer has above its leaves.
_OPTIMIZER_WORD = re.compile(
    r"(?:\w+_)?(?:optimi[sz]er|optim|opt)_(?:states?|state_dicts?|vars|variables|history)(?:_\w+)?"
    r"|param_states|hyperparams_states|optimizer_slot"
)
# Words that a module may have as well; what is inside or next to them decides.
_OPTIMIZER_NODE = re.compile(
    r"(?:\w+_)?optimi[sz]ers?(?:_\w+)?|(?:\w+_)?(?:optims?|opts?)|(?:optims?|opts?)_(?:\d+|[a-z])"
)
_HELD = frozenset(
    {"target", "model", "params"}
)  # what an optimizer of Flax holds besides its state: the model
# Leaves that optimizers of torch and T5X keep for a parameter and that no module has.
_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_slow", "exp_inf", "momentum_buffer", "square_avg"}
    | {
        "acc_delta",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
        "exp_avg_diff",
        "grad_avg",
        "previous_grad",
        "prev_grad",
    }
    | {
        "max_exp_avg_sqs",
        "exp_avg_res_row",
        "exp_avg_res_col",
        "neg_pre_grad",
        "prev_flat_grad",
        "mu_product",
    }
    | {"v_row", "v_col", "adam_m", "adam_v"}
)
# Leaves that optimizers keep right below the name of a parameter, as in `layer.weight.m`.
_SLOTS = frozenset(
    {"m", "v", "mu", "nu", "momentum", "velocity", "accumulator", "sum", "prev", "step_size", "ax", "eta"}
)
_GROUPS, _STATE = "param_groups", "state"  # what torch's Optimizer.state_dict has
# Fields of the states of optax. A node with nothing else is such a state if it has one of the marks, or `count` with
# one of the moments, or moments that repeat the names of other leaves.
_MARKS = frozenset(
    {"mini_step", "gradient_step", "acc_grads", "grad_acc", "notfinite_count", "total_notfinite", "ns_coeffs"}
    | {"sum_of_squares", "nu_max", "diff_params_memory", "diff_updates_memory", "weights_memory"}
)
_COUNT = "count"
_OPTAX_MOMENTS = frozenset({"mu", "nu", "trace", "v", "ema", "e_g", "e_x", "m", "nu_max"})
_ALONE_MOMENTS = frozenset({"trace", "nu"})  # the only field of their state
_INNER = frozenset({"inner_state", "inner_states", "inner_opt_state", "base_optimizer_state"})
_FIELDS = (
    _MARKS
    | _OPTAX_MOMENTS
    | _INNER
    | {_COUNT, "hyperparams", "hyperparams_states", "skip_state", "last_finite", "params", "updates", "hist"}
    | {"v_row", "v_col", "b1", "weight_sum", "step_size", "max_lr", "z", "rng_key", "initial_norm"}
    | {"plateau_count", "best_value", "avg_value", "cooldown_count", "value", "grad", "learning_rate", "info"}
)
_KEYS = frozenset(
    {"rng", "rngs", "prng", "prng_key", "rng_key", "rng_state", "rng_states", "random_state", "nnx_aux"}
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
_COPY_WORD = re.compile(r"(?:\w+_)?(?:ema|swa|shadow|polyak)(?:_\w+)?")
_COPY_OF = "target_"  # in front of the name of the node that it follows
_PARAMETER_LEAF = re.compile(
    r"(?:\w*_)?(?:weights?|bias|kernel|embeddings?|lora_[ab]|w|b)(?:_[a-z]+\d*)*|scale|gamma|beta",
    re.IGNORECASE,
)
_LETTERS = frozenset({"w", "b"})  # names of a parameter together, or below the name of a module
_NUMBERED = re.compile(r"(?:arr_)?\d+")
_WRAPPED = frozenset({BOX, OLD_VARIABLE})
_NEAR = 2  # words from the top in which a node of the run may be
_ALONE = 1  # elements of a number of the run
_MOST_REPEATED = 64  # nodes of which it is found out whether they repeat the names of others
_WHOLE_NUMBERS = ("int", "uint", "bool")


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
        outside: leaves that are no part of this model.
        removed: the wrappers, outermost first.
    """

    names: Mapping[KeyPath, KeyPath] = field(default_factory=dict["KeyPath", "KeyPath"])
    outside: frozenset[KeyPath] = frozenset()
    removed: tuple[RemovedWrapper, ...] = ()

    def name(self, path: KeyPath) -> KeyPath:
        """The name of a leaf in the model."""
        return self.names.get(path, path)

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
        others: whether it has leaves that are no tensors.
    """

    leaves: Mapping[KeyPath, Leaf]
    optimizer: bool
    others: bool = False

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
        """The trees that the parameters may be, the one with the fewest removals first."""
        return tuple(_trees(self.leaves))


_OF_MODELS = ("parameter", "statistic")


def read_tree(manifest: Manifest) -> TreeReading:
    """Read the tree of a checkpoint.

    A format that holds nothing but parameters says so by the manifest's kind, which proves what names do not show; not
    of leaves that have numbers in place of names.
    """
    planned = manifest.custom.get(PLANNED)
    return read_leaves(
        manifest.tensors,
        manifest.values,
        manifest.empties,
        planned=planned if isinstance(planned, dict) else {},
        specs=manifest.tensors,
        proven=manifest.kind == "params",
    )


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
    states = _StateNodes.among(
        list(parts.values()), values, [_parts_of(path, planned or {}) for path in empties]
    )
    leaves = {path: _leaf(own, states, specs[path] if specs else None) for path, own in parts.items()}
    doubtful = _settle(leaves, parts, states, specs)
    _name(leaves, parts, specs, proven, doubtful)
    _find_copies(leaves, parts)
    optimizer = any(leaf.kind == "optimizer" for leaf in leaves.values()) or any(map(states.holds, values))
    return TreeReading(leaves, optimizer, bool(values))


def _parts_of(path: KeyPath, planned: Mapping[str, Any]) -> KeyPath:
    """A key path as the program had it: names that a planner joined are split."""
    if len(path) != 1:
        return path
    found = planned.get(path[0])
    if found:
        return tuple(map(str, found))
    return tuple(path[0].split("/")) if "/" in path[0] else path


def _tokens(parts: KeyPath) -> _Tokens:
    """The words of a key path: its parts, and the modules of a name of torch."""
    for part in parts:
        if "." in part:
            return tuple(".".join(parts).split("."))
    return parts


@lru_cache(1 << 14)
def _is_optimizer(token: str) -> bool:
    """Whether a word stands only above the state of an optimizer."""
    return _OPTIMIZER_WORD.fullmatch(token.lower()) is not None


@lru_cache(1 << 14)
def _may_be_optimizer(token: str) -> bool:
    """Whether a word stands above the state of an optimizer, or is that of a module."""
    return _OPTIMIZER_NODE.fullmatch(token.lower()) is not None


@lru_cache(1 << 14)
def _is_parameter_name(token: str) -> bool:
    return _PARAMETER_LEAF.fullmatch(token) is not None


@lru_cache(1 << 14)
def _of_run(token: str) -> bool:
    """Whether a word may be evidence of an optimizer."""
    return token in _SIGNS or _is_optimizer(token) or _may_be_optimizer(token)


_SIGNS = _MOMENTS | _SLOTS | _MARKS | _OPTAX_MOMENTS | {_GROUPS} | _INNER


def _has_name(path: KeyPath) -> bool:
    """Whether a leaf has a name, not only its number in a list."""
    return any(part not in _WRAPPED and not _NUMBERED.fullmatch(part) for part in path)


def _is_sure(root: str) -> bool:
    return root in _SURE_ROOTS or root.endswith("_params")


@dataclass(frozen=True, slots=True)
class _StateNodes:
    """The nodes that are the state of an optimizer.

    Attributes:
        whole: nodes of which everything is its state, except what it holds of the model.
        fields: node → the fields in it that are its state.
        tops: nodes near the top whose word may be that of an optimizer or of a module, where nothing in them decides.
    """

    whole: frozenset[_Tokens]
    fields: Mapping[_Tokens, frozenset[str]]
    tops: frozenset[_Tokens]

    @staticmethod
    def among(tensors: list[KeyPath], values: list[KeyPath], empties: list[KeyPath]) -> _StateNodes:
        """The nodes of a tree, from the parts of all its leaves."""
        whole: set[_Tokens] = set()
        fields: defaultdict[_Tokens, set[str]] = defaultdict(set)
        states: set[_Tokens] = set()  # nodes of optax, perhaps
        tops: set[_Tokens] = set()
        joined = False  # whether names of modules are joined, as torch does and no optimizer of JAX
        leaves = [(parts, _tokens(parts)) for parts in (*tensors, *values)]
        for parts, tokens in leaves:
            if not any(map(_of_run, tokens)):
                continue
            top = next((at for at, part in enumerate(parts) if not _is_around(part)), None)
            if top is not None and top < len(parts) - 1 and _may_be_optimizer(parts[top]):
                tops.add(_tokens(parts[: top + 1]))
            inside = top is not None and _is_sure(parts[top])
            _look_at(tokens, whole, fields, set() if inside else states)
            joined = joined or tokens is not parts
        if states or tops:
            every = [tokens for _, tokens in leaves] + [_tokens(parts) for parts in empties]
            names = frozenset(tokens for _, tokens in leaves)
            _look_at_states(states, every, names, fields, None if joined else _Repeats(names))
        for node in {*whole, *fields}:
            whole |= {node[: at + 1] for at, token in enumerate(node) if _may_be_optimizer(token)}
        for node in [node for node in fields if _GROUPS in fields[node]]:
            whole |= {node} if node and _may_be_optimizer(node[-1]) else set()
        found = {node: frozenset(some) for node, some in fields.items()}
        return _StateNodes(frozenset(whole), found, frozenset(tops - whole))

    def holds(self, parts: KeyPath) -> bool:
        """Whether a leaf is state of an optimizer."""
        tokens = _tokens(parts)
        if any(map(_is_optimizer, tokens)):
            return True
        if not self.whole and not self.fields:
            return False
        for place, token in enumerate(tokens):
            if token in self.fields.get(tokens[:place], ()):
                return True
            if tokens[:place] in self.whole and not (token in _HELD and self._is_model(tokens[: place + 1])):
                return True
        return False

    def may_hold(self, node: KeyPath) -> bool:
        """Whether a node may be an optimizer of Flax, which holds the model and its state."""
        return node in self.whole or node in self.tops

    def _is_model(self, node: _Tokens) -> bool:
        """Whether a node is the model that an optimizer holds (Flax), not a part of its state."""
        if not _may_be_optimizer(node[-2]):
            return False
        return not any(one[: len(node)] == node for one in self.whole) and not any(
            one[: len(node)] == node for one in self.fields
        )


def _look_at(
    tokens: _Tokens, whole: set[_Tokens], fields: dict[_Tokens, set[str]], states: set[_Tokens]
) -> None:
    """Note what the words of one leaf show."""
    last = len(tokens) - 1
    while last > 0 and tokens[last] in _WRAPPED:
        last -= 1
    for place, token in enumerate(tokens):
        if token in _MOMENTS:
            node = tokens[:place]
            if place == last and node:
                whole.add(node)
            else:
                fields[node] |= {token, "step"}
        elif token == _GROUPS:
            fields[tokens[:place]] |= {_GROUPS, _STATE}
        elif place == last and token in _SLOTS and place and _is_slot_of(tokens[place - 1]):
            whole.add(tokens[:place])
        elif token in _OPTAX_MOMENTS or token in _MARKS or token in _INNER:
            states.add(tokens[:place])


def _is_slot_of(token: str) -> bool:
    """Whether a word is the full name of a parameter, below which no module has leaves."""
    return token in ("weight", "bias", "kernel", "embedding")


def _is_around(part: str) -> bool:
    return part in _AROUND or part.isdecimal()


def _look_at_states(
    states: set[_Tokens],
    every: list[_Tokens],
    names: frozenset[_Tokens],
    fields: dict[_Tokens, set[str]],
    repeats: _Repeats | None,
) -> None:
    """Decide which nodes with fields of optax are its states."""
    inside: defaultdict[_Tokens, set[str]] = defaultdict(set)
    below: defaultdict[_Tokens, set[_Tokens]] = defaultdict(set)
    for tokens in every:
        for place, token in enumerate(tokens):
            if tokens[:place] in states:
                inside[tokens[:place]].add(token)
                if token in _OPTAX_MOMENTS:
                    below[tokens[: place + 1]].add(tokens[place + 1 :])
    for node in sorted(states):
        own = inside[node]
        if not own <= _FIELDS:
            continue
        moments = own & _OPTAX_MOMENTS
        certain = own & _MARKS or ("hyperparams" in own & _FIELDS and own & _INNER)
        nested = len(moments) > 1 or _is_link(node) or any(() not in below[*node, one] for one in moments)
        counted = moments and nested and _is_number(node, _COUNT, names)
        if certain or counted or (repeats and _repeats_names(node, own, below, repeats)):
            fields[node] |= own
    _add_counts_of_chains(names, fields)


def _is_number(node: _Tokens, field_: str, names: frozenset[_Tokens]) -> bool:
    return any((*node, field_, *tail) in names for tail in ((), (BOX,), (OLD_VARIABLE,)))


def _repeats_names(
    node: _Tokens, own: set[str], below: Mapping[_Tokens, set[_Tokens]], repeats: _Repeats
) -> bool:
    """Whether the moments of a node have the names of other leaves of the tree, as a moment of each parameter has."""
    moment = below[*node, "nu" if "nu" in own else "trace"]
    pair = own == {"mu", "nu"} and below[*node, "mu"] == moment and max(map(len, moment)) > 1
    return (pair or (_is_link(node) and own <= _ALONE_MOMENTS)) and repeats.has(node, moment)


def _is_link(node: _Tokens) -> bool:
    """Whether a node may be a link of a chain of optax: an index."""
    return bool(node) and node[-1].isdecimal()


def _add_counts_of_chains(names: frozenset[_Tokens], fields: dict[_Tokens, set[str]]) -> None:
    """Count the numbers of other links of a chain, such as a schedule's, as state."""
    chains = {node[:-1] for node, own in fields.items() if _is_link(node) and _GROUPS not in own}
    if not chains:
        return
    for tokens in names:
        core = tokens[:-1] if tokens and tokens[-1] in _WRAPPED else tokens
        if core and core[-1] == _COUNT and len(core) > 1 and core[-2].isdecimal() and core[:-2] in chains:
            fields[core[:-1]].add(_COUNT)


class _Repeats:
    """Finds nodes whose leaves have the names of those of another node."""

    def __init__(self, names: frozenset[_Tokens]) -> None:
        self._names, self._asked = names, 0
        self._by_last: defaultdict[str, list[_Tokens]] = defaultdict(list)

    def has(self, node: _Tokens, below: Collection[_Tokens]) -> bool:
        """Whether all leaves of another node are called as these are below their own."""
        self._asked += 1
        if not below or () in below or self._asked > _MOST_REPEATED:
            return False
        if not self._by_last:
            for tokens in self._names:
                self._by_last[tokens[-1] if tokens else ""].append(tokens)
        longest = max(below, key=len)
        size = len(longest)
        for tokens in self._by_last[longest[-1]]:
            other = tokens[:-size]
            if tokens[-size:] != longest or len(tokens) < size or tokens[: len(node)] == node:
                continue
            if all((*other, *rest) in self._names for rest in below):
                return True
        return False


def _leaf(parts: KeyPath, states: _StateNodes, spec: TensorSpec | None) -> Leaf:
    """What a leaf is by its own names; unknown if they do not show it."""
    if states.holds(parts):
        return Leaf("optimizer", (), "state of an optimizer, by its node or by the leaves next to it")
    node = _root_of(parts, states)
    words = [token for token in _tokens(parts) if token not in _WRAPPED]
    if _is_key(words, node, spec):
        return Leaf("key", (), "a random-number key or its counter")
    own = next((parts[: at + 1] for at, part in enumerate(parts) if part in _STATISTICS), ())
    if own or not _STATISTIC_LEAVES.isdisjoint(words[-1:]):
        return Leaf("statistic", node or own, "a statistic of the data")
    if node:
        return Leaf("parameter", node, f"below {render(node)}")
    if _is_counter(words, spec):
        return Leaf("counter", (), "a number of the run, by its name")
    return Leaf("unknown", (), "no name shows what it is")


def _is_key(words: list[str], node: KeyPath, spec: TensorSpec | None) -> bool:
    """Whether a leaf is the key of a random-number generator: by its type, or by a name, and not of floats."""
    if spec is not None and spec.tags is not None and "prng" in spec.tags:
        return True
    if _KEYS.isdisjoint(words) or (spec is not None and "float" in spec.dtype):
        return False
    outside = words[: words.index(node[-1])] if node else words
    named = spec is None and _is_parameter_name(words[-1])
    return (not _KEYS.isdisjoint(outside) and not named) or words[-1] in _KEY_FIELDS


def _is_counter(words: list[str], spec: TensorSpec | None) -> bool:
    """Whether a leaf is a number of the run: named so, near the top of the tree, and alone in its tensor."""
    if not words or words[-1].lower() not in _COUNTERS or (spec is not None and spec.size != _ALONE):
        return False
    return all(map(_is_around, words[:-1]))


def _root_of(parts: KeyPath, states: _StateNodes) -> KeyPath:
    """The node that is known to hold parameters, above a leaf; only nodes around such ones may be above it."""
    for place, part in enumerate(parts[:-1]):
        if part in ROOTS or part.endswith("_params"):
            return parts[: place + 1]
        holder = _may_be_optimizer(part) and parts[place + 1] in _HELD
        if not _is_around(part) and not (holder and states.may_hold(parts[: place + 1])):
            return ()
    return ()


def _settle(
    leaves: dict[KeyPath, Leaf],
    parts: Mapping[KeyPath, KeyPath],
    states: _StateNodes,
    specs: Mapping[KeyPath, TensorSpec] | None,
) -> set[KeyPath]:
    """Decide what depends on the rest of the tree: words that a module may have too, and numbers.

    Returns:
        The leaves that are as likely parameters as state of an optimizer.
    """
    rooted = any(leaf.kind == "parameter" for leaf in leaves.values())
    optimizer = any(leaf.kind == "optimizer" for leaf in leaves.values())
    tops = _judge_tops(parts, states, rooted=rooted, optimizer=optimizer)
    doubtful: set[KeyPath] = set()
    flat = not optimizer and all(len(own) == 1 for own in parts.values())
    dotted = flat and any("." in own[0] for own in parts.values())
    for path, leaf in leaves.items():
        own = parts[path]
        if leaf.kind == "counter" and dotted:
            leaves[path] = Leaf("unknown", (), "no name shows what it is")
        if leaf.kind != "unknown":
            continue
        tokens = _tokens(own)
        judged = (
            [tops[tokens[:place]] for place in range(1, len(tokens)) if tokens[:place] in tops]
            if tops
            else []
        )
        if None in judged:
            doubtful.add(path)
        elif any(judged):
            leaves[path] = Leaf("optimizer", (), "in a node called as an optimizer, next to the parameters")
        elif (rooted or optimizer) and _is_of_run(tokens, specs[path] if specs else None):
            leaves[path] = Leaf("counter", (), "in a node of the run: a schedule, a scaler or a metric")
        elif rooted and specs and specs[path].size == _ALONE and not specs[path].shape:
            leaves[path] = Leaf("counter", (), "a number outside the model")
    return doubtful


def _judge_tops(
    parts: Mapping[KeyPath, KeyPath], states: _StateNodes, *, rooted: bool, optimizer: bool
) -> dict[_Tokens, bool | None]:
    """Whether nodes are the state of an optimizer, whose word may also be that of a module; None if both may be."""
    if not states.tops:
        return {}
    every = list(map(_tokens, parts.values()))
    repeats = _Repeats(frozenset(every))
    found: dict[_Tokens, bool | None] = {}
    for top in states.tops:
        below = [tokens[len(top) :] for tokens in every if tokens[: len(top)] == top]
        if not below:
            continue
        heads, named = {rest[0] for rest in below}, any(_is_parameter_name(rest[-1]) for rest in below)
        moments = bool(heads & _SLOTS) and heads <= _SLOTS | _COUNTERS
        found[top] = rooted or moments or (optimizer and not named)
        if not found[top] and min(map(len, below)) > 1 and repeats.has(top, below):
            found[top] = None
    return found


def _is_of_run(tokens: _Tokens, spec: TensorSpec | None) -> bool:
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
    leaves: dict[KeyPath, Leaf],
    parts: Mapping[KeyPath, KeyPath],
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
    by_names, letters = _scopes_of_parameters(open_, parts)
    run = any(leaf.kind in ("optimizer", "counter", "key") or leaf.node for leaf in leaves.values())
    some = bool(by_names or letters)
    for path, scope in open_.items():
        if scope in by_names or () in by_names or path in letters:
            leaves[path] = Leaf("parameter", (), "named as parameters are")
        elif proven and _has_name(parts[path]):
            leaves[path] = Leaf("parameter", (), "the format holds parameters only")
        elif some and not run and specs and _has_name(parts[path]) and not _is_whole_number(specs[path]):
            leaves[path] = Leaf("parameter", (), "in a tree of parameters, without the state of a run")


def _is_whole_number(spec: TensorSpec) -> bool:
    return spec.dtype.startswith(_WHOLE_NUMBERS)


def _scopes_of_parameters(
    open_: Mapping[KeyPath, KeyPath], parts: Mapping[KeyPath, KeyPath]
) -> tuple[set[KeyPath], set[KeyPath]]:
    """The scopes of which a name shows that they hold parameters; and leaves of which only their own name does."""
    found: set[KeyPath] = set()
    letters: dict[str, KeyPath] = {}
    for path, scope in open_.items():
        if scope in found:
            continue
        tokens = [token for token in _tokens(parts[path]) if token not in _WRAPPED]
        if not tokens or not _is_parameter_name(tokens[-1]):
            continue
        if tokens[-1].lower() in _LETTERS and not (scope or len(tokens) > 1):
            letters[tokens[-1].lower()] = path
        else:
            found.add(scope)
    return found, set(letters.values()) if len(letters) == len(_LETTERS) else set()


def _find_copies(leaves: dict[KeyPath, Leaf], parts: Mapping[KeyPath, KeyPath]) -> None:
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
            leaves[path] = Leaf(
                "copy", leaves[path].node, f"a copy of the parameters that training follows: {top}"
            )


def _is_copy(top: str, tops: Collection[str]) -> bool:
    """Whether a node is called as an average of parameters, or as the target of a node next to it."""
    target = top.startswith(_COPY_OF) and top.removeprefix(_COPY_OF) in tops
    return target or _COPY_WORD.fullmatch(top) is not None


def _trees(leaves: Mapping[KeyPath, Leaf]) -> Iterator[ModelTree]:
    """See `TreeReading.trees`."""
    aside = frozenset(path for path, leaf in leaves.items() if leaf.kind in ("optimizer", "counter", "key"))
    members = [path for path in leaves if path not in aside]
    yield ModelTree({path: path for path in members}, aside)
    groups: list[list[KeyPath]] = [members]
    by_node: defaultdict[KeyPath, list[KeyPath]] = defaultdict(list)
    for path in members:
        node = leaves[path].node or path[:1]
        if len(path) > 1 or leaves[path].node:
            by_node[node].append(path)
    order = list(ROOTS)
    ranked = sorted(by_node, key=lambda node: order.index(node[-1]) if node[-1] in ROOTS else len(order))
    groups += [by_node[node] for node in ranked if len(by_node[node]) < len(members)]
    for group in groups:
        outside = aside | (frozenset(members) - frozenset(group))
        yield from _peeled(group, outside, whole=len(group) == len(members))


def _peeled(group: list[KeyPath], outside: frozenset[KeyPath], *, whole: bool) -> Iterator[ModelTree]:
    """The trees of some parameters: without what is within and after the names, then without one root after another."""
    if not group:
        return
    names, removed = _without_leaf_wrappers(_without_words(group))
    found = [RemovedWrapper(*row) for row in removed]
    if removed or not whole:
        yield ModelTree(names, outside, tuple(found))
    while (root := _common_root(names.values())) is not None:
        word, mark = root
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


def _common_root(names: Collection[KeyPath]) -> tuple[str, str] | None:
    """The root that every name begins with, and the mark after it; None if they do not share one."""
    first = next(iter(names), ())
    if not first:
        return None
    head, dot, _rest = first[0].partition(".")
    known = head in ROOTS or head in _AROUND or head.endswith("_params")
    if dot and known and all(name and name[0].startswith(f"{head}.") for name in names):
        return head, "."
    known = known and not dot
    if known and all(len(name) > 1 and name[0] == head for name in names):
        return head, "/"
    return None


def _without_first(name: KeyPath, mark: str) -> KeyPath:
    return name[1:] if mark == "/" else (name[0].partition(".")[2], *name[1:])
