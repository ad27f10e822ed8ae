"""json_forms: the forms that values of a JSON file must have, as data.

A form is a tuple of types, of which a value has exactly one (so that a bool is no int), a record or a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeAlias, cast

from wherry.core.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """A table.

    Attributes:
        required: its fields, each with its form.
        optional: fields that it may have.
        rest: the form of all other fields; None if they may have any.
    """

    required: Mapping[str, Form] = field(default_factory=dict[str, "Form"])
    optional: Mapping[str, Form] = field(default_factory=dict[str, "Form"])
    rest: Form | None = None


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list.

    Attributes:
        items: the form of each item.
    """

    items: Form


Form: TypeAlias = "tuple[type, ...] | Record | ListOf"


def require_form(value: Any, form: Form, place: str) -> None:
    """A value has a form.

    Args:
        value: from a JSON file.
        form: the form.
        place: where the value is, for messages.

    Raises:
        TypeError: it has another one; the place is named.
    """
    if isinstance(form, tuple):
        _require_type(value, form, place)
    elif isinstance(form, ListOf):
        _require_type(value, (list,), place)
        for number, item in enumerate(cast("list[Any]", value)):
            require_form(item, form.items, f"{place}.{number}")
    else:
        _require_type(value, (dict,), place)
        table = cast("dict[str, Any]", value)
        missing = next((name for name in form.required if name not in table), None)
        if missing is not None:
            raise TypeError(f"missing {place}.{missing}")
        stated = {**form.optional, **form.required}
        for name, item in table.items():
            inner = stated.get(name, form.rest)
            if inner is not None:
                require_form(item, inner, f"{place}.{name}")


def _require_type(value: Any, kinds: tuple[type, ...], place: str) -> None:
    if type(value) not in kinds:
        words = " or ".join("null" if one is type(None) else one.__name__ for one in kinds)
        raise TypeError(f"expected {words} as {place!r}, got {type(value).__name__}")
