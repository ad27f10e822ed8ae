"""options: the options of a request as fields of the pydantic models for forms and `wherry.toml`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, Field, create_model

from wherry.core.option import options_of
from wherry.core.request import LayoutRequest, TargetRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.core.option import RequestOption

M = TypeVar("M", bound=BaseModel)
Place = Literal["form", "route"]


def with_options(
    place: Place, *records: type[Any], leave: tuple[str, ...] = ()
) -> Callable[[type[M]], type[M]]:
    """Add the options of these records to a model as fields.

    Args:
        place: where the model is used; it selects the descriptions.
        records: records of `wherry.core.request`.
        leave: options that the model, or a subclass of it, declares itself.
    """

    def decorate(model: type[M]) -> type[M]:
        hints: dict[str, Any] = {}
        for record in (*records, LayoutRequest):
            hints |= get_type_hints(record)
        missing: dict[str, Any] = {
            one.name: (_kind(hints[one.name], one), _field(place, one))
            for one in options_of(*records)
            if getattr(one, place) is not None and one.name not in (*leave, *model.model_fields)
        }
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **missing
        )

    return decorate


def option_field(place: Place, record: type[Any], name: str) -> Any:
    """The pydantic field of an option: its default and its description for this place."""
    return _field(place, next(one for one in options_of(record) if one.name == name))


def _field(place: Place, one: RequestOption) -> Any:
    return Field(default=one.default, description=getattr(one, place) or one.help)


def _kind(hint: Any, one: RequestOption) -> Any:
    """The type of the field: text where the engine accepts more types, and a Literal where there are choices."""
    word: Any = Literal[one.choices] if one.choices else str
    return {str: word, str | None: word | None, tuple[str, ...]: tuple[word, ...], str | int: str}.get(
        hint, hint
    )


def given_names(place: Place, *records: type[Any]) -> list[str]:
    """The options of these records that a model for this place has."""
    return [one.name for one in options_of(*records) if getattr(one, place) is not None]


def given_by(place: Place, model: BaseModel, *records: type[Any]) -> dict[str, Any]:
    """The options of these records as a model states them."""
    return {name: getattr(model, name) for name in given_names(place, *records)}


def target_of(place: Place, model: BaseModel, uri: str, to: str) -> TargetRequest:
    """A target as a model states it; booleans among its options become the words of `--set`."""
    given = given_by(place, model, TargetRequest)
    layout = LayoutRequest(**{one.name: given.pop(one.name) for one in options_of(LayoutRequest)})
    options = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in given.pop("options").items()
    }
    return TargetRequest(uri, to, options, layout=layout, **given)
