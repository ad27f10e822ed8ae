"""Arithmetic expressions over a config's attributes, for the sizes, scales and facts of family files.

An expression is text such as `(head_dim or hidden_size / num_attention_heads) / 2`. It may contain only names,
attributes of tables, numbers, text, lists, tables, arithmetic, comparisons and the functions of
`wherry.layout.functions`, so a family file cannot run code. A name that is missing from the config is None; arithmetic
with None is None; `a or b` is the first that is not None.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from wherry.errors import UnrepresentableError, UsageError, WherryError
from wherry.layout.functions import FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
