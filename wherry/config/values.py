"""Small values as people write them in `wherry.toml`: durations, which checkpoints, and templates of names.

    min_age = "15m"                          seconds, or a number with s, m, h, d or w
    select = "best(eval/accuracy, max)"      latest · best(METRIC[, min|max]) · every N · all · since DATE
    uri = "gs://out/{run}/{step|final}/{format}"

A template names its fields in braces; what follows a bar is taken where the field is unknown. Unknown words are errors.

What the routes of `wherry.toml` state, field by field, each with the place that it comes from.

Only what is stated: the defaults of a route are the same for all, and `infra/wherry.toml` shows them. A list that an
environment states takes the place of the file's, so a field comes from the environment where that states it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from wherry.config.lines import line_of, printed
from wherry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.config.lines import Path


Choice = Literal["latest", "best", "every", "all", "since"]
FIELDS = ("run", "step", "format", "name", "route", "family", "kind")
_BEST = re.compile(r"best\(\s*([^,()]+?)\s*(?:,\s*(min|max)\s*)?\)")
_EVERY = re.compile(r"every\s+(\d+)")
_SINCE = re.compile(r"since\s+(\S+)")
_FIELD = re.compile(r"\{(\w*)(?:\|([^{}]*))?\}")


@dataclass(frozen=True, slots=True)
class Select:
    """Which checkpoints of each run are meant.

    Attributes:
        choice: `latest` newest complete step, `best` by a metric, `every` steps that N divides, `all`, or `since`
            a moment.
        metric: for `best`.
        highest: for `best`: whether more is better.
        steps: for `every`: N.
        since: for `since`: UTC.
    """

    choice: Choice
    metric: str = ""
    highest: bool = False
    steps: int = 1
    since: datetime | None = None


def select(text: str) -> Select:
    """Read which checkpoints are meant.

    Raises:
        UsageError: it is none of the forms.
    """
    words = text.strip()
    if words == "latest":
        return Select("latest")
    if words == "all":
        return Select("all")
    if found := _BEST.fullmatch(words):
        return Select("best", metric=found.group(1), highest=found.group(2) == "max")
    if (found := _EVERY.fullmatch(words)) and int(found.group(1)) > 0:
        return Select("every", steps=int(found.group(1)))
    if found := _SINCE.fullmatch(words):
        return Select("since", since=moment(found.group(1)))
    raise UsageError(
        f"not a selection: {text!r}",
        cure="write latest, best(METRIC), best(METRIC, max), every N, all or since DATE",
    )


def moment(text: str) -> datetime:
    """A date or time of ISO 8601; UTC where it states no offset.

    Raises:
        UsageError: it is none.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"not a date: {text!r}", cure="write for example 2026-11-01 or 2026-11-01T02:30+01:00"
        ) from None
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


def require_template(text: str) -> str:
    """The template itself.

    Raises:
        UsageError: a field that nobody knows, or a brace that ends nothing.
    """
    for name in placeholders(text):
        if name not in FIELDS:
            raise UsageError(
                f"unknown field {{{name}}} in {text!r}",
                cure=f"choose among {', '.join(f'{{{field}}}' for field in FIELDS)}",
            )
    if set("{}") & set(_FIELD.sub("", text)):
        raise UsageError(f"a brace without its partner in {text!r}", cure="write fields as {run}")
    return text


def placeholders(text: str) -> list[str]:
    """The fields that a template names."""
    return [found.group(1) for found in _FIELD.finditer(text)]


def render(template: str, values: Mapping[str, str | None]) -> str:
    """Fill a template.

    Raises:
        UsageError: a field that is not known here and has no text after a bar.
    """

    def fill(found: re.Match[str]) -> str:
        name, otherwise = found.groups()
        value = values.get(name)
        if value is None and otherwise is None:
            raise UsageError(
                f"{{{name}}} is not known of this checkpoint, and {template!r} asks for it",
                cure=f"write {{{name}|TEXT}} with what shall stand there instead",
            )
        return otherwise if value is None else value

    return _FIELD.sub(fill, template)


_TOP = "routes"
_DEPTH = 2  # parts of the path of one route
_OURS = "name"  # which the loader gives each route; the file has it as the name of the table


class FieldStatement(NamedTuple):
    """A field that a route states.

    Attributes:
        at: its path from the top, as `("routes", "t5x", "targets", 0, "format")`.
        value: what holds, paths made absolute.
        section: the table of the environment that states it; empty where the file itself does.
    """

    at: Path
    value: Any
    section: Path = ()

    @property
    def name(self) -> str:
        """As it is printed: `routes.t5x.targets[0].format`."""
        return printed(self.at)


def stated(data: Mapping[str, Any], over: Mapping[str, Any], section: Path) -> tuple[FieldStatement, ...]:
    """The fields that routes state, in the order of the file.

    Args:
        data: the contents, those of the environment laid over them.
        over: those of the environment alone.
        section: its table, as `("env", "prod")`.
    """
    fields = _fields(data.get(_TOP, {}), (_TOP,))
    return tuple(FieldStatement(at, value, section if _has(over, at) else ()) for at, value in fields)


def origin(field: FieldStatement, text: str, file: str | None) -> str:
    """Where a field comes from: file, line and the environment's table.

    Args:
        field: one of `stated`.
        text: the contents of the file.
        file: its path.
    """
    line, short = None, (*field.section, *field.at)
    while line is None and len(short) > len(field.section):
        line, short = (
            line_of(text, short),
            short[:-1],
        )  # a key of an inline table stands on the line of the table
    section = f" [{printed(field.section)}]" if field.section else ""
    return f"{file}:{line}{section}" if line else f"{file}{section}"


def _fields(value: Any, at: Path) -> Iterator[tuple[Path, Any]]:
    """Every value that is no table, and no list of tables."""
    if isinstance(value, dict):
        for key, below in value.items():
            if len(at) != _DEPTH or key != _OURS:
                yield from _fields(below, (*at, key))
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for number, below in enumerate(value):
            yield from _fields(below, (*at, number))
    else:
        yield at, value


def _has(data: Any, at: Path) -> bool:
    """Whether something is stated at a path."""
    if not at:
        return True
    held: Any = dict(enumerate(data)) if isinstance(data, list) else data
    return isinstance(held, dict) and at[0] in held and _has(held[at[0]], at[1:])
