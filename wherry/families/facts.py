"""Facts: the sizes and facts that a config states. An attribute that is neither declared nor ignored is an error.

An attribute that a config leaves out has the default of its software (`config.defaults`): a missing attribute is not a
null.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Arguments, Cure, either
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.layout.expr import Read, evaluate, names_in

if TYPE_CHECKING:
    from wherry.families.schema import Convention, System

_TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """The sizes and facts that a config states.

    Attributes:
        config: its attributes, and the defaults of those that it does not state; empty if there is no config.
        source: its name, for messages.
        sizes: axis → extent.
        facts: other properties of the model that both systems must know, from the config and from elsewhere.
        stated: those of them that the user states, which replace others.
    """

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = "no config"
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stated: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def known(self) -> dict[str, Any]:
        """The config's attributes and the facts, as names of expressions."""
        return {**self.config, **self.facts}


def tell(system: System, config: Mapping[str, Any] | None, source: str = "the config") -> ConfigFacts:
    """Read a system's config.

    Raises:
        UnrepresentableError: an attribute is unknown, or has a value that no layout of this family supports.
        UsageError: a size is not an integer.
    """
    if config is None:
        return ConfigFacts()
    rules = system.config
    attributes = table_of(system, config)
    read = Read(with_defaults(system, config))
    sizes = {
        axis: value
        for axis, text in rules.sizes.items()
        if (value := _size(read, axis, text, source)) is not None
    }
    facts = {name: value for name, text in rules.facts.items() if (value := read(text)) is not None}
    for rule, reason in rules.require:
        if read(rule) is False:
            stated = ", ".join(f"{name} is {read.attributes.get(name)!r}" for name in sorted(names_in(rule)))
            raise UnrepresentableError(
                f"{source}: {reason} ({stated})",
                cure=f"choose another family or model; these layouts require {rule}",
            )
    for text in rules.implied.values():
        read.used |= names_in(text)
    for one in (*system.conventions.values(), *system.forms.values()):
        if one.config:
            read(one.config)
    _require_declared(system, attributes, read.used, source)
    return ConfigFacts(read.attributes, source, sizes, facts)


def table_of(system: System, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes of the model, in a config whose system puts them into a table of their own or not."""
    table = config.get(system.config.table) if system.config.table is not None else None
    return table if isinstance(table, dict) else config


def with_defaults(system: System, config: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the model; those that the config leaves out have the values of the system's software."""
    attributes = table_of(system, config)
    lacking = {name: value for name, value in system.config.defaults.items() if name not in attributes}
    return {**{name: _plain(value, attributes) for name, value in lacking.items()}, **attributes}


def _plain(value: Any, names: Mapping[str, Any]) -> Any:
    """A value of a declaration; text is an expression."""
    return evaluate(value, names) if isinstance(value, str) else value


def _require_declared(system: System, attributes: Mapping[str, Any], read: set[str], source: str) -> None:
    """Every stated attribute is read, has its only supported value, or cannot change an output."""
    rest = set(attributes) - read - set(system.config.ignored)
    for name in sorted(rest & set(system.config.usual)):
        usual = _plain(system.config.usual[name], attributes)
        if attributes[name] not in (None, usual):
            version, line, _default = known_attributes(system.like or system.name).get(name, ("", "", ""))
            where = f"; version {version} of its library reads it in {line}" if line else ""
            raise UnrepresentableError(
                f"{source}: {name} is {attributes[name]!r}, for which {system.name} has no layout{where}",
                cure=f"these layouts require {name} = {usual!r}",
            )
    patterns = [pattern for pattern in system.config.ignored if "*" in pattern]
    rest -= set(system.config.usual)
    unknown = [name for name in rest if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    if unknown:
        raise UnrepresentableError(
            f"unknown attributes in {source}: {', '.join(sorted(unknown))}",
            cure=Cure(
                "declare them with {}: as sizes or facts, or as ignored if they cannot change an output",
                Argument("family-file"),
            ),
        )


@cache
def known_attributes(system: str) -> Mapping[str, tuple[str, str, str]]:
    """The attributes that a system's library has, by `infra/config_names.py`: version, the line that reads it, default.

    Args:
        system: the system's name; one without a table has no rows.
    """
    table = _TABLES / f"attributes_{system}.toml"
    rows = tomllib.loads(table.read_text(encoding="utf-8")) if table.is_file() else {}
    return {name: (version, line, default) for name, (version, line, default) in rows.items()}


def _size(read: Read, axis: str, text: str, source: str) -> int | None:
    value = read(text)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UsageError(
            f"{source}: invalid size of axis {axis}: {value!r} from {text}; expected an integer of at least 0",
            cure="correct the config",
        )
    return value


def stated_forms(system: System, config_facts: ConfigFacts) -> dict[str, str]:
    """The forms that the config states."""
    return {
        name: word(value)
        for name, form in system.forms.items()
        if form.config and (value := evaluate(form.config, config_facts.config)) is not None
    }


def conventions_of(
    system: System,
    stated: Mapping[str, str],
    config_facts: ConfigFacts,
    facts: Mapping[str, Any],
    *,
    recorded: Mapping[str, str] | None = None,
    otherwise: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """A choice for each of a system's conventions, and a note for each that was derived.

    The system's software, its config and the record of an earlier conversion know a choice; what the user states must
    agree with them.

    Args:
        system: the system.
        stated: the choices of the user.
        config_facts: sizes and facts from this system's config.
        facts: facts from the other system's config.
        recorded: the choices that wherry recorded when it wrote the checkpoint.
        otherwise: choices that hold if nothing else is known.

    Raises:
        UsageError: a convention is not stated, or its value is not one of the choices.
        MismatchError: statement, record and config contradict each other; two of them are named, with both values.
    """
    chosen: dict[str, str] = {}
    notes: list[str] = []
    missing: list[str] = []
    for name, one in system.conventions.items():
        value = evaluate(one.config, config_facts.config) if one.config and config_facts.config else None
        read = _attributes(system, one.config, config_facts) if one.config and value is not None else ""
        found = _agreed_choice(name, stated.get(name), {
            f"{system.name} always has": one.always,
            "wherry.json, which wherry wrote with this checkpoint, has": (recorded or {}).get(name),
            f"{config_facts.source} ({read}) means": None if value is None else word(value),
        })  # fmt: skip
        if read and name not in {**stated, **(recorded or {})}:
            notes.append(f"{name} = {found}: {config_facts.source} states {read}")
        usual = (
            evaluate(one.facts, facts) if one.facts and not read and name not in (recorded or {}) else None
        )
        by = ", ".join(sorted(names_in(one.facts or "None")))
        if usual is not None and found is None:
            found = word(usual)
            notes.append(f"{name} = {found}: by the {by} of this model")
        elif usual is not None and found != word(usual):
            notes.append(
                f"{name} = {found} as stated, instead of {word(usual)}, which models of this {by} have"
            )
        found = found or (otherwise or {}).get(name) or one.default
        if found is None:
            missing.append(name)
            continue
        if found not in one.choices:
            raise UsageError(
                f"invalid value for option {name}: {found!r}", cure=f"choose {' or '.join(one.choices)}"
            )
        chosen[name] = found
    if missing:
        what = " and ".join(system.conventions[name].why for name in missing)
        states = either((_each_choice(name, system.conventions[name]) for name in missing), "; ")
        raise UsageError(
            f"{system.name} does not store {what}, and neither the options nor a config state it",
            cure=Cure(
                "pass the model's config with {}, which states all that is needed, or state it: {}",
                Argument("config"),
                states,
            ),
        )
    return chosen, tuple(notes)


def _agreed_choice(name: str, stated: str | None, known: Mapping[str, str | None]) -> str | None:
    """The choice that is stated or known; None if nothing states it."""
    states = [(where, value) for where, value in known.items() if value is not None]
    for where, value in states:
        if stated not in (None, value):
            raise MismatchError(
                f"{name} = {stated} is stated, but {where} {name} = {value}",
                cure=Cure("leave {} out", Argument("set", f"{name}={stated}")),
            )
        if value != states[0][1]:
            raise MismatchError(
                f"{states[0][0]} {name} = {states[0][1]}, but {where} {name} = {value}",
                cure=Cure("leave {} out, or pass the config of this model", Argument("config")),
            )
    return states[0][1] if states else stated


def _attributes(system: System, expression: str, config_facts: ConfigFacts) -> str:
    """The attributes of a config from which a value follows, for messages; defaults of the system are left out."""
    read, usual = sorted(names_in(expression)), system.config.defaults
    found = [name for name in read if config_facts.config.get(name) not in (None, usual.get(name))]
    return ", ".join(f"{name} = {config_facts.config[name]}" for name in found) or f"no {' or '.join(read)}"


def _each_choice(name: str, one: Convention) -> Cure:
    """What a user can state, each choice with the models that have it."""
    stated = {choice: Argument("set", f"{name}={choice}") for choice in one.choices}
    return either(
        (
            Cure("{} ({})", stated[choice], one.models[choice]) if choice in one.models else stated[choice]
            for choice in one.choices
        ),
        ", or ",
    )


def assumed_facts(system: System, names: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that hold for every checkpoint of a system, because its software knows no others.

    Args:
        system: the system.
        names: the known names; a fact whose expression needs others is left out.
    """
    found = {fact: _plain(value, names) for fact, value in system.assumes.items()}
    return {fact: value for fact, value in found.items() if value is not None}


_ELSEWHERE = Cure(
    "choose another target, or keep the tree in a container: `{}`",
    Arguments(Argument("to", "orbax"), Argument("family", "none")),
)


def require_accepted(system: System, names: Mapping[str, Any], source: str | None = None) -> None:
    """Check that a system can hold a model with these facts.

    Args:
        system: the system.
        names: the known names.
        source: the name of the config that states them, if this is the system of the source, whose software ignored
            what the system cannot hold.

    Raises:
        UnrepresentableError: it cannot; the system states the reason.
    """
    for rule, reason, option in system.accepts:
        if evaluate(rule, names) is False:
            words = reason.format_map({name: names.get(name) for name in names_in(rule)})
            if source:
                raise UnrepresentableError(
                    f"{source} states another model than {system.name} computes: {words}",
                    cure=Cure(
                        "correct the config to the model that was trained, or pass that config with {}",
                        Argument("config"),
                    ),
                )
            name, _, value = option.removeprefix("--").partition(" ")
            raise UnrepresentableError(
                f"{system.name} cannot hold this model: {words}",
                cure=Cure("pass `{}`", Argument(name, value)) if option else _ELSEWHERE,
            )


def word(value: object) -> str:
    """A value of a config in the spelling of choices."""
    return str(value).lower() if isinstance(value, bool) else str(value)
