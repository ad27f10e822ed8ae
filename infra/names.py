"""The names that a user states: of options, settings, arguments and fields of forms; and the table of them.

`infra/docs.py` writes the table to docs/reference/names.md; `tests/house/test_names.py` compares every name with
`wherry/core/names.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import click
from pydantic import BaseModel

import wherry
from wherry.cli import cli
from wherry.config.schema import ConfigFile
from wherry.core.names import CONCEPTS, Concept
from wherry.flows.audit import AuditSpec
from wherry.flows.convert_spec import ConvertSpec
from wherry.flows.export import ExportSpec
from wherry.flows.nightly import NightlySpec
from wherry.flows.promote import PromoteSpec

DOORS = ("command line", "wherry.toml", "Python", "form")
_FORMS = {
    "convert-checkpoint": ConvertSpec, "post-training-export": ExportSpec, "nightly-convert": NightlySpec,
    "promote": PromoteSpec, "audit": AuditSpec,
}  # fmt: skip


class StatedName(NamedTuple):
    """A name that a user may state.

    Attributes:
        door: one of `DOORS`.
        where: the command, table, function or form that takes it.
        written: how it is written there.
    """

    door: str
    where: str
    written: str

    @property
    def name(self) -> str:
        """The name without the spelling of the command line: `--as-step` is `as_step`, `--no-record` is `record`."""
        plain = self.written.strip("-_").replace("-", "_")
        return plain.removeprefix("no_") if self.door == DOORS[0] else plain


def stated_names() -> list[StatedName]:
    """Every name that a user may state."""
    return [*_options(cli, ()), *_settings(ConfigFile, ""), *_arguments(), *_fields()]


def _options(command: click.Command, words: tuple[str, ...]) -> Iterator[StatedName]:
    for one in command.params:
        for written in (*one.opts, *one.secondary_opts) if isinstance(one, click.Option) else ():
            if written.startswith("--"):
                yield StatedName(DOORS[0], " ".join(words) or "wherry", written)
    for name, below in command.commands.items() if isinstance(command, click.Group) else ():
        yield from _options(below, (*words, name))


def _settings(model: type[BaseModel], table: str) -> Iterator[StatedName]:
    for name, field in model.model_fields.items():
        yield StatedName(DOORS[1], table, name)
        for below in _models(field.annotation):
            yield from _settings(below, f"{table}.{name}".strip("."))


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation."""
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        yield kind
    for one in get_args(kind):
        yield from _models(one)


def _arguments() -> Iterator[StatedName]:
    for name in sorted(wherry._DOOR):  # noqa: SLF001  the list of what is public
        function = getattr(wherry, name)
        if inspect.isfunction(function):
            yield from (StatedName(DOORS[2], name, one) for one in inspect.signature(function).parameters)


def _fields() -> Iterator[StatedName]:
    for flow, model in _FORMS.items():
        for one in _settings(model, flow):
            yield one._replace(door=DOORS[3])


def names_table() -> str:
    """One row for each concept, with the places that take it at each door."""
    stated = stated_names()
    lines = [("name", "what is stated", *DOORS, "refused"), ["---"] * (len(DOORS) + 3)]
    lines += [_row(one, stated) for one in CONCEPTS]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n"


def _row(concept: Concept, stated: Sequence[StatedName]) -> list[str]:
    cells = [f"`{concept.name}`", concept.meaning]
    for door in DOORS:
        written = concept.written(door)
        places = dict.fromkeys(one.where for one in stated if (one.door, one.written) == (door, written))
        shown = f"`{written}`: {', '.join(place or 'settings' for place in places)}"
        cells.append(shown if places else "–")
    return [*cells, ", ".join(f"`{one}`" for one in concept.refused)]
