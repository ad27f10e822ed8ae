"""Every name in a printed command is quoted, so that the command does only what it says when it is pasted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Names that wherry itself makes: of formats and variables, digests, file names of bundles, and quoted before.
QUOTES = {"quote", "join", "extra_command", "package_command", "promote_command"}
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


# The same, where only one file has them under such a name.
_SAFE_IN = {
    "integrations/mlflow_version.py": {"to"},  # quoted before
    "wherry/cli/errors.py": {"option"},  # of click
    "wherry/console/formats.py": {"name", "option.default"},
    "wherry/core/units.py": {"text"},  # a decimal number
    "wherry/families/bind.py": {"differing[0]"},  # facts, and their values, which families declare
    "wherry/families/config_written.py": {"name"},
    "wherry/families/fact_checks.py": {"fact"},
    "wherry/families/facts.py": {"name", "choice"},
    "wherry/formats/detect.py": {"winners[0]"},  # a format
    "wherry/installation.py": {"name"},  # quoted before
    "wherry/mover/source.py": {"-(-_SHARE * (held or chunk) // _MIB)"},
    "wherry/view/system.py": {"name"},  # a fact
}
# What stands before a name that is pasted: a command or an option in backquotes, an option in a sentence, and the start
# of a command or a variable in a sentence.
_COMMAND = re.compile(r"(?:^|[^`])`(?:[a-z][a-z-]* |--)[^`]*$")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]* (?:'?[\w.-]+=)?$")
_SENTENCE = re.compile(r"(?:\brm (?:-r )?'?|\bexport [A-Z_]*=?|\bcreate |\b[A-Z]+_[A-Z_]+=)$")


def _is_quoted(value):
    if isinstance(value, ast.IfExp):
        return _is_quoted(value.body) and _is_quoted(value.orelse)
    if isinstance(value, ast.Name) and value.id.isupper():
        return True  # a constant
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute | ast.Name)
        and getattr(value.func, "attr", getattr(value.func, "id", "")) in QUOTES
    )


def _unquoted(text):
    """The expressions of an f-string that stand where a user copies them from, into a shell."""
    before = ""
    for part in text.values:
        if isinstance(part, ast.Constant):
            before += str(part.value)
            continue
        pasted = any(pattern.search(before) for pattern in (_COMMAND, _OPTION, _SENTENCE))
        if pasted and not _is_quoted(part.value) and ast.unparse(part.value) not in _SAFE:
            yield ast.unparse(part.value)
        before += "x"


def test_names_in_printed_commands_are_quoted():
    found = []
    for top in ("wherry", "integrations", "tasks", "flows"):
        for file in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    place = file.relative_to(ROOT).as_posix()
                    bare = set(_unquoted(node)) - _SAFE_IN.get(place, set())
                    found += [f"{place}:{node.lineno}: {name}" for name in bare]
    assert not found, found
