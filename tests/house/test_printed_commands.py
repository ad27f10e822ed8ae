"""Every name in a printed command is quoted, so that the command does only what it says when it is pasted."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Names that wherry itself makes: of formats and variables, digests, file names of bundles, and quoted before.
_SAFE = {
    "row.name",
    "formats[0]",
    "short(digest)",
    "_VARIABLE",
    "nbytes",
    "where",
    "found[1]",
    "found[2]",
}


def _is_quoted(value):
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in {"quote", "join"}
    )


def _unquoted(text):
    """The expressions of an f-string that stand between backquotes in a command of wherry."""
    before = ""
    for part in text.values:
        if isinstance(part, ast.Constant):
            before += str(part.value)
        elif (
            before.count("`") % 2
            and before.rpartition("`")[2].startswith("wherry ")
            and not _is_quoted(part.value)
            and ast.unparse(part.value) not in _SAFE
        ):
            yield ast.unparse(part.value)


def test_names_in_printed_commands_are_quoted():
    found = []
    for top in ("wherry", "integrations", "tasks", "flows"):
        for file in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found += [f"{file.relative_to(ROOT)}:{node.lineno}: {name}" for name in _unquoted(node)]
    assert not found, found
