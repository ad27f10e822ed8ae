"""What the routes of `wherry.toml` state, field by field, each with the place that it comes from.

Only what is stated: the defaults of a route are the same for all, and `infra/wherry.toml` shows them. A list that an
environment states takes the place of the file's, so a field comes from the environment where that states it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.config.lines import line_of, printed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.config.lines import Path

_TOP = "routes"
_DEPTH = 2  # parts of the path of one route
_OURS = "name"  # which the loader gives each route; the file has it as the name of the table


class Stated(NamedTuple):
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


def stated(data: Mapping[str, Any], over: Mapping[str, Any], section: Path) -> tuple[Stated, ...]:
    """The fields that routes state, in the order of the file.

    Args:
        data: the contents, those of the environment laid over them.
        over: those of the environment alone.
        section: its table, as `("env", "prod")`.
    """
    fields = _fields(data.get(_TOP, {}), (_TOP,))
    return tuple(Stated(at, value, section if _has(over, at) else ()) for at, value in fields)


def origin(field: Stated, text: str, file: str | None) -> str:
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
