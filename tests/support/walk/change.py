"""Change: one alternative value of one attribute of a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple


class Absent(Enum):
    """The attribute does not stand in the file; the class takes its own default."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return self.value


ABSENT = Absent.ABSENT


class Change(NamedTuple):
    """One alternative value.

    Attributes:
        value: the value; None is written as null, ABSENT leaves the attribute out of the file.
        also: attributes without which the value is no model or changes nothing, dotted where nested; ABSENT removes one
            from the saved file. What the value changes is measured against a model that has these too.
        in_file: whether the saved file is edited, since the class would respell the value or rename the attribute.
    """

    value: Any
    also: Mapping[str, Any] = {}
    in_file: bool = False

    @property
    def label(self) -> str:
        """The value as text, with the attributes that change with it; of the entries of a scaling only its name."""
        kinds = {name: value for name, value in self.also.items() if name.endswith(".rope_type")}
        others = {name: value for name, value in self.also.items() if not name.startswith("rope_parameters.")}
        words = [repr(value) for value in kinds.values()]
        words += [f"{name}={value!r}" for name, value in sorted(others.items()) if not kinds]
        return " with ".join([repr(self.value), *([", ".join(words)] if words else [])])


def to(value: Any, also: Mapping[str, Any] | None = None) -> Change:
    """A value that the class is made with."""
    return Change(value, also or {})


def in_file(value: Any, also: Mapping[str, Any] | None = None) -> Change:
    """A value that stands in the file as it is."""
    return Change(value, also or {}, in_file=True)


def changes(values: Iterable[Any]) -> tuple[Change, ...]:
    """The values as changes; one that is none is the value alone."""
    return tuple(one if isinstance(one, Change) else Change(one) for one in values)
