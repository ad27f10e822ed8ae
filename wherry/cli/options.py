"""Options that several commands share, and how their values are parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import PurePosixPath
from typing import Any, TypeAlias

import click

from wherry.cli.help import names_for
from wherry.core.request import (
    ConvertRequest,
    RequestOption,
    SourceRequest,
    TargetRequest,
    in_order,
    options_of,
)
from wherry.core.units import plural
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import UsageError

Function: TypeAlias = "Callable[..., Any]"

# The order of options in the help; other options come last.
ORDER = (
    "family", "family_file", "config", "dtype", "allow_overflow", "assets", "rename", "allow_opaque", "format", "step",
    "item", "options", "memory", "only", "ignore", "verify", "if_exists", "into", "as_step", "meta", "sign", "lineage",
)  # fmt: skip


def _click(one: RequestOption) -> Callable[[Function], Function]:
    """The click option for an option of a request."""
    how: dict[str, Any] = {"is_flag": one.kind == "flag", "multiple": one.kind in ("list", "table")}
    if one.kind == "word":
        how["type"] = click.Choice(one.choices) if one.choices else int if one.type == "int | None" else None
    if one.kind == "word" and one.default is not None:
        how |= {"default": one.default, "show_default": True}
    return click.option(
        one.flag, one.name, metavar=one.metavar, help=one.help, shell_complete=names_for(one.name), **how
    )


def _read(one: RequestOption, value: Any) -> Any:
    """The value of a request's option, from its value on the command line."""
    if one.kind == "flag":
        return value != one.default
    return settings(value) if one.kind == "table" else rules(value or "") if one.kind == "rules" else value


def requesting(
    *records: type[Any], planned: bool = False, order: tuple[str, ...] = ORDER
) -> Callable[[Function], Function]:
    """Add the options of requests; the command gets them as one mapping `given`, by the names of their fields.

    Args:
        records: records of `wherry.core.request`.
        planned: only the options that `wherry plan` takes too.
        order: order of the options in the help.
    """
    options = in_order((one for one in options_of(*records) if one.planned or not planned), order)

    def decorate(function: Function) -> Function:
        @wraps(function)
        def inner(**arguments: Any) -> Any:
            values = {one.name: _read(one, arguments.pop(one.name)) for one in options}
            return function(given=values, **arguments)

        command: Function = inner
        for one in reversed(options):
            command = _click(one)(command)
        return command

    return decorate


as_json = click.option("--json", "json_", is_flag=True, help="Print JSON instead of text.")
memory = _click(next(one for one in options_of(ConvertRequest) if one.name == "memory"))
quiet = click.option("-q", "--quiet", is_flag=True, help="Do not show progress.")
chosen = requesting(SourceRequest)
CONVERSION = (TargetRequest, SourceRequest, ConvertRequest)


def walking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that filter the checkpoints of a walk."""
    for option in (
        click.option("--newest", is_flag=True, help="List only the newest complete step of each run."),
        click.option("--min-age", type=click.FloatRange(0), default=0.0, metavar="SECONDS",
                     help="Skip checkpoints changed in the last SECONDS, unless known to be committed."),
    ):  # fmt: skip
        function = option(function)
    return function


def settings(pairs: Sequence[str]) -> dict[str, str]:
    """Parse NAME=VALUE words.

    Raises:
        UsageError: a word has no `=`.
    """
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(
                f"invalid value {pair!r}; expected NAME=VALUE", cure="put = between name and value"
            )
    return dict(pair.split("=", 1) for pair in pairs)


def rules(text: str) -> tuple[str, ...]:
    """Split comma-separated words."""
    return tuple(rule.strip() for rule in text.split(",") if rule.strip())


# End of a target's name → the format that is meant without --to.
_BY_NAME = {".npz": "npz", ".pt": "torch-zip", ".pth": "torch-zip", ".safetensors": "safetensors"}


def stated_formats(uris: Sequence[str], formats: Sequence[str]) -> Sequence[str]:
    """The formats of the targets: those of --to, or without it those that their names mean.

    Raises:
        UsageError: there is no --to, and the name of a target means no format.
    """
    if formats:
        return formats
    found = [_BY_NAME.get(PurePosixPath(uri).suffix) for uri in uris]
    if None in found:
        raise UsageError(
            "missing option '--to'",
            cure=Cure(
                "state the format of each TARGET, see {}; only names that end in {} need none",
                Command("convert", Argument("help")),
                ", ".join(_BY_NAME),
            ),
        )
    return [name for name in found if name is not None]


def matched_targets(
    uris: Sequence[str], formats: Sequence[str], options: Mapping[str, str], family_file: str | None
) -> list[TargetRequest]:
    """Pair each target with its format and the options that it takes.

    Raises:
        UsageError: the numbers of targets and formats differ, or no target takes an option.
    """
    from wherry.formats.registry import find_target_format
    from wherry.transform.settings import taken_by

    if len(uris) != len(formats):
        raise UsageError(
            f"expected one --to for each TARGET, got {len(formats)} for {plural(len(uris), 'target')}",
            cure=Cure("give {} once for each target", Argument("to", Blank("FORMAT"))),
        )
    taken = taken_by([find_target_format(name) for name in formats], options, family_file)
    return [
        TargetRequest(uri, name, {key: value for key, value in options.items() if key in names})
        for uri, name, names in zip(uris, formats, taken, strict=True)
    ]
