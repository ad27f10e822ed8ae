"""option: an option of a request, declared once and used by commands, forms, routes and receipts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

Kind = Literal["word", "rules", "list", "table", "flag"]  # in the order of a generated command line


@dataclass(frozen=True, slots=True)
class RequestOption:
    """An option of a request.

    Attributes:
        default: its value when not given; its type is the option's type.
        help: help text of the command line; also of forms and routes, unless `form` or `route` replaces it.
        name, type: of its field; the type as written in the source.
        spelled: its name on the command line; the field's name by default.
        metavar: placeholder for its value in the help.
        choices: its values, where they are enumerated; the items of a list.
        form: help text in the form of the flow; None where the form has no such field.
        route: help text in a route of `wherry.toml`; None where routes have no such field.
        stated: how a receipt states it: its `value`, a `file` by name and digest, a `place` without secrets, a `run` as
            its URI, `settings` with the renames, or not at all.
        decides: whether the result depends on it.
        planned: whether `wherry plan` takes it too.
    """

    default: Any
    help: str
    name: str = ""
    type: Any = ""
    spelled: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    form: str | None = ""
    route: str | None = ""
    stated: str = "value"
    decides: bool = False
    planned: bool = False

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return self.spelled or f"--{self.name.replace('_', '-')}"

    @property
    def kind(self) -> Kind:
        """How it is given: a flag, a word, a list (the option repeated), comma-separated rules, or a table."""
        if isinstance(self.default, tuple):
            return "rules" if self.choices else "list"
        return (
            "flag"
            if isinstance(self.default, bool)
            else "table"
            if isinstance(self.default, dict)
            else "word"
        )

    @property
    def field(self) -> Any:
        """The dataclass field that declares it."""
        if self.kind == "table":
            return field(default_factory=dict[str, Any], metadata={"option": self})
        return field(default=self.default, metadata={"option": self})


def option(default: Any, help: str, **how: Any) -> Any:
    """A dataclass field that declares an option; see RequestOption."""
    return RequestOption(default, help, **how).field


def options_of(*records: Any) -> Iterator[RequestOption]:
    """The options of records in their order, including those of nested records."""
    for record in records:
        for one in fields(record):
            if "option" in one.metadata:
                yield replace(one.metadata["option"], name=one.name, type=one.type)
            elif "record" in one.metadata:
                yield from options_of(one.metadata["record"])


def in_order(options: Iterable[RequestOption], order: tuple[str, ...]) -> list[RequestOption]:
    """Options in this order of names; those that it does not name come last."""
    return sorted(options, key=lambda one: order.index(one.name) if one.name in order else len(order))
