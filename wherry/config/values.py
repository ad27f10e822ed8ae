"""Values of `wherry.toml`: selections of checkpoints, dates, templates of names, and the fields that routes state.

    min_age = "15m"                          seconds, or a number with s, m, h, d or w
    select = "best(eval/accuracy, max)"      latest · best(METRIC[, min|max]) · every N · all · since DATE
    uri = "gs://out/{run}/{step|final}/{format}"

A template names its fields in braces; the text after a bar is used where the field is unknown. An unknown field name is
an error.

`stated_fields` lists the fields that routes state, each with its origin. Defaults are left out: they are the same for
all routes, and `infra/wherry.toml` shows them. A list in an environment replaces the file's, so the origin of such a
field is the environment.

`lines_of` finds the lines of fields, for errors: the standard parser does not return them. The file has been parsed
before, so headers and keys are well-formed. Only in multi-line strings may a line look like a key; they are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import UsageError, choose

Choice = Literal["latest", "best", "every", "all", "since"]
FIELDS = ("run", "step", "format", "name", "route", "family", "kind")
_BEST = re.compile(r"best\(\s*([^,()]+?)\s*(?:,\s*(min|max)\s*)?\)")
_EVERY = re.compile(r"every\s+([0-9]{1,18})")
_SINCE = re.compile(r"since\s+(\S+)")
_FIELD = re.compile(r"\{(\w*)(?:\|([^{}]*))?\}")
# Possessive: a line of thousands of spaces would be tried in every division.
_HEADER = re.compile(r"\s*+(\[\[?+)([^\]]++)\]\]?+\s*+(?:#.*)?")
_KEY = re.compile(
    r"\s*+((?:[\w-]++|\"[^\"]*+\"|'[^']*+')(?:\s*+\.\s*+(?:[\w-]++|\"[^\"]*+\"|'[^']*+'))*+)\s*+="
)
_PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")
_FENCES = ('"""', "'''")

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Select:
    """Which checkpoints of each run are selected.

    Attributes:
        choice: `latest` (newest complete step), `best` by a metric, `every` (steps divisible by N), `all`, or `since`
            a date.
        metric: for `best`: its name.
        highest: for `best`: whether higher is better.
        steps: for `every`: N.
        since: for `since`: the date in UTC.
    """

    choice: Choice
    metric: str = ""
    highest: bool = False
    steps: int = 1
    since: datetime | None = None


def select(text: str) -> Select:
    """Parse a selection.

    Raises:
        UsageError: it has none of the forms.
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
        f"invalid selection {text!r}",
        cure="write latest, best(METRIC), best(METRIC, max), every N, all or since DATE",
    )


def moment(text: str) -> datetime:
    """Parse an ISO 8601 date or time; UTC where it states no offset.

    Raises:
        UsageError: it is not a date.
    """
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # the latter: its offset leads out of the years 1 to 9999
        raise UsageError(
            f"invalid date {text!r}", cure="write for example 2026-11-01 or 2026-11-01T02:30+01:00"
        ) from None


def require_template(text: str) -> str:
    """Return the template if it is valid.

    Raises:
        UsageError: a field is unknown, or a brace unmatched.
    """
    for name in placeholders(text):
        if name not in FIELDS:
            raise UsageError(
                f"unknown field {{{name}}} in {text!r}",
                cure=choose(f"{{{name}}}", [f"{{{field}}}" for field in FIELDS]),
            )
    if set("{}") & set(_FIELD.sub("", text)):
        raise UsageError(f"unmatched brace in {text!r}", cure="write fields as {run}")
    return text


def placeholders(text: str) -> list[str]:
    """The fields that a template names."""
    return [found.group(1) for found in _FIELD.finditer(text)]


def render(template: str, values: Mapping[str, str | None]) -> str:
    """Fill a template.

    Raises:
        UsageError: a field has no value and no text after a bar.
    """

    def fill(found: re.Match[str]) -> str:
        name, otherwise = found.groups()
        value = values.get(name)
        if value is None and otherwise is None:
            raise UsageError(
                f"unknown value of {{{name}}} in {template!r} for this checkpoint",
                cure=f"write {{{name}|TEXT}} with the text to use instead",
            )
        return otherwise if value is None else value

    return _FIELD.sub(fill, template)


_TOP = "routes"
_DEPTH = 2  # parts of the path of a route
_OURS = "name"  # the loader adds this field to each route; in the file it is the name of the table


class FieldStatement(NamedTuple):
    """A field that a route states.

    Attributes:
        at: its path from the top, for example `("routes", "t5x", "targets", 0, "format")`.
        value: the effective value, with absolute paths.
        section: the table of the environment that states it; empty for the file itself.
    """

    at: Path
    value: Any
    section: Path = ()

    @property
    def name(self) -> str:
        """The printed form: `routes.t5x.targets[0].format`."""
        return dotted_name(self.at)


def stated_fields(
    data: Mapping[str, Any], over: Mapping[str, Any], section: Path
) -> tuple[FieldStatement, ...]:
    """The fields that routes state, in the order of the file.

    Args:
        data: the contents, merged with those of the environment.
        over: the contents of the environment alone.
        section: its table, for example `("env", "prod")`.
    """
    fields = _fields(data.get(_TOP, {}), (_TOP,))
    return tuple(FieldStatement(at, value, section if _has(over, at) else ()) for at, value in fields)


def origin(field: FieldStatement, lines: Mapping[Path, int], file: str | None) -> str:
    """Origin of a field: file, line and the environment's table.

    Args:
        field: one of `stated_fields`.
        lines: those of the file.
        file: its path.
    """
    whole = (*field.section, *field.at)
    sizes = range(len(whole), len(field.section), -1)  # a key of an inline table is on the line of the table
    line = next((lines[whole[:size]] for size in sizes if whole[:size] in lines), None)
    section = f" [{dotted_name(field.section)}]" if field.section else ""
    return f"{file}:{line}{section}" if line else f"{file}{section}"


def _fields(value: Any, at: Path) -> Iterator[tuple[Path, Any]]:
    """Every value that is neither a table nor a list of tables."""
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
    """Whether a path exists in the data."""
    if not at:
        return True
    held: Any = dict(enumerate(data)) if isinstance(data, list) else data
    return isinstance(held, dict) and at[0] in held and _has(held[at[0]], at[1:])


def required_origin(text: str) -> str:
    """The address of a server, without the slash at its end.

    Raises:
        ValueError: it is no http or https URL, or has a login, a path, a query or a fragment.
    """
    found = urlsplit(text)
    alone = not (found.path.strip("/") or found.query or found.fragment or "@" in found.netloc)
    if found.scheme not in ("http", "https") or not found.hostname or not alone or not text.isprintable():
        raise ValueError("expected the address of a server alone, such as https://wherry.example")
    _port = found.port  # raises if it is none
    return f"{found.scheme}://{found.netloc.lower()}"


def where(lines: Mapping[Path, int], at: Path, env: str | None) -> str:
    """A field for display: `line 12, routes.night.targets[0].format`.

    Args:
        lines: those of the file; see `lines_of`.
        at: the path of the field.
        env: the environment whose table overrides fields.
    """
    name, line = dotted_name(at), line_at(lines, at, env)
    return f"line {line}, {name}" if line else name


def line_at(lines: Mapping[Path, int], at: Path, env: str | None) -> int | None:
    """The line of a field, or of the nearest table around it; None if the file has neither.

    Args:
        lines: those of the file; see `lines_of`.
        at: the path of the field; that of an array of tables means its first table.
        env: the environment whose table overrides fields.
    """
    for depth in range(len(at), 0, -1):
        for path in (at[:depth], (*at[:depth], 0)):
            line = (lines.get(("env", env, *path)) if env else None) or lines.get(path)
            if line is not None:
                return line
    return None


def dotted_name(at: Path) -> str:
    """A path of keys and indices as one dotted name."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).lstrip(".")


def lines_of(text: str) -> dict[Path, int]:
    """The line, from 1, of each key and table."""
    found: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    fence: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if fence is not None:
            fence = None if fence in line else fence
        elif header := _HEADER.fullmatch(line):
            table = _table(_parts(header.group(2)), counts, array=header.group(1) == "[[")
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_parts(key.group(1))), number)
            fence = next((one for one in _FENCES if line.count(one) % 2), None)
    return found


def _table(parts: list[str], counts: dict[Path, int], *, array: bool) -> Path:
    """The path of a header, with the index of each array of tables on the way."""
    path: Path = ()
    for position, part in enumerate(parts):
        path = (*path, part)
        last = position == len(parts) - 1
        if last and array:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _parts(text: str) -> list[str]:
    return [part.strip("\"'") for part in _PART.findall(text)]
