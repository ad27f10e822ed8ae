"""The texts of the code that have a command or an option, and the commands in them."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.support.house import MODULES, label
from wherry import cures

COMMAND = re.compile(r"`wherry ([^`]+)`")
OPTION = re.compile(r"(?<![\w-])--[a-z]")


def without_docstrings(tree):
    """The strings of a module; of an f-string its whole text."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    heads = {id(node.body[0].value) for node in ast.walk(tree)
             if isinstance(node, kinds) and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in heads | parts:
            yield node.value


@cache
def texts():
    """The strings of the code that are sentences with a command or an option, each with its module."""
    modules = [
        path for path in MODULES if path.name not in ("cures.py", "installation.py")
    ]  # which has pip's and uv's
    sources = [(path, path.read_text()) for path in modules]
    found = [
        (path, text)
        for path, source in sources
        if "`wherry " in source or OPTION.search(source)  # parsing all would take a tenth of the collection
        for text in without_docstrings(ast.parse(source))
    ]
    return [
        (path, text) for path, text in found if COMMAND.search(text) or (" " in text and OPTION.search(text))
    ]


def named(row):
    return f"{label(row[0])}: {row[1][:60]}"


COMMANDS = sorted({found for _path, text in texts() for found in COMMAND.findall(cures.about(text, "/ckpt"))})
