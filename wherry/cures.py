"""What to do about an error, as data: a sentence, and the options and commands in it.

A `Cure` is the text in the words of the command line, `--only params`, each command in backquotes. A caller in Python
reads `only="params"`, and `wherry verify URI --level digest` as `wherry.verify(URI, level="digest")`. An option has the
name of its keyword argument unless a table below says otherwise; `tests/cli/test_cures.py` compares the tables with the
options of the requests and the signatures of the functions. A command that the library has not stays a command.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import LiteralString, Self

# The commands that are functions of `wherry` with the same arguments.
CALLS = frozenset(
    ("audit", "convert", "detect", "diff", "discover", "fetch", "inspect", "plan", "register", "rewrite", "verify")
)  # fmt: skip
# Arguments of those commands that the functions do not have.
COMMANDS_ONLY = frozenset(("dry-run", "help", "json", "on", "pickles", "quiet", "tree", "unit"))
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
# Commands on one checkpoint or job, which the one in question is put into if they name none.
_ON_A_CHECKPOINT = ("inspect", "verify", "detect", "discover")
_ON_A_JOB = ("work", "commit")


class Blank(str):
    """A word that the reader replaces: `FILE`, `scan=…`. It is never quoted; of a table, the value is blank."""

    __slots__ = ()


@dataclass(frozen=True)
class Phrase:
    """What another process has stated as JSON: a cure in the words of a shell, and in those of Python."""

    shell: str
    python: str

    def __str__(self) -> str:
        """The cure as a text for the command line."""
        return self.shell

    def in_python(self) -> str:
        """The cure as a text for Python."""
        return self.python


@dataclass(frozen=True)
class Argument:
    """An option: `--dtype bfloat16` or `dtype="bfloat16"`, `--set join=.` or `options={"join": "."}`.

    Attributes:
        name: its name on the command line.
        value: its value; several if commas separate them, and none of a flag or where the option is only mentioned.
    """

    name: str
    value: str | int | tuple[str, ...] | None = None

    def __str__(self) -> str:
        """The option on the command line, quoted for a shell."""
        if self.value is None:
            return f"--{self.name}"
        value = ",".join(self.value) if isinstance(self.value, tuple) else self.value
        return " ".join([f"--{self.name}", value if isinstance(value, Blank) else shlex.quote(str(value))])

    def in_python(self) -> str:
        """The option as a keyword argument."""
        return _keywords([self])


@dataclass(frozen=True, init=False)
class Arguments:
    """Several options that are given together: `--to orbax --family none` or `to="orbax", family="none"`."""

    arguments: tuple[Argument, ...]

    def __init__(self, *arguments: Argument) -> None:
        object.__setattr__(self, "arguments", arguments)

    def __str__(self) -> str:
        """The options on the command line."""
        return " ".join(map(str, self.arguments))

    def in_python(self) -> str:
        """The options as keyword arguments."""
        return _keywords(self.arguments)


@dataclass(frozen=True, init=False)
class Command:
    """A command of wherry, in backquotes: `wherry verify URI --level digest` or `wherry.verify(URI, level="digest")`.

    Attributes:
        verb: its name; of a command in a group, both names.
        words: its arguments and options, in the order of the command line.
    """

    verb: str
    words: tuple[str | Argument, ...]

    def __init__(self, verb: str, *words: str | Argument) -> None:
        object.__setattr__(self, "verb", verb)
        object.__setattr__(self, "words", words)

    def __str__(self) -> str:
        """The command, quoted for a shell."""
        words = (
            str(word) if isinstance(word, Argument | Blank) else shlex.quote(word) for word in self.words
        )
        return f"`{' '.join(['wherry', *self.verb.split(), *words])}`"

    def in_python(self) -> str:
        """The call of the library; the command if the library has no such function."""
        options = [word for word in self.words if isinstance(word, Argument)]
        if self.verb not in CALLS or any(option.name in COMMANDS_ONLY for option in options):
            return str(self)
        arguments = [_literal(word) for word in self.words if isinstance(word, str)] or ["…"]
        return f"`wherry.{self.verb}({', '.join([*arguments, *filter(None, [_keywords(options)])])})`"

    def about(self, checkpoint: str | None, job: str | None) -> Command:
        """The command with the checkpoint or the job in question, if it is on one and names none."""
        place = checkpoint if self.verb in _ON_A_CHECKPOINT else job if self.verb in _ON_A_JOB else None
        if (
            place is None
            or Argument("help") in self.words
            or any(isinstance(word, str) for word in self.words)
        ):
            return self
        return Command(self.verb, place, *self.words)


def program(*words: str) -> str:
    """A command of another program, in backquotes and quoted for a shell; to a caller in Python it is the same."""
    return f"`{shlex.join(words)}`"


Part = str | int | Argument | Arguments | Command | Phrase


class Cure(str):  # noqa: SLOT000  a str has no room for slots
    """What to do: its text is in the words of the command line, and `in_python` has it in those of Python.

    Attributes:
        sentence: the text, with `{}` in the place of each part.
        parts: the options, commands, other cures and words from elsewhere that it names.
    """

    sentence: LiteralString
    parts: tuple[Part, ...]

    def __new__(cls, sentence: LiteralString, *parts: Part) -> Self:
        """A cure.

        Args:
            sentence: the text, with `{}` in the place of each part.
            parts: what it names.
        """
        self = super().__new__(cls, sentence.format(*map(str, parts)))
        self.sentence, self.parts = sentence, parts
        return self

    def __getnewargs__(self) -> tuple[LiteralString | Part, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `pickle`: what the cure was made of."""
        return (self.sentence, *self.parts)

    def in_python(self) -> str:
        """The cure with calls and keyword arguments in the place of commands and options."""
        return self.sentence.format(*map(in_python, self.parts))

    def about(self, checkpoint: str | None = None, job: str | None = None) -> Cure:
        """The cure with the checkpoint or job in question in each command that names none, so that it can be pasted."""
        place = None if checkpoint is None or checkpoint.startswith("live:") else checkpoint
        parts = (one.about(place, job) if isinstance(one, Command | Cure) else one for one in self.parts)
        return Cure(self.sentence, *parts)


def either(parts: Iterable[Part], between: LiteralString = " or ") -> Cure:
    """A cure of several, of which the reader chooses one.

    Args:
        parts: the choices.
        between: what stands between two.
    """
    choices = tuple(parts)
    places: list[LiteralString] = ["{}"] * len(choices)
    return Cure(between.join(places), *choices)


def in_python(part: Part) -> str:
    """A cure or a part of one in the words of Python; a text without data stays as it is."""
    return part.in_python() if isinstance(part, Cure | Argument | Arguments | Command | Phrase) else str(part)


def _literal(value: str | int) -> str:
    """A value as Python has it."""
    if isinstance(value, Blank | int):
        return str(value)
    return f'"{value}"' if value.isprintable() and not {'"', "\\"} & set(value) else repr(value)


def _keywords(options: Iterable[Argument]) -> str:
    """Arguments as keyword arguments; one that is repeated has all its values."""
    values: dict[str, list[str | int]] = {}
    for option in options:
        stated = option.value if isinstance(option.value, tuple) else (option.value,)
        values.setdefault(option.name, []).extend(value for value in stated if value is not None)
    return ", ".join(
        f"{KEYWORDS.get(name, name.replace('-', '_'))}={_value(name, values[name])}" for name in values
    )


def _value(name: str, values: list[str | int]) -> str:
    """The value of a keyword argument."""
    if name in FLAGS:
        return str(not name.startswith("no-"))
    if not values:
        return "…"
    if name in TABLES:
        return f"{{{', '.join(_row(name, str(value), blank=isinstance(value, Blank)) for value in values)}}}"
    if name in LISTS:
        return f"[{', '.join(map(_literal, values))}]"
    return _literal(values[-1])


def _row(table: str, row: str, *, blank: bool) -> str:
    """`join=.` as a row of a dict; options of a format can be numbers."""
    key, _, value = row.partition("=")
    number = value.isascii() and value.isdecimal() and (value == "0" or not value.startswith("0"))
    bare = blank or not value or (table == "set" and number)
    return f"{_literal(key)}: {(value or '…') if bare else _literal(value)}"
