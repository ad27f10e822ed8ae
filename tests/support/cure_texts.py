"""The cures of the code, read off it without running it; and its other texts with a command or an option."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.house import MODULES, label
from wherry import cures
from wherry.cures import Argument, Arguments, Command, Cure

COMMAND = re.compile(r"`wherry ([^`]+)`")
OPTION = re.compile(r"(?<![\w-])--[a-z]")
_NOUNS = {
    name: getattr(cures, name) for name in ("Argument", "Arguments", "Blank", "Command", "Cure", "program")
}


def stated(node: ast.expr, known: Mapping[str, ast.expr], filled: str = "1") -> Any:  # noqa: PLR0911  a case each
    """The value of an expression, as far as it stands in the code.

    Args:
        node: the expression.
        known: the names of the module, with their values.
        filled: what stands for everything that is known only when the program runs.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in known:
            return stated(known[node.id], {}, filled)
        case ast.Tuple():
            return tuple(stated(one, known, filled) for one in node.elts)
        case ast.JoinedStr():
            return type(filled)("".join(str(stated(one, known, filled)) for one in node.values))
        case ast.FormattedValue():
            return stated(node.value, known, filled)
        case ast.Call(func=ast.Name(id=noun)) if noun in _NOUNS:
            words = [one.value.elt if _is_each(one) else one for one in node.args]
            return _NOUNS[noun](
                *(stated(one, known, filled) for one in words if not isinstance(one, ast.Starred))
            )
    return filled


def _is_each(node: ast.expr) -> bool:
    """Whether it is `*(… for … in …)`."""
    return isinstance(node, ast.Starred) and isinstance(node.value, ast.GeneratorExp)


def assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """The names that a module assigns, with their values."""
    return {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _roles(tree: ast.Module) -> dict[int, str]:
    """What each expression is given as: the name of a keyword argument or variable, or `what` of an error."""
    roles: dict[int, str] = {}
    for node in ast.walk(tree):
        given: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Call):
            given = [(one.arg, one.value) for one in node.keywords if one.arg]
            if ast.unparse(node.func).endswith("Error"):
                given += [("what", one) for one in node.args[:1]]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            given = [(node.targets[0].id, node.value)]
        roles |= {id(one): name for name, value in given for one in ast.walk(value)}
    return roles


def _strings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The strings of a module that are no docstring, an f-string as a whole, each with its role."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    skipped = {id(node.body[0].value) for node in ast.walk(tree)
               if isinstance(node, kinds) and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    skipped |= {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    roles = _roles(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in skipped:
            text = stated(node, {})
            if isinstance(text, str):
                yield text, roles.get(id(node), "")


@cache
def _read() -> tuple[list[tuple[Path, Any]], list[tuple[Path, str, str]]]:
    found: list[tuple[Path, Any]] = []
    texts: list[tuple[Path, str, str]] = []
    for path in MODULES:
        if path.name in ("cures.py", "installation.py"):  # which has pip's and uv's
            continue
        source = path.read_text()
        if "wherry.cures" not in source and "`wherry " not in source and not OPTION.search(source):
            continue  # parsing all would take a tenth of the collection
        tree = ast.parse(source)
        known = assigned(tree)
        found += [
            (path, stated(node, known))
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NOUNS
        ]
        texts += [
            (path, text, role) for text, role in _strings(tree) if COMMAND.search(text) or OPTION.search(text)
        ]
    return found, texts


def stated_cures() -> list[tuple[Path, Cure]]:
    """The cures of the code with an option or a command, each with its module."""
    return [(path, cure) for path, cure in stated_each(Cure) if cure.parts]


def stated_each(noun: type[Any]) -> list[tuple[Path, Any]]:
    """Each call of a noun in the code, also outside of a cure that it becomes a part of, with its module."""
    return [(path, one) for path, one in _read()[0] if isinstance(one, noun)]


def texts() -> list[tuple[Path, str, str]]:
    """The strings of the code that have a command or an option, each with its module and what it is given as."""
    return _read()[1]


def spliced() -> list[str]:
    """Texts that are given as a cure and have another cure in them, whose parts would be lost."""
    found: list[str] = []
    for path in MODULES:
        source = path.read_text()
        tree = ast.parse(source if ".cure}" in source else "")
        roles = _roles(tree)
        found += [
            f"{label(path)}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            and "cure" in roles.get(id(node), "")
            and ".cure}" in ast.unparse(node)
        ]
    return found


def parts_of(cure: Cure, kind: type[Any]) -> Iterator[Any]:
    """The parts of a kind in a cure; of options that are given together each, and not those of commands."""
    for part in cure.parts:
        if isinstance(part, kind):
            yield part
        if isinstance(part, Cure):
            yield from parts_of(part, kind)
        elif isinstance(part, Arguments) and kind is Argument:
            yield from part.arguments


def named(row: tuple[Any, ...]) -> str:
    """The module and the text of a row, for the id of its test."""
    return f"{label(row[0])}: {str(row[1])[:60]}"


COMMANDS = sorted(
    {found for _path, text, _role in texts() for found in COMMAND.findall(text)}
    | {
        str(command.about("/ckpt", "/job")).removeprefix("`wherry ").removesuffix("`")
        for _path, command in stated_each(Command)
        if command.verb != "1"  # any verb
    }
)
