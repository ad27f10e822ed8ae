"""How a cure is shown: with the checkpoint that it is about, and to a caller in Python in the words of Python.

Cures are written in the words of the command line, each command in backquotes. A caller in Python reads `--only params`
as `only="params"`, and `wherry verify URI --level digest` as `wherry.verify(URI, level="digest")`. An option has the
name of its keyword argument unless a table below says otherwise; `tests/cli/test_cures.py` compares the tables with the
options of the requests and the signatures of the functions. A command that the library has not stays a command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

# The commands that are functions of `wherry` with the same arguments.
CALLS = frozenset(
    ("audit", "convert", "detect", "diff", "discover", "fetch", "inspect", "plan", "register", "rewrite", "verify")
)  # fmt: skip
# Options of those commands that the functions do not have.
COMMANDS_ONLY = frozenset(
    ("--dry-run", "--help", "--json", "--on", "--pickles", "--quiet", "--tree", "--unit")
)
KEYWORDS = {
    "as": "as_",
    "no-lineage": "lineage",
    "set": "options",
    "tag": "tags",
}
FLAGS = frozenset(
    (
        "allow-overflow", "deep", "digest", "go", "in-place", "into", "no-lineage", "record", "retry-failed", "sha256",
        "stats", "write",
    )
)  # fmt: skip
LISTS = frozenset(("allow-opaque", "ignore", "rename"))
TABLES = frozenset(("meta", "set", "tag"))

# A word after an option that goes on with the sentence: in `pass --dtype to cast it`, the option has no value.
_GOES_ON = "and|for|from|if|in|instead|or|that|to|when|which|with"
_VALUE = r"'[^']*'|[^\s'`;]*[^\s'`;,.:)]"
_OPTION = rf"(?<![\w-])--([a-z][a-z-]*[a-z])(?![\w-])(?: (?!(?:{_GOES_ON})\b|--)({_VALUE}))?"
_COMMAND = r"`wherry ([a-z-]+)((?: [^`]*)?)`"
# A command that reads a checkpoint and does not name it yet.
_UNNAMED = r"`wherry (inspect|verify|detect|discover)(?! --help)((?: --[a-z-]+(?: [a-z]+)?)*)`"


def about(cure: str, uri: str | None) -> str:
    """The cure with the checkpoint in question in each command that needs one, so that it can be pasted."""
    if uri is None or uri.startswith("live:"):
        return cure
    return re.sub(_UNNAMED, lambda found: f"`wherry {found[1]} {shlex.quote(uri)}{found[2]}`", cure)


def about_job(cure: str, job: str) -> str:
    """The cure with the job in question in each command that works on one."""
    return re.sub(r"`wherry (work|commit)`", lambda found: f"`wherry {found[1]} {shlex.quote(job)}`", cure)


def in_python(cure: str) -> str:
    """The cure with calls and keyword arguments in the place of commands and options."""
    return "".join(map(_translate, re.split(r"(`(?:[a-z]|--[a-z])[^`]*`)", cure)))


def _translate(part: str) -> str:
    """A sentence or what stands in backquotes: options, or a command, of wherry or of another program."""
    if part.startswith("`--"):
        words = _words(part[1:-1])
        return part if words is None else f"`{', '.join(_arguments(words))}`"
    if part.startswith("`"):
        return re.sub(_COMMAND, _call, part)
    return re.sub(r"\} options=\{", ", ", re.sub(_OPTION, _argument, part))  # --set A=1 --set B=2


def _argument(found: re.Match[str]) -> str:
    """One option in a sentence, as a keyword argument."""
    name, value = found[1], found[2]
    if name in FLAGS:  # the word after it goes on with the sentence
        return _keyword(name, None) + (f" {value}" if value else "")
    return _keyword(name, value and value.strip("'"))


def _keyword(name: str, *values: str | None) -> str:
    """One keyword argument; of an option that is repeated, with all its values."""
    keyword = KEYWORDS.get(name, name.replace("-", "_"))
    stated = [value for value in values if value is not None]
    if name in FLAGS:
        return f"{keyword}={not name.startswith('no-')}"
    if not stated:
        return f"{keyword}=…"
    if name in TABLES:
        pairs = [value.partition("=") for value in stated]
        rows = [f"{_literal(key)}: {_literal(one or '…')}" for key, _, one in pairs]
        return f"{keyword}={{{', '.join(rows)}}}"
    if name in LISTS:
        split = [one for value in stated for one in (value.split(",") if name == "ignore" else [value])]
        return f"{keyword}=[{', '.join(map(_literal, split))}]"
    return f"{keyword}={_literal(stated[-1])}"


def _literal(value: str) -> str:
    """A word as Python has it; a placeholder, such as FILE or …, stays one."""
    if re.fullmatch(r"[A-Z]+|…|\d+", value):
        return value
    return repr(value) if '"' in value or "\\" in value else f'"{value}"'


def _call(found: re.Match[str]) -> str:
    """One command as a call; as it is if the library has no such function."""
    verb, rest = found[1], found[2]
    if verb not in CALLS:
        return found[0]
    words = _words(rest)
    if words is None or COMMANDS_ONLY.intersection(words):
        return found[0]
    if not words:
        return f"`wherry.{verb}(…)`"
    return f"`wherry.{verb}({', '.join(_arguments(words))})`"


def _words(line: str) -> list[str] | None:
    """The words of a command line; None if its quotes are not closed."""
    try:
        return shlex.split(line)
    except ValueError:
        return None


def _arguments(words: Sequence[str]) -> Iterator[str]:
    """The arguments of a call: those without a name first, as Python wants them."""
    options: dict[str, list[str | None]] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            yield _literal(word)
            continue
        name = word[2:]
        options.setdefault(name, []).append(None if name in FLAGS else next(rest, None))
    yield from (_keyword(name, *values) for name, values in options.items())
