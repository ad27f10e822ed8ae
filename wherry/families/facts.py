"""Telling: what a config says of a model. Every attribute is understood or ignored by name; any other is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.errors import UnrepresentableError, UsageError
from wherry.layout.expr import Read, evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.families.schema import System


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """What a config says.

    Attributes:
        config: its attributes; empty where there is none.
        source: where it comes from, for messages.
        sizes: axis → extent.
        facts: what else of the model systems must know of each other.
    """

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = "no config"
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


def tell(system: System, config: Mapping[str, Any] | None, source: str = "the config") -> ConfigFacts:
    """Read a system's config.

    Raises:
        UnrepresentableError: an attribute is unknown, or says something that no layout of this family can hold.
        UsageError: a size is no whole number.
    """
    if config is None:
        return ConfigFacts()
    table = config.get(system.config.table) if system.config.table is not None else None
    attributes: Mapping[str, Any] = config if table is None else table
    read = Read(attributes)
    sizes = {
        axis: value
        for axis, text in system.config.sizes.items()
        if (value := _size(read, axis, text, source)) is not None
    }
    facts = {name: value for name, text in system.config.facts.items() if (value := read(text)) is not None}
    for rule, reason in system.config.require:
        if read(rule) is False:
            raise UnrepresentableError(f"{source}: {reason}", cure=f"the layouts need {rule}")
    for one in (*system.conventions.values(), *system.forms.values()):
        if one.config:
            read(one.config)
    unknown = sorted(set(attributes) - read.asked - system.config.ignored)
    if unknown:
        raise UnrepresentableError(
            f"{source} has attributes that are not understood: {', '.join(unknown)}",
            cure="declare them in a --family-file: what they size, or that they do not concern the weights",
        )
    return ConfigFacts(attributes, source, sizes, facts)


def _size(read: Read, axis: str, text: str, source: str) -> int | None:
    value = read(text)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UsageError(f"{source}: axis {axis} would be {value!r}, by {text}", cure="correct the config")
    return value


def forms_told(system: System, told: ConfigFacts) -> dict[str, str]:
    """The forms that the config states."""
    return {
        name: _word(value)
        for name, form in system.forms.items()
        if form.config and (value := evaluate(form.config, told.config)) is not None
    }


def conventions_of(
    system: System, given: Mapping[str, str], told: ConfigFacts, facts: Mapping[str, Any], *, alike: bool
) -> dict[str, str]:
    """An answer to each of a system's conventions.

    Args:
        system: whose conventions.
        given: what the user states.
        told: what this system's config says.
        facts: what the other system's config says.
        alike: whether both sides are this system, so that the answers cancel.

    Raises:
        UsageError: nobody says, or the answer is none of the choices.
    """
    chosen: dict[str, str] = {}
    for name, one in system.conventions.items():
        value = given.get(name)
        if value is None and one.config:
            value = evaluate(one.config, told.config)
        if value is None and one.facts:
            value = evaluate(one.facts, facts)
        value = _word(value) if value is not None else one.default or (one.choices[0] if alike else None)
        if value is None:
            raise UsageError(
                f"{system.name} does not store {one.why}, and nothing states it",
                cure=f"state it with --set {name}={'|'.join(one.choices)}, or give the config",
            )
        if value not in one.choices:
            raise UsageError(f"{name}={value} is not possible", cure=f"choose {' or '.join(one.choices)}")
        chosen[name] = value
    return chosen


def require_accepted(system: System, facts: Mapping[str, Any]) -> None:
    """Whether a target system can hold a model of which this is known.

    Raises:
        UnrepresentableError: it cannot; the reason is the system's.
    """
    for rule, reason in system.accepts:
        if evaluate(rule, facts) is False:
            raise UnrepresentableError(
                f"{system.name} cannot hold this model: {reason}", cure="choose another target"
            )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
