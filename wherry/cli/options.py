"""Options that several commands share, and how their values are read."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from wherry.core.option import in_order, options_of
from wherry.core.request import ConvertRequest, SourceRequest, TargetRequest
from wherry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wherry.core.option import RequestOption

Command: TypeAlias = "Callable[..., Any]"

# The order of the help, in which an option that is not here comes last.
ORDER = (
    "family", "family_file", "config", "dtype", "assets", "rename", "opaque", "format", "step", "item", "options",
    "memory", "only", "ignore", "verify", "if_exists", "into", "as_step", "meta", "sign", "lineage",
)  # fmt: skip


def _click(one: RequestOption) -> Callable[[Command], Command]:
    """An option of a request as one of a command."""
    how: dict[str, Any] = {"is_flag": one.kind == "flag", "multiple": one.kind in ("list", "table")}
    if one.kind == "word":
        how["type"] = click.Choice(one.choices) if one.choices else int if one.type == "int | None" else None
    if one.kind == "word" and one.default is not None:
        how |= {"default": one.default, "show_default": True}
    return click.option(one.flag, one.name, metavar=one.metavar, help=one.help, **how)


def _read(one: RequestOption, value: Any) -> Any:
    """What the command line gave, as a request has it."""
    if one.kind == "flag":
        return value != one.default
    return settings(value) if one.kind == "table" else rules(value or "") if one.kind == "rules" else value


def requesting(
    *records: type[Any], planned: bool = False, order: tuple[str, ...] = ORDER
) -> Callable[[Command], Command]:
    """Options of requests; they reach the command as one mapping `given`, by the names of their fields.

    Args:
        records: of `wherry.core.request`.
        planned: only what `wherry plan` takes too.
        order: of the help.
    """
    options = in_order((one for one in options_of(*records) if one.planned or not planned), order)

    def given(function: Command) -> Command:
        @wraps(function)
        def inner(**arguments: Any) -> Any:
            values = {one.name: _read(one, arguments.pop(one.name)) for one in options}
            return function(given=values, **arguments)

        command: Command = inner
        for one in reversed(options):
            command = _click(one)(command)
        return command

    return given


as_json = click.option("--json", "json_", is_flag=True, help="Print JSON instead of text.")
memory = _click(next(one for one in options_of(ConvertRequest) if one.name == "memory"))
quiet = click.option("--quiet", is_flag=True, help="Do not show a progress bar.")
chosen = requesting(SourceRequest)
CONVERSION = (TargetRequest, SourceRequest, ConvertRequest)


def walking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say what counts in a walk."""
    for option in (
        click.option("--newest", is_flag=True, help="List only the newest complete step of each run."),
        click.option("--min-age", type=click.FloatRange(0), default=0.0, metavar="SECONDS",
                     help="Skip what changed within the last SECONDS and is not proven to be committed."),
    ):  # fmt: skip
        function = option(function)
    return function


def settings(pairs: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words as a mapping.

    Raises:
        UsageError: a word without `=`.
    """
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"not NAME=VALUE: {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs)


def rules(text: str) -> tuple[str, ...]:
    """Comma-separated words."""
    return tuple(rule.strip() for rule in text.split(",") if rule.strip())


def matched_targets(
    uris: Sequence[str], formats: Sequence[str], options: Mapping[str, str]
) -> list[TargetRequest]:
    """Each target with its format and those of the options that the format takes.

    Raises:
        UsageError: their numbers differ, or an option is none of any target's.
    """
    from wherry.formats.registry import find_format
    from wherry.tree.mapping import TREE_OPTIONS

    if len(uris) != len(formats):
        raise UsageError(
            f"{len(uris)} targets and {len(formats)} formats", cure="say --to FORMAT once for each target"
        )
    taken = {name: {*find_format(name).options, *TREE_OPTIONS} for name in formats}
    further = set(options) - set[str]().union(*taken.values())
    if further:
        from wherry.view.system import layout_options

        known = further & layout_options()
        taken = {name: names | known for name, names in taken.items()}
    unknown = sorted(further - set[str]().union(*taken.values()))
    if unknown:
        raise UsageError(
            f"{' and '.join(formats)} has no option {', '.join(unknown)}", cure="see `wherry formats NAME`"
        )
    return [
        TargetRequest(uri, name, {key: value for key, value in options.items() if key in taken[name]})
        for uri, name in zip(uris, formats, strict=True)
    ]
