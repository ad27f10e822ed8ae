"""kinds: what each leaf of a tree is, and by which evidence.

What a leaf is follows from structure first, at any depth. An optimizer's state is what torch and optax save:
a moment (`exp_avg`), `state` next to `param_groups`, a node with nothing but fields of an optax state (`count`, `mu`,
`nu`), and what is below a word that no model uses (`opt_state`). Words that a model may use (`optimizer`, `opt`) count
where such structure is below them, or where they are next to the node of the parameters, or repeat its names. A leaf is
a parameter if a node that is known to hold parameters is above it, or if its names are those of parameters (`weight`,
`kernel`), or if the format holds nothing else. Everything else is unknown: a number in place of a name proves nothing.

Numbers of a run, random-number keys and statistics follow from names, types and places. A copy is an average of the
parameters, or a network that is the target of another, next to the parameters that it follows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from wherry.core.keypath import render
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
    from collections.abc import Collection, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec

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
    """The part of a tree in which one name of a parameter speaks for all: the top node, or the whole of a flat tree."""
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
