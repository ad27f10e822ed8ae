"""Arithmetic expressions over a config's attributes, for the sizes, scales and facts of family files.

An expression is text such as `(head_dim or hidden_size / num_attention_heads) / 2`. It may contain only names,
attributes of tables, numbers, text, lists, tables, arithmetic, comparisons and the functions in `FUNCTIONS`, so a
family file cannot run code. A name that is missing from the config is None; arithmetic
with None is None; `a or b` is the first that is not None.

The functions are rounding, the width of Llama's feed-forward layer, and the words of configs. Systems spell the same
thing in different words. Each word has one canonical spelling, that of transformers, so that two configs can be
compared: the activation, the scaling of rotary positions with its defaults stated, the attention of each layer.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, cast

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import HostileError, UnrepresentableError, UsageError, WherryError

_LONGEST = 1000
_LARGEST = 10**18

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Gt: lambda a, b: a > b,
    ast.Lt: lambda a, b: a < b,
    ast.In: lambda a, b: a in b,
}


def evaluate(text: str, attributes: Mapping[str, Any]) -> Any:
    """The value of an expression; None if an attribute that it needs is missing.

    Raises:
        UsageError: the expression is invalid, or a division leaves a remainder.
    """
    try:
        return _value(_parse(text), attributes)
    except (TypeError, AttributeError, ZeroDivisionError, OverflowError, ValueError) as error:
        if isinstance(error, WherryError):
            raise
        raise UsageError(
            f"cannot evaluate expression {text!r}: {error}", cure="check the numbers in the config"
        ) from error


def names_in(text: str) -> frozenset[str]:
    """The attributes that an expression reads (for an attribute of a table: the table)."""
    nodes = list(ast.walk(_parse(text)))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called)


@cache
def _parse(text: str) -> ast.expr:
    try:
        if len(text) > _LONGEST:
            raise UsageError(f"expression of {len(text)} characters exceeds the limit of {_LONGEST}")
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(f"invalid expression {text!r}: {error}") from error


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:  # noqa: C901, PLR0911  one line per kind of node
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.List():
            return [_value(part, names) for part in node.elts]
        case ast.Dict():
            return _table(node, names)
        case ast.Name():
            return names.get(node.id)
        case ast.Attribute():
            table = _value(node.value, names)
            return cast("dict[str, Any]", table).get(node.attr) if isinstance(table, dict) else None
        case ast.BoolOp(op=ast.Or()):
            values = (_value(part, names) for part in node.values)
            return next((value for value in values if value is not None), None)
        case ast.BinOp():
            return _operate(node, _value(node.left, names), _value(node.right, names))
        case ast.Compare(ops=[operator], comparators=[other]) if type(operator) in _COMPARISONS:
            sides = _value(node.left, names), _value(other, names)
            return None if None in sides else _COMPARISONS[type(operator)](*sides)
        case ast.IfExp():
            return _value(node.body if _value(node.test, names) else node.orelse, names)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            values = [_value(part, names) for part in arguments]
            return None if None in values else FUNCTIONS[name](*values)
        case _:
            raise UsageError(f"unsupported syntax {ast.unparse(node)!r} in an expression")


def _table(node: ast.Dict, names: Mapping[str, Any]) -> dict[str, Any] | None:
    """A table; None if one of its values is."""
    keys = [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    if len(keys) < len(node.keys):
        raise UsageError(f"unsupported syntax {ast.unparse(node)!r}: the keys of a table are text")
    values = [_value(part, names) for part in node.values]
    return None if None in values else dict(zip(keys, values, strict=True))


def _operate(node: ast.BinOp, left: Any, right: Any) -> Any:
    if left is None or right is None:
        return None
    if not all(isinstance(side, int | float) for side in (left, right)):
        raise UsageError(
            f"cannot evaluate {ast.unparse(node)!r}: expected numbers, got {left!r} and {right!r}"
        )
    if isinstance(node.op, ast.Div):
        return _divide(node, left, right)
    if type(node.op) not in _OPERATORS:
        raise UsageError(f"unsupported operator in {ast.unparse(node)!r}")
    value = _OPERATORS[type(node.op)](left, right)
    if abs(value) > _LARGEST:
        raise UsageError(f"{ast.unparse(node)!r} is {value}, which exceeds the limit of {_LARGEST}")
    return value


def _divide(node: ast.BinOp, left: Any, right: Any) -> Any:
    """Divide; integers must divide without a remainder.

    Raises:
        UnrepresentableError: they do not, and the divisor is a number of the layouts, such as the layers of a block.
        UsageError: they do not, and both are of the config, which is inconsistent.
    """
    if isinstance(left, float) or isinstance(right, float):
        return left / right
    whole, remainder = divmod(left, right)
    if remainder and isinstance(node.right, ast.Constant):
        raise UnrepresentableError(
            f"{ast.unparse(node.left)} is {left}; these layouts require a multiple of {right}",
            cure="choose another family or target",
        )
    if remainder:
        raise UsageError(
            f"{ast.unparse(node)} is {left} / {right}, which is not an integer", cure="correct the config"
        )
    return whole


@dataclass(slots=True)
class Read:
    """A config that records which of its attributes are used."""

    attributes: Mapping[str, Any]
    used: set[str] = field(default_factory=set[str])

    def __call__(self, text: str) -> Any:
        """The value of an expression."""
        self.used |= names_in(text)
        return evaluate(text, self.attributes)


_MOST_LAYERS = 250_000  # as many as a file may have tensors
_MULTIPLES = (256, 1024, 512, 128, 64, 32, 16, 8, 4, 2, 1)
# Names of one function each in transformers, the canonical name first. `gelu` without more is the exact one there.
_SAME = (
    ("silu", "swish"),
    ("gelu_pytorch_tanh", "gelu_new", "gelu_accurate", "gelu_python_tanh"),
    ("gelu", "gelu_python"),
)
# Canonical name → name in flax.linen, where `gelu` is the approximation by tanh.
_FLAX = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}
_FLAX_NAMES = {**{flax: name for name, flax in _FLAX.items()}, "swish": "silu"}
_LINEAR = "linear"
_GATED = "gated-"
_SLIDING, _FULL, _CHUNKED = "sliding_attention", "full_attention", "chunked_attention"


def _round_up(value: float, multiple: float) -> float:
    return -(-value // multiple) * multiple


def _bfloat16(value: float) -> float:
    """The value rounded to bfloat16: some systems round a factor to the model's dtype before they use it."""
    import ml_dtypes

    return float(ml_dtypes.bfloat16(value))


def _ffn_multiple(ffn: int, base: int) -> int:
    """The `multiple_of` with which the rule of Meta and Lingua yields this width of the feed-forward layer."""
    whole = [step for step in _MULTIPLES if ffn % step == 0]
    return next((step for step in whole if _round_up(base, step) == ffn), whole[0])


def _ffn_multiplier(ffn: int, base: int) -> float | None:
    """The shortest `ffn_dim_multiplier` that yields it with that multiple; None if none is needed."""
    step = _ffn_multiple(ffn, base)
    if _round_up(base, step) == ffn:
        return None
    exact = (ffn - (step - 1) / 2) / base
    rounded = (round(exact, digits) for digits in range(1, 17))
    return next((one for one in rounded if _round_up(int(one * base), step) == ffn), exact)


def _first(values: object) -> str | None:
    """The first text of a list; None of anything else."""
    rows = cast("list[object]", values) if isinstance(values, list) else []
    return next((one for one in rows if isinstance(one, str)), None)


def _activation(name: str) -> str:
    """The canonical name of an activation of transformers."""
    return next((names[0] for names in _SAME if name in names), name)


def _flax_activation(names: Sequence[str]) -> str:
    """The canonical name of the activation in a list of flax.linen's names: (activation) or (activation, linear).

    Raises:
        UnrepresentableError: the list is of another form, or the name is unknown.
    """
    first, *rest = names
    if rest not in ([], [_LINEAR]) or first not in _FLAX_NAMES:
        raise UnrepresentableError(
            f"no layout for a feed-forward layer with the activations {list(names)}",
            cure=f"supported: one of {', '.join(_FLAX_NAMES)}, alone or followed by {_LINEAR}",
        )
    return _FLAX_NAMES[first]


def _flax_activations(name: str, gated: bool) -> list[str] | None:
    """The list of flax.linen's names for an activation; None if flax.linen has no such function."""
    if name not in _FLAX:
        return None
    return [_FLAX[name], _LINEAR] if gated else [_FLAX[name]]


def _t5_activation(projection: str) -> str:
    """The canonical activation of T5's `feed_forward_proj`: `gated-gelu` means the approximation by tanh."""
    if projection == f"{_GATED}gelu":
        return "gelu_pytorch_tanh"
    return _activation(projection.removeprefix(_GATED))


def _t5_projection(name: str, gated: bool) -> str:
    """T5's `feed_forward_proj` for an activation."""
    if not gated:
        return "gelu_new" if name == "gelu_pytorch_tanh" else name
    return _GATED + {"gelu_pytorch_tanh": "gelu", "gelu": "gelu_python"}.get(name, name)


def _window(sizes: object) -> int:
    """The positions that a query attends to within a window (left, right) of Megatron, itself included; 0 for all."""
    if sizes == 0:
        return 0
    whole = isinstance(sizes, list) and len(cast("list[Any]", sizes)) == 2  # noqa: PLR2004  left and right
    left, right = cast("list[Any]", sizes) if whole else (-1, 0)
    if not isinstance(left, int) or right != 0:
        raise UnrepresentableError(f"unsupported window {sizes!r}: expected positions to the left, and 0")
    return left + 1


def _dense_layers(freq: object) -> int:
    """The layers without experts, the first ones, in Megatron's `moe_layer_freq`: a list of 0 and 1, or 1 for none."""
    rows = cast("list[Any]", freq) if isinstance(freq, list) else []
    if freq != 1 and (not rows or rows != sorted(rows) or not {*rows} <= {0, 1}):
        raise UnrepresentableError(
            f"unsupported moe_layer_freq {freq!r}: expected layers with experts at the end"
        )
    return rows.count(0)


def _count(layers: int, first: int = 0) -> range:
    """The numbers of layers, for a list with one value each; limited, since a config may state a huge number.

    Raises:
        HostileError: there are more layers than any checkpoint has.
    """
    if layers > _MOST_LAYERS:
        raise HostileError(
            f"a config with {layers:,} layers exceeds the limit of {_MOST_LAYERS:,}",
            cure="do not use this checkpoint",
        )
    return range(first, layers + first)


def _freq_of_experts(dense: int, experts: int) -> list[int]:
    """Megatron's `moe_layer_freq` of as many layers without and with experts."""
    return [0] * len(_count(dense)) + [1] * len(_count(experts))


def _rotated_layers(without: int | list[int], layers: int) -> list[int]:
    """Whether each layer turns positions: all except every n-th one (0: all), or except those that a list marks."""
    if isinstance(without, int):
        return [int(not without or number % without != 0) for number in _count(layers, 1)]
    return [1 - int(bool(one)) for one in without]


def _every(numbers: Sequence[int], layers: int, what: str) -> int:
    """The n for which these layers, counted from 0, are every n-th one; 0 if there are none."""
    step = numbers[0] + 1 if numbers else 0
    if list(numbers) != (list(_count(layers)[step - 1 :: step]) if step else []):
        raise UnrepresentableError(
            f"unsupported {what}: layers {[*numbers]} of {layers}, counted from 0; expected every second one, "
            "every third one and so on"
        )
    return step


def _expert_step(with_experts: Sequence[int], layers: int) -> int:
    """The n for which every n-th layer has experts, from the indices of the layers with experts."""
    step = _every(with_experts, layers, "layers with experts")
    if not step or layers % step:
        raise UnrepresentableError(
            f"unsupported layers with experts {[*with_experts]} of {layers}: expected the last one among them"
        )
    return step


def _unrotated_step(rotated: Sequence[int], layers: int) -> int:
    """The n for which every n-th layer turns no positions; 0 if all do. The flag of a layer is 1 if it turns them."""
    if len(rotated) != layers:
        raise UnrepresentableError(f"{len(rotated)} entries say which of {layers} layers turn positions")
    return _every(
        [at for at, one in enumerate(rotated) if not one], layers, "layers without rotary positions"
    )


def _layer_cycle(layers: int, first: int, second: int) -> int:
    """The number of layers after which two periods coincide again, or of all layers; a period of 0 means no period."""
    cycle = math.lcm(max(1, first), max(1, second))
    return layers if layers % cycle else cycle


def _override(overrides: Mapping[str, Mapping[str, Any]], kinds: Sequence[str], kind: str, name: str) -> Any:
    """The value of an attribute that a table of single layers states for all layers of a kind, and for no other."""
    layers = {at for at, one in enumerate(kinds) if one == kind}
    if {int(at) for at in overrides} != layers or len(
        {repr(sorted(one.items())) for one in overrides.values()}
    ) > 1:
        raise UnrepresentableError(
            f"unsupported attributes of single layers {dict(overrides)}: expected the same for all of {kind}"
        )
    return next(iter(overrides.values())).get(name) if overrides else None


def _chunked_layers(rotated: Sequence[int]) -> list[str]:
    """The attention of each layer of Llama 4: within chunks in the layers that turn positions."""
    return [_CHUNKED if one else _FULL for one in rotated]


def _window_layers(layers: int, period: int, other: str = _SLIDING) -> list[str]:
    """The attention of each layer: every layer whose number is a multiple of the period attends to all positions."""
    return [other if number % period else _FULL for number in _count(layers, 1)]


def _dense_first(layers: int, dense: int) -> list[str]:
    """The feed-forward layer of each layer: dense in the first ones, experts in the others."""
    return ["dense" if number < dense else "sparse" for number in _count(layers)]


def _windowed_from(layers: int, first: int) -> list[str]:
    """The attention of each layer: those from this index attend within the window."""
    return [_SLIDING if number >= first else _FULL for number in _count(layers)]


def _entries(values: Sequence[Any]) -> int:
    """The number of entries of a list."""
    return len(values) if isinstance(values, list) else 0


def _rope(table: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The scaling of rotary positions in one spelling, with the defaults of transformers stated.

    Args:
        table: `rope_scaling` or `rope_parameters` of a config; empty if there is none.
        longest: the longest sequence, which is the default of some attributes.

    Returns:
        `rope_type` and the attributes that it uses; those that change nothing are left out.
    """
    kind = table.get("rope_type") or table.get("type") or "default"
    given = {name: value for name, value in table.items() if name not in ("rope_type", "type", "rope_theta")}
    if kind == "default" or (kind in ("linear", "yarn") and given.get("factor") == 1):
        return {"rope_type": "default"}
    part = (
        {}
        if given.get("partial_rotary_factor", 1.0) == 1
        else {"partial_rotary_factor": given["partial_rotary_factor"]}
    )
    rest = _SCALING_RULES.get(kind, lambda one, _longest: dict(one))(given, longest)
    return {"rope_type": kind, **rest, **part}


def _linear(given: Mapping[str, Any], longest: int) -> dict[str, Any]:
    del longest
    return {"factor": given.get("factor")}


def _dynamic(given: Mapping[str, Any], longest: int) -> dict[str, Any]:
    return {"factor": given.get("factor"), "max_position_embeddings": longest}


def _llama3(given: Mapping[str, Any], longest: int) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    original = given.get("original_max_position_embeddings", longest)
    return {**{name: given.get(name) for name in names}, "original_max_position_embeddings": original}


def _yarn(given: Mapping[str, Any], longest: int) -> dict[str, Any]:
    original = given.get("original_max_position_embeddings", longest)
    factor = given.get("factor") or longest / original
    both = given.get("mscale_all_dim") or 0
    scaled = given.get("attention_factor")
    if scaled is None:
        one = given.get("mscale") or 0
        scaled = _mscale(factor, one) / _mscale(factor, both) if one and both else _mscale(factor)
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": given.get("beta_fast") or 32,
        "beta_slow": given.get("beta_slow") or 1,
        "truncate": given.get("truncate", True),
        "attention_factor": scaled,
        "mscale_all_dim": both,
    }


def _mscale(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of the attention for a factor of the positions."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(given: Mapping[str, Any], longest: int) -> dict[str, Any]:
    original = given.get("original_max_position_embeddings", longest)
    return {**given, "original_max_position_embeddings": original, "max_position_embeddings": longest}


_SCALING_RULES: Mapping[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "activation": _activation,
    "bfloat16": _bfloat16,
    "chunked": _chunked_layers,
    "dense_layers": _dense_layers,
    "entries": _entries,
    "expert_step": _expert_step,
    "ffn_multiple": _ffn_multiple,
    "ffn_multiplier": _ffn_multiplier,
    "first": _first,
    "flax_activation": _flax_activation,
    "flax_activations": _flax_activations,
    "freq_of_experts": _freq_of_experts,
    "int": int,
    "layer_cycle": _layer_cycle,
    "max": max,
    "min": min,
    "override": _override,
    "rope": _rope,
    "rotated_layers": _rotated_layers,
    "round_up": _round_up,
    "sqrt": math.sqrt,
    "starts": str.startswith,
    "unrotated_step": _unrotated_step,
    "t5_activation": _t5_activation,
    "t5_projection": _t5_projection,
    "window": _window,
    "windowed": _window_layers,
    "dense_first": _dense_first,
    "windowed_from": _windowed_from,
    "yarn_mscale": _mscale,
}
