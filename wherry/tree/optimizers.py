"""optimizers: which nodes of a tree are the state of an optimizer, by their structure, at any depth.

Facts. torch keeps `state` next to `param_groups`, and a moment has a name that no module uses (`exp_avg`). A state of
optax is a named tuple, which Orbax and Flax save as a node with its fields: `OPTAX` lists those of optax 0.2.8. Its
chains are tuples, so their links are numbers. A moment has the names of the parameters below it. T5X, Keras and PaxML
have words of their own above the state (`param_states`, `optimizer_variables`, `opt_states_0`).

What is not promised: that a node without any of these is no such state. `wherry.tree.kinds` decides about words that
a module may have as well.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from sys import intern
from typing import TYPE_CHECKING, TypeAlias

from wherry.tree.forms import BOX, OLD_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from wherry.core.keypath import KeyPath

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
        """Whether a leaf is in a node that may be such a state."""
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
    """What these nodes have right in them, and the names below each field of optax."""
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
