"""form: how the parameters of a flow appear as a form in the Prefect UI.

The fields that most runs need come first, the others are in one group `advanced`; a field that may be left empty has no
second type "None", a size has the type of its default, and a choice is a list. This concerns only the schema that
Prefect makes of the model: in Python all fields are at the same level, and a model is validated from both forms.

Facts (Prefect 3.8):
- The form sorts fields by `position`; a database may not keep the order of the schema.
- The server refuses parameters that do not match the schema. `null` matches a field with a type but without `default`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, model_validator

from wherry.core.names import meant_names

ADVANCED = "advanced"


def _arrange(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Put the fields of a schema in order and into groups."""
    first = cast("type[FormModel]", model).FIRST
    fields = {name: _plain(field) for name, field in schema["properties"].items()}
    rare = {name: field for name, field in fields.items() if name not in first}
    properties = {name: fields[name] for name in first}
    if rare:
        properties[ADVANCED] = {
            "title": "Advanced",
            "description": "Fields that few runs need.",
            "type": "object",
            "additionalProperties": False,
            "properties": _position_fields(rare),
            "default": {},
        }
    schema["properties"] = _position_fields(properties)


def plain_fields(schema: dict[str, Any]) -> None:
    """Simplify the fields of a model that is a field of a form, in the order in which it declares them."""
    schema["properties"] = _position_fields(
        {name: _plain(field) for name, field in schema["properties"].items()}
    )


def _position_fields(fields: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: {**field, "position": position} for position, (name, field) in enumerate(fields.items())}


def _plain(field: dict[str, Any]) -> dict[str, Any]:
    """A field without the type "None", and with a single value as a list of choices."""
    kinds: Iterable[dict[str, Any]] = field.get("anyOf", ())
    some = [kind for kind in kinds if kind != {"type": "null"}]
    if (
        len(some) > 1 and "default" in field
    ):  # a size or a duration, as a number or as text: as the default is
        some = [kind for kind in some if (kind.get("type") == "string") == isinstance(field["default"], str)]
    if len(some) == 1:
        field = {
            **{name: value for name, value in field.items() if name != "anyOf" and value is not None},
            **some[0],
        }
    if "const" in field:
        field = {**field, "enum": [field["const"]]}
        del field["const"]
    return {**field, "title": field.get("title", "").replace("Uri", "URI")}


class FormModel(BaseModel):
    """The parameters of a flow.

    Attributes:
        FIRST: the fields that the form shows first, in this order; the others are in the group `advanced`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_arrange)

    FIRST: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _ungroup(cls, data: Any) -> Any:
        """Take fields from the group `advanced`, and refuse other names of a concept with its name."""
        if not isinstance(data, dict) or not isinstance(data.get(ADVANCED), dict | None):
            return data
        fields = cast("dict[str, Any]", dict(data))
        group = fields.pop(ADVANCED, None) or {}
        twice = sorted(fields.keys() & group.keys())
        if twice:
            raise ValueError(f"{twice[0]} is stated twice, once in `{ADVANCED}`")
        for name in (fields | group).keys() - cls.model_fields.keys():
            if meant := meant_names(name, cls.model_fields):
                raise ValueError(f"unknown field {name!r}: did you mean {' or '.join(meant)}?")
        return {**fields, **group}
