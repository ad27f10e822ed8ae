"""option: one option of a request, declared once for all who take it: commands, forms, routes and receipts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Kind = Literal["word", "rules", "list", "table", "flag"]  # in the order in which a command line states them


@dataclass(frozen=True, slots=True)
class RequestOption:
    """An option of a request.

    Attributes:
        default: its value when not given; its type is the option's type.
        help: on the command line; in forms and routes too, where these say nothing else.
        name, type: of its field, with the type as it is written there.
        spelled: on the command line; the field's name by default.
        metavar: what stands for its value there.
        choices: its values, where they are few; the items of a list.
        form: in the form of the flow; None where the form has no such field.
        route: in a route of `wherry.toml`; None where routes have no such field.
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
        """How the command line spells it."""
        return self.spelled or f"--{self.name.replace('_', '-')}"

    @property
    def kind(self) -> Kind:
        """How it is given: a flag, a word, a list (once for each), rules with commas between, or a table."""
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
        """The field of a record that declares it."""
        if self.kind == "table":
            return field(default_factory=dict[str, Any], metadata={"option": self})
        return field(default=self.default, metadata={"option": self})


def option(default: Any, help: str, **how: Any) -> Any:
    """A field that is an option; see RequestOption."""
    return RequestOption(default, help, **how).field


def options_of(*records: Any) -> Iterator[RequestOption]:
    """The options of records in their order, also those of a record within one."""
    for record in records:
        for one in fields(record):
            if "option" in one.metadata:
                yield replace(one.metadata["option"], name=one.name, type=one.type)
            elif "record" in one.metadata:
                yield from options_of(one.metadata["record"])


def in_order(options: Iterable[RequestOption], order: tuple[str, ...]) -> list[RequestOption]:
    """Options by their names in this order; what it does not name comes last."""
    return sorted(options, key=lambda one: order.index(one.name) if one.name in order else len(order))
