"""origin: the forms of what a manifest's `origin` records, for everything in it that wherry reads again.

A conversion records in `origin` what it changed, so that `verify --level roundtrip` and the next conversion can follow
it back. Whoever can write a sidecar can write something else there; so each record that is read has its form here, as
data, and is checked once, when the manifest is read. Other names are the formats' own; nothing reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Mapping


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
class Sequence:
    """A list.

    Attributes:
        items: the form of each item.
    """

    items: Form


Form: TypeAlias = "tuple[type, ...] | Record | Sequence"

_TEXT = (str,)
_NUMBER = (int,)
_TABLE = Record()
_TEXTS = Record(rest=_TEXT)
_SYSTEM = Record({"system": _TEXT}, rest=(str, int, bool))  # with its forms and conventions

FORMS: Mapping[str, Form] = {
    "dequantized": Record({"dtype": _TEXT}, {"quantization_config": _TABLE, "compression_config": _TABLE}),
    "expected_parameters": (int, type(None)),
    "layout": Record(
        {"family": _TEXT, "from": _SYSTEM, "to": _SYSTEM},
        {"facts": _TABLE, "sizes": Record(rest=_NUMBER), "dtype": _TEXT, "only": _TEXT},
    ),
    "merge": Record({"sources": Sequence(_TABLE)}),
    "meta": _TEXTS,
    "names": Record({"renamed": _TEXTS}, {"asked": _TABLE, "inverse": Sequence(_TEXT)}),
    "pinned": (bool,),
    "quantized": Record({"scheme": _TEXT}, {"scales": _TEXT}),
    "scan": Record({"asked": _TEXT}, {"inverse": _TEXT}),
    "tied": _TEXTS,
}


def require_forms(origin: Mapping[str, Any]) -> None:
    """Every record that wherry reads again has its form.

    Raises:
        TypeError: a record has another one; its place is named.
    """
    for name, form in FORMS.items():
        if name in origin:
            _require(origin[name], form, f"origin.{name}")


def _require(value: Any, form: Form, place: str) -> None:
    if isinstance(form, tuple):
        _require_type(value, form, place)
    elif isinstance(form, Sequence):
        _require_type(value, (list,), place)
        for number, item in enumerate(cast("list[Any]", value)):
            _require(item, form.items, f"{place}.{number}")
    else:
        _require_type(value, (dict,), place)
        _require_fields(cast("dict[str, Any]", value), form, place)


def _require_fields(table: dict[str, Any], record: Record, place: str) -> None:
    missing = next((name for name in record.required if name not in table), None)
    if missing is not None:
        raise TypeError(f"missing {place}.{missing}")
    stated = {**record.optional, **record.required}
    for name, value in table.items():
        form = stated.get(name, record.rest)
        if form is not None:
            _require(value, form, f"{place}.{name}")


def _require_type(value: Any, kinds: tuple[type, ...], place: str) -> None:
    if type(value) not in kinds:
        words = " or ".join("null" if one is type(None) else one.__name__ for one in kinds)
        raise TypeError(f"expected {words} as {place!r}, got {type(value).__name__}")
