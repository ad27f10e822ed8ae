"""kinds: what each leaf of a tree is, and by which evidence.

What a leaf is follows from structure first, at any depth. An optimizer's state is what torch and optax save:
a moment (`exp_avg`), `state` next to `param_groups`, a node with nothing but fields of an optax state (`count`, `mu`,
`nu`), and what is below a word that no model uses (`opt_state`). Words that a model may use (`optimizer`, `opt`) count
where such structure is below them, or where they are next to the node of the parameters, or repeat its names. A leaf is
a parameter if a node that is known to hold parameters is above it, or if its names are those of parameters (`weight`,
`kernel`), or if the format holds nothing else. Everything else is unknown: a number in place of a name proves nothing.

Numbers of a run, random-number keys and statistics follow from names, types and places. A copy is an average of the
parameters, or a network that is the target of another, next to the parameters that it follows.

Facts. torch keeps `state` next to `param_groups`, and a moment has a name that no module uses (`exp_avg`). A state of
optax is a named tuple, which Orbax and Flax save as a node with its fields: `OPTAX` lists those of optax 0.2.8. Its
chains are tuples, so their links are numbers. A moment has the names of the parameters below it. T5X, Keras and PaxML
have words of their own above the state (`param_states`, `optimizer_variables`, `opt_states_0`).

What is not promised: that a node without any of these is no such state. The first paragraph says when words count that
a module may have as well.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from sys import intern
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.layout.forms import BOX, OLD_VARIABLE

if TYPE_CHECKING:
    from wherry.core.tensorspec import TensorSpec

Tokens: TypeAlias = tuple[str, ...]

WRAPPED = frozenset({BOX, OLD_VARIABLE})
# Words that only the state of an optimizer has above its leaves.
_STATE_WORD = re.compile(
    r"(?:\w+_)?(?:optimi[sz]er|optim|opt)_(?:states?|state_dicts?|vars|variables|history)(?:_\w+)?"
    r"|param_states|hyperparams_states|optimizer_slot"
)
# Words that a module may have as well; what is inside or next to them decides.
_OPTIMIZER_WORD = re.compile(
    r"(?:\w+_)?optimi[sz]ers?(?:_\w+)?|(?:\w+_)?(?:optims?|opts?)|(?:optims?|opts?)_(?:\d+|[a-z])"
)
HELD = frozenset(
    {"target", "model", "params"}
)  # what an optimizer of Flax holds besides its state: the model
# Leaves that optimizers of torch, T5X and BERT keep for a parameter and that no module has.
_MOMENTS = frozenset(
    {
        "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_slow", "exp_inf", "momentum_buffer",
        "square_avg", "acc_delta", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_diff", "grad_avg",
        "previous_grad", "prev_grad", "max_exp_avg_sqs", "exp_avg_res_row", "exp_avg_res_col",
        "neg_pre_grad", "prev_flat_grad", "mu_product", "v_row", "v_col", "adam_m", "adam_v",
    }
)  # fmt: skip
# Leaves that optimizers keep right below the name of a parameter, as in `layer.weight.m`; and such names.
SLOTS = frozenset(
    {"m", "v", "mu", "nu", "momentum", "velocity", "accumulator", "sum", "prev", "step_size", "ax", "eta"}
)
_OF_PARAMETERS = frozenset({"weight", "bias", "kernel", "embedding"})
_GROUPS, _STATE = "param_groups", "state"  # what torch's Optimizer.state_dict has
_COUNT = "count"
# Fields of each state of optax, those that may be empty after the bar.
OPTAX = tuple(
    (frozenset(certain.split()), frozenset(possible.split()))
    for certain, _, possible in (
        row.partition("|")
        for row in """
        count mu nu
        count mu
        count nu
        count ema
        count mu nu nu_max
        count mu nu | hessian_fn_state
        count mu ns_coeffs
        count v_row v_col v
        count grad_acc
        count grad_sum_sq s | x0
        count count_m2 m1 nu | m2
        count params updates diff_params_memory diff_updates_memory weights_memory
        count ema_decay mean_grads_ema variance_grads_ema
        count | hyperparams hyperparams_states inner_state
        count | base_optimizer_state projector
        count r m v s | base_optimizer_state x0
        count gamma lb barf exp_avg | exp_avg_sq
        count exp_avg exp_avg_sq grad_sum estim_lr numerator_weighted | params0
        count rng_key
        scale best_value plateau_count cooldown_count count avg_value
        b1 weight_sum step_count max_lr z | base_optimizer_state
        mini_step gradient_step acc_grads | inner_opt_state skip_state
        micro_step ready avg_grad
        micro_step ready mean_grads sum_sq_diff_grads
        notfinite_count last_finite total_notfinite | inner_state
        init_particles cumulative_gradients scale subgradients reward
        is_init_step init_params max_dist sum_sq_norm_grads
        init_params weighted_sq_norm_grads estim_sq_dist
        max_dist grad_sum_of_squares init_params
        is_initial_step previous_gradient
        step_sizes prev_updates
        learning_rate value grad | info
        steps_since_sync fast_state
        steps_since_sync | opt_state adv_state cache
        step inner_state
        m v n g t
        t m n
        e_g e_x
        mu nu
        """.strip().splitlines()
    )
)
_PAIR = frozenset({"mu", "nu"})  # fields of a state, and names of two modules
_LINKS = ("trace", "nu", "sum_of_squares")  # the only field of their state
# Fields that are no reason to look at a node.
_COMMON = frozenset(
    {
        "count", "params", "scale", "value", "step", "learning_rate", "s", "r", "t", "n", "g", "z", "b1",
        "ready", "cache", "info", "reward", "updates", "gamma",
    }
)  # fmt: skip
_SIGNS = frozenset(_LINKS) | frozenset[str]().union(*(one | more for one, more in OPTAX)) - _COMMON
_NUMBERS = frozenset({_COUNT, "t", "step_count", "mini_step", "micro_step", "steps_since_sync", "step"})
_OF_LINKS = frozenset({_COUNT, "rng_key", "key", "found_nan"})  # all that other links of a chain hold
_MOST_REPEATED = 64  # nodes of which it is found out whether they repeat the names of others
LeafKind: TypeAlias = Literal["parameter", "statistic", "copy", "optimizer", "counter", "key", "unknown"]

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
AROUND = {
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
    {
        "rng", "rngs", "prng", "prng_key", "rng_key", "rng_state", "rng_states", "random_state",
        "cuda_rng_state", "torch_rng_state", "numpy_rng_state", "dropout_rng", "cpu_rng_state",
    }
)  # fmt: skip
_KEY_FIELDS = frozenset({"key", "count"})  # below a key's node of NNX
_STATISTICS = frozenset({"batch_stats", "non_trainable_variables"})
_STATISTIC_LEAVES = frozenset(
    {"running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance", "moving_var"}
)
_RUN_NODES = frozenset(
    {
        "scaler", "grad_scaler", "amp_scaler", "loss_scaler", "loss_scale", "scheduler", "schedulers",
        "lr_scheduler", "lr_schedulers", "opt_param_scheduler", "metrics", "metrics_variables", "callbacks",
        "loops", "dataloader", "dataloaders", "train_dataloader", "sampler", "data_iterator", "ema_step",
    }
)  # fmt: skip
_COUNTERS = frozenset(
    {
        "step", "steps", "global_step", "iteration", "iterations", "iter", "iter_num", "epoch", "epochs",
        "count", "num_steps", "step_count", "train_step", "tokens", "tokens_seen", "best_val_loss",
        "best_loss", "lr", "learning_rate", "loss", "save_counter", "num_updates", "global_steps",
        "current_step", "opt_step",
    }
)  # fmt: skip
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
_ALONE = 1  # elements of a number of the run
_WHOLE_NUMBERS = ("int", "uint", "bool")


class TreeLeaf(NamedTuple):
    """What a leaf is.

    Attributes:
        kind: its kind.
        node: the node that is known to hold parameters, for a parameter below one; else empty.
        why: the evidence, in words.
    """

    kind: LeafKind
    node: KeyPath
    why: str


def kinds_of(
    parts: Mapping[KeyPath, KeyPath],
    values: Sequence[KeyPath],
    empties: Sequence[KeyPath],
    specs: Mapping[KeyPath, TensorSpec] | None,
    *,
    proven: bool,
) -> tuple[dict[KeyPath, TreeLeaf], bool]:
    """What each tensor is, and whether the tree has the state of an optimizer.

    Args:
        parts: key path of each tensor → its parts, as the program had them.
        values: parts of the other leaves, which are evidence too.
        empties: parts of nodes without leaves, which are no state of their own.
        specs: the tensors, if they are known.
        proven: whether the format holds nothing but parameters, unless names show otherwise.
    """
    words = {path: tokens_of(own) for path, own in parts.items()}
    evidence = [(own, tokens_of(own)) for own in values]
    tops = {path: top for path, own in parts.items() if (top := _top_of(own))}
    states = StateNodes.among(
        (*((own, words[path]) for path, own in parts.items()), *evidence),
        [tokens_of(own) for own in empties],
        {parts[path] for path, top in tops.items() if is_sure(top[-1])},
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
        states.holds(tokens) for _, tokens in evidence
    )
    return leaves, optimizer


@lru_cache(1 << 14)
def _is_parameter_name(token: str) -> bool:
    return _PARAMETER_LEAF.fullmatch(token) is not None


def has_name(path: KeyPath) -> bool:
    """Whether a leaf has a name, not only its number in a list."""
    return any(part not in WRAPPED and not _NUMBERED.fullmatch(part) for part in path)


def is_sure(root: str) -> bool:
    """Whether a node of this name holds nothing but parameters, since no module has the name."""
    return root in _SURE_ROOTS or root.endswith("_params")


def _is_around(part: str) -> bool:
    return part in AROUND or part.isdecimal()


def _top_of(parts: KeyPath) -> KeyPath:
    """The node of a leaf that is not around both a model and its run; empty if the leaf itself is there."""
    place = next((at for at, part in enumerate(parts) if not _is_around(part)), len(parts))
    return parts[: place + 1] if place < len(parts) - 1 else ()


_OF_OPTIMIZERS = TreeLeaf("optimizer", (), "state of an optimizer, by its node or by the leaves next to it")


def _leaf(
    parts: KeyPath, tokens: Tokens, states: StateNodes, top: KeyPath, spec: TensorSpec | None
) -> TreeLeaf:
    """What a leaf is by its own names; unknown if they do not show it."""
    node = _root_of(parts, states, top)
    words = tokens if WRAPPED.isdisjoint(tokens) else tuple(one for one in tokens if one not in WRAPPED)
    if _is_key(words, node, spec):
        return TreeLeaf("key", (), "a random-number key or its counter")
    if not _STATISTICS.isdisjoint(parts):
        own = next(parts[: at + 1] for at, part in enumerate(parts) if part in _STATISTICS)
        return TreeLeaf("statistic", node or own, "a statistic of the data")
    if words and words[-1] in _STATISTIC_LEAVES:
        return TreeLeaf("statistic", node, "a statistic of the data")
    if node:
        return _below(node)
    return _COUNTER if _is_counter(words, spec) else _UNKNOWN


_UNKNOWN = TreeLeaf("unknown", (), "no name shows what it is")
_COUNTER = TreeLeaf("counter", (), "a number of the run, by its name")


@lru_cache(1 << 10)
def _below(node: KeyPath) -> TreeLeaf:
    return TreeLeaf("parameter", node, f"below {render(node)}")


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
    """The node above a leaf that is known to hold parameters; above it may be only nodes that wrap such nodes."""
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
    leaves: dict[KeyPath, TreeLeaf],
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
    rooted, sure = bool(roots), any(map(is_sure, roots))
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
            leaves[path] = TreeLeaf(
                "optimizer", (), "in a node called as an optimizer, next to the parameters"
            )
        elif sure and not _MOMENT_WORDS.isdisjoint(words[path]):
            leaves[path] = TreeLeaf("optimizer", (), "a moment, next to the parameters")
        elif (rooted or optimizer) and _is_of_run(words[path], specs[path] if specs else None):
            leaves[path] = TreeLeaf("counter", (), "in a node of the run: a schedule, a scaler or a metric")
        elif rooted and specs and specs[path].size == _ALONE and not specs[path].shape:
            leaves[path] = TreeLeaf("counter", (), "a number outside the model")
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
    """The part of a tree in which one parameter's name shows what all are: the top node, or all of a flat tree."""
    inner = [part for part in parts if part not in AROUND]
    return tuple(inner[:1]) if len(inner) > 1 else ()


def _name(
    leaves: dict[KeyPath, TreeLeaf],
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
        elif proven and has_name(parts[path]):
            leaves[path] = TreeLeaf("parameter", (), "the format holds parameters only")
        elif (
            some
            and not run
            and specs
            and has_name(parts[path])
            and not specs[path].dtype.startswith(_WHOLE_NUMBERS)
        ):
            leaves[path] = TreeLeaf("parameter", (), "in a tree of parameters, without the state of a run")


_NAMED = TreeLeaf("parameter", (), "named as parameters are")


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


def _find_copies(leaves: dict[KeyPath, TreeLeaf], parts: Mapping[KeyPath, KeyPath]) -> None:
    """Find averages and target networks next to the parameters that they follow, in a tree with the state of a run."""
    tops: defaultdict[str, list[KeyPath]] = defaultdict(list)
    for path, leaf in leaves.items():
        if leaf.kind in ("parameter", "statistic") and len(parts[path]) > 1:
            tops[next((part for part in parts[path] if part not in AROUND), "")].append(path)
    run = any(leaf.kind == "optimizer" or leaf.node for leaf in leaves.values())
    copies = {  # called as an average of parameters, or as the target of a node next to it
        top
        for top in tops
        if run
        and (_COPY_WORD.fullmatch(top) or (top.startswith(_COPY_OF) and top.removeprefix(_COPY_OF) in tops))
    }
    if not copies or copies == set(tops):
        return
    for top in copies:
        for path in tops[top]:
            leaves[path] = TreeLeaf(
                "copy", leaves[path].node, f"a copy of the parameters that training follows: {top}"
            )


def tokens_of(parts: KeyPath) -> Tokens:
    """The words of a key path: its parts, and the modules of a name of torch."""
    for part in parts:
        if "." in part:
            return tuple(map(intern, ".".join(parts).split(".")))  # of many names few words are different
    return parts


@lru_cache(1 << 14)
def is_state_word(token: str) -> bool:
    """Whether a word stands only above the state of an optimizer."""
    return _STATE_WORD.fullmatch(token.lower()) is not None


@lru_cache(1 << 14)
def may_be_optimizer(token: str) -> bool:
    """Whether a word stands above the state of an optimizer, or is that of a module."""
    return _OPTIMIZER_WORD.fullmatch(token.lower()) is not None


@lru_cache(1 << 14)
def is_evidence(token: str) -> bool:
    """Whether a word may be part of the state of an optimizer."""
    known = token in _MOMENTS or token in SLOTS or token in _SIGNS or token == _GROUPS
    return known or is_state_word(token) or may_be_optimizer(token)


@dataclass(frozen=True, slots=True)
class StateNodes:
    """The nodes that are the state of an optimizer.

    Attributes:
        whole: nodes of which everything is its state, except what it holds of the model.
        fields: node → the fields in it that are its state.
        above: the nodes that have such nodes below them, and these themselves.
        doubtful: nodes that are as likely a pair of modules.
        depths: the numbers of words of the nodes of `whole` and `fields`.
    """

    whole: frozenset[Tokens]
    fields: Mapping[Tokens, frozenset[str]]
    above: frozenset[Tokens]
    doubtful: frozenset[Tokens]
    depths: tuple[int, ...]

    @staticmethod
    def among(
        leaves: Iterable[tuple[KeyPath, Tokens]], empties: Iterable[Tokens], outside: Collection[KeyPath]
    ) -> StateNodes:
        """The nodes of a tree.

        Args:
            leaves: the parts of every leaf, and its words.
            empties: the words of nodes without leaves.
            outside: the parts of leaves that are known to be parameters, among which optax has nothing.
        """
        whole: set[Tokens] = set()
        fields: defaultdict[Tokens, set[str]] = defaultdict(set)
        states: set[Tokens] = set()  # nodes of optax, perhaps
        doubtful: set[Tokens] = set()
        joined = False  # whether names of modules are joined, as torch does and no optimizer of JAX
        every: list[Tokens] = []
        for parts, tokens in leaves:
            every.append(tokens)
            if any(map(is_state_word, tokens)):
                place = next(at for at, token in enumerate(tokens) if is_state_word(token))
                whole.add(tokens[: place + 1])
            elif any(map(is_evidence, tokens)):
                _look_at(tokens, whole, fields, set() if parts in outside else states)
                joined = joined or tokens is not parts
        states -= whole
        if states:
            names = frozenset(every)
            every += empties
            doubtful = _look_at_states(states, every, names, fields, None if joined else Repeats(names))
        above = frozenset(node[:at] for node in {*whole, *fields} for at in range(len(node) + 1))
        whole |= {node for node in above if node and may_be_optimizer(node[-1])}
        found = {node: frozenset(some) for node, some in fields.items()}
        depths = tuple(sorted({len(node) for node in (*whole, *found)}))
        return StateNodes(frozenset(whole), found, above, frozenset(doubtful), depths)

    def holds(self, tokens: Tokens) -> bool:
        """Whether a leaf is state of an optimizer."""
        for depth in self.depths:
            if depth >= len(tokens):
                return False
            node, token = tokens[:depth], tokens[depth]
            if token in self.fields.get(node, ()):
                return True
            if node in self.whole and not (token in HELD and self._is_model(node, token)):
                return True
        return False

    def may_hold(self, tokens: Tokens) -> bool:
        """Whether a leaf is in a node that may be state of an optimizer."""
        return any(tokens[:place] in self.doubtful for place in range(len(tokens)))

    def _is_model(self, node: Tokens, held: str) -> bool:
        """Whether a node below an optimizer is the model that it holds (Flax), not a part of its state."""
        word = node[-1]
        return may_be_optimizer(word) and not is_state_word(word) and (*node, held) not in self.above


def _look_at(tokens: Tokens, whole: set[Tokens], fields: dict[Tokens, set[str]], states: set[Tokens]) -> None:
    """Note what the words of one leaf show."""
    last = len(tokens) - 1
    while last > 0 and tokens[last] in WRAPPED:
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
        elif place == last and token in SLOTS and place and tokens[place - 1] in _OF_PARAMETERS:
            whole.add(tokens[:place])
        if token in _SIGNS:
            states.add(tokens[:place])


def _look_at_states(
    states: set[Tokens],
    every: list[Tokens],
    names: frozenset[Tokens],
    fields: dict[Tokens, set[str]],
    repeats: Repeats | None,
) -> set[Tokens]:
    """Decide which nodes with fields of optax are its states.

    Returns:
        The nodes that may be, or be a pair of modules.
    """
    inside, below = _contents(states, every)
    doubtful: set[Tokens] = set()
    for node in sorted(states):
        own = frozenset(inside[node])
        if _is_state(node, own, below, names) or (repeats and _repeats_names(node, own, below, repeats)):
            fields[node] |= own
        elif own == _PAIR and _is_link(node) and repeats and repeats.has(node, below[*node, "nu"]):
            doubtful.add(node)
    chains = {node[:-1] for node, own in fields.items() if _is_link(node) and _GROUPS not in own}
    for tokens in names if chains else ():
        core = tokens[:-1] if tokens and tokens[-1] in WRAPPED else tokens
        if core and core[-1] in _OF_LINKS and _is_link(core[:-1]) and core[:-2] in chains:
            fields[core[:-1]].add(core[-1])
    return doubtful


def _contents(
    states: set[Tokens], every: list[Tokens]
) -> tuple[Mapping[Tokens, set[str]], Mapping[Tokens, set[Tokens]]]:
    """The fields directly in these nodes, and the names below each field of optax."""
    inside: defaultdict[Tokens, set[str]] = defaultdict(set)
    below: defaultdict[Tokens, set[Tokens]] = defaultdict(set)
    depths = sorted({len(node) for node in states})
    for tokens in every:
        for depth in depths:
            if depth >= len(tokens):
                break
            if (node := tokens[:depth]) in states:
                inside[node].add(token := tokens[depth])
                if token in _SIGNS:
                    below[tokens[: depth + 1]].add(tokens[depth + 1 :])
    return inside, below


def _is_state(
    node: Tokens, own: frozenset[str], below: Mapping[Tokens, set[Tokens]], names: frozenset[Tokens]
) -> bool:
    """Whether the fields of a node are those of a state, and its numbers are numbers."""
    if not _are_fields(own) or own == _PAIR:  # two modules of these names are as likely
        return False
    if not all(any((*node, one, *tail) in names for tail in _TAILS) for one in own & _NUMBERS):
        return False
    nested = any(() not in below[*node, one] for one in own & _SIGNS)
    return nested or len(own) > 2 or _is_link(node)  # noqa: PLR2004


@lru_cache(1 << 10)
def _are_fields(names: frozenset[str]) -> bool:
    """Whether a state of optax has these fields."""
    return len(names) > 1 and any(certain <= names <= certain | more for certain, more in OPTAX)


_TAILS: tuple[Tokens, ...] = ((), (BOX,), (OLD_VARIABLE,))


def _repeats_names(
    node: Tokens, own: frozenset[str], below: Mapping[Tokens, set[Tokens]], repeats: Repeats
) -> bool:
    """Whether the moments of a node have the names of other leaves of the tree, as a moment of each parameter has."""
    if own == _PAIR:
        return max(map(len, below[*node, "nu"])) > 1 and repeats.has(node, below[*node, "nu"])
    return len(own) == 1 and own <= {*_LINKS} and _is_link(node) and repeats.has(node, below[*node, *own])


def _is_link(node: Tokens) -> bool:
    """Whether a node may be a link of a chain of optax: an index."""
    return bool(node) and node[-1].isdecimal()


class Repeats:
    """Finds nodes whose leaves have the names of those of another node."""

    def __init__(self, names: frozenset[Tokens]) -> None:
        self._names, self._answered = names, 0
        self._by_last: defaultdict[str, list[Tokens]] = defaultdict(list)

    def has(self, node: Tokens, below: Collection[Tokens]) -> bool:
        """Whether all leaves of another node are called as these are below their own."""
        self._answered += 1
        if not below or () in below or self._answered > _MOST_REPEATED:
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
