"""Writing a system's config from a checkpoint, the source's config and a given config.

The declarations that read a config also write it: an axis or a fact that is read from one attribute is written to it. A
given config of the target (from the user, or copied by an earlier conversion) is kept, and only missing attributes are
added. Unknown attributes that change no output get the system's documented default, with a warning; a fact that changes
outputs and that nobody states is an error. The result is read back: it must state the sizes and facts of the model.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, cast

from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Cure
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.families.config_files import complete_config
from wherry.families.fact_checks import applicable, known_names, relevant, require_carried, require_known
from wherry.families.facts import ConfigFacts, assumed_facts, tell
from wherry.families.project import Projection
from wherry.families.schema import Cases, System
from wherry.layout.expr import evaluate, names_in


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    """A config.

    Attributes:
        config: its attributes; empty if the system has no config.
        table: the part of it that describes the model.
        names: the names that expressions can use: sizes, facts, forms, conventions, existing parameters.
        warnings: the assumptions that were made.
    """

    config: Mapping[str, Any]
    table: Mapping[str, Any]
    names: Mapping[str, Any]
    warnings: tuple[str, ...]


def written_config(
    projected: Projection,
    given: Mapping[str, Any] | None = None,
    source: str = "the config",
    *,
    whole: bool = False,
    more: Mapping[str, Any] | None = None,
    token_ids: Mapping[str, Any] | None = None,
) -> WrittenConfig:
    """Derive the target's config.

    Args:
        projected: the conversion.
        given: a config of the target's system; None if there is none.
        source: its name in messages.
        whole: whether it is the model's own config, which its system completes itself, rather than one that a user
            states.
        more: more names that expressions can use; the source's config takes precedence over them.
        token_ids: numbers of special tokens that the user states.

    Raises:
        MismatchError: the given config contradicts the tensors or the source's config; axis or fact is named.
        UnrepresentableError: the given config has unknown attributes, or the target cannot hold the model.
        UsageError: nothing states a fact that changes outputs, or the given config states another token id.
    """
    system, write = projected.system, projected.system.write
    bound = projected.source
    given_facts = tell(system, given, source)
    known = known_names(projected)
    of_given = {**assumed_facts(system, known), **given_facts.facts} if given is not None else {}
    names = relevant(bound.family, {**of_given, **(more or {}), **known})
    alike = system is bound.system
    warnings: list[str] = []
    if not alike:
        presumed = _presumed_facts(bound.system, names)
        names |= presumed
        if presumed:
            listed = ", ".join(f"{fact} = {value!r}" for fact, value in presumed.items())
            warnings.append(
                f"not stated anywhere, so the documented values of {bound.system.name} were taken: {listed}"
            )
        require_known(bound.family, bound.system, system, names)
    if write.file is None:
        return WrittenConfig({}, {}, names, (*warnings, *_notes(system, names)))
    config: dict[str, Any] = copy.deepcopy(dict(given or {}))
    key = system.config.table
    table = config if key is None or not (key in config or write.nested) else config.setdefault(key, {})
    _require_table(system, names, has_table=table is not config)
    stated = {
        **(bound.config_facts.facts if bound.system.like == system.name else {}),
        **bound.config_facts.stated,
    }
    dropped = {*write.replaced, *_restated_attributes(system, given_facts, stated, bound.config_facts.stated)}
    _require_agreement(system, names, given_facts, stated)
    doubled = [name for name in dropped if table is not config and config.pop(name, None) is not None]
    for attribute in dropped:
        table.pop(attribute, None)
    _state_token_ids(table, token_ids or {}, source, names.get("vocab"))
    said = _stated_attributes(system, table) - dropped
    for attribute, expression in written_attributes(system).items():
        wanted = attribute not in said and (not whole or attribute in dropped)
        value = attribute_value(expression, names) if wanted else None
        if value is not None or (wanted and attribute in dropped & {*write.nullable}):
            _put(config, table, attribute, value)
            config.update({attribute: value} if doubled and attribute in dropped else {})
    warnings += [] if whole else _complete_config(system, config, table, said, names)
    if alike and not whole:
        warnings += _unstated_warning(projected, names)
    warnings += _notes(system, names)
    _require_same(projected, config, names)
    return WrittenConfig(config, table, names, tuple(warnings))


def _presumed_facts(source: System, names: Mapping[str, Any]) -> dict[str, Any]:
    """The documented values of facts that nobody states."""
    found = {fact: evaluate(text, names) for fact, text in source.presumes.items() if names.get(fact) is None}
    return {fact: value for fact, value in found.items() if value is not None}


def _restated_attributes(
    system: System, given_facts: ConfigFacts, stated: Mapping[str, Any], by_user: Collection[str]
) -> set[str]:
    """The attributes that state a fact otherwise than the user or a source like the target, or not as the user does."""
    wrong = [
        fact
        for fact, value in stated.items()
        if given_facts.facts.get(fact, None if fact in by_user else value) != value
    ]
    return {name for fact in wrong for name in names_in(system.config.facts.get(fact) or "None")}


def _unstated_warning(projected: Projection, names: Mapping[str, Any]) -> Iterator[str]:
    """A warning that names the facts that a config of the same system leaves open, as the source does."""
    missing = [fact for fact in applicable(projected.source.family, names) if names.get(fact) is None]
    if missing:
        yield f"{projected.system.write.file}: the source does not state {', '.join(missing)}: add them before use"


def attribute_value(known: str | Cases, names: Mapping[str, Any]) -> Any:
    """The value of an attribute that is written: of an expression, or of the first case whose rule is true."""
    if isinstance(known, str):
        return evaluate(known, names)
    return next((copy.deepcopy(value) for rule, value in known if evaluate(rule, names)), None)


def _require_table(system: System, names: Mapping[str, Any], *, has_table: bool) -> None:
    """Names of a model whose config has a table are not loaded with a config that has none.

    Raises:
        UnrepresentableError: this config has none.
    """
    for form, choices in system.write.tabled.items():
        if names.get(form) in choices and not has_table:
            first = system.forms[form].choices[0]
            raise UnrepresentableError(
                f"{form}={names[form]} is how a model is stored whose {system.write.file} has {system.config.table}, "
                "and this one has none",
                cure=Cure(
                    "pass `{}`, or the {} of the whole model with {}",
                    Argument("set", f"{form}={first}"),
                    str(system.write.file),
                    Argument("config"),
                ),
            )


def _state_token_ids(
    table: dict[str, Any], token_ids: Mapping[str, Any], source: str, vocabulary: int | None
) -> None:
    """Add the numbers of special tokens that the user states.

    Raises:
        UsageError: the given config states another number, or the vocabulary has no such token.
    """
    for name, value in token_ids.items():
        largest = max(value) if isinstance(value, list) else value
        if vocabulary is not None and largest >= vocabulary:
            raise UsageError(
                f"{name} = {largest} is not a token: the vocabulary has {vocabulary:,}",
                cure=f"state a number below {vocabulary}",
            )
        if table.setdefault(name, value) != value:
            raise UsageError(
                f"{source} states {name} = {table[name]!r}, and --set states {value!r}",
                cure=Cure("leave out {}, or correct {}", Argument("set", name), source),
            )


def _put(config: dict[str, Any], table: dict[str, Any], attribute: str, value: object) -> None:
    """Set an attribute that is not set yet; `/a.b` is `b` in the table `a` next to the model's table."""
    place = config if attribute[0] == "/" else table
    *outer, name = attribute.removeprefix("/").split(".")
    for part in outer:
        place = place.setdefault(part, {})
    place.setdefault(name, value)


@cache
def _plain(expression: str) -> str | None:
    """The attribute that an expression reads: a plain name, or the first plain name of an `or`."""
    node = ast.parse(expression, mode="eval").body
    parts = node.values if isinstance(node, ast.BoolOp) else [node]
    return next((part.id for part in parts if isinstance(part, ast.Name)), None)


def written_attributes(system: System) -> dict[str, str | Cases]:
    """The value of each attribute that is written: as declared, or the axis or fact that is read from it alone."""
    pairs = {**system.config.sizes, **system.config.facts}
    plain = {attribute: name for name, text in pairs.items() if (attribute := _plain(text)) is not None}
    return {**plain, **system.write.attributes}


def _stated_attributes(system: System, table: Mapping[str, Any]) -> frozenset[str]:
    """The attributes that the given config already states, in this or another spelling."""
    texts = (*system.config.sizes.values(), *system.config.facts.values())
    read = (names_in(text) for text in texts if evaluate(text, table) is not None)
    return frozenset(table) | frozenset(name for names in read for name in names if set(table) & names)


def _complete_config(
    system: System,
    config: dict[str, Any],
    table: dict[str, Any],
    said: frozenset[str],
    names: Mapping[str, Any],
) -> Iterator[str]:
    """Add the attributes that are fixed for the family, then the assumed ones; yields the warnings."""
    write = system.write
    for attribute, value in write.fixed.items():
        _put(config, table, attribute, copy.deepcopy(value))
    assumed = {
        attribute: evaluate(default, names) if isinstance(default, str) else default
        for attribute, default in write.defaults.items()
        if not _has(config, table, attribute) and attribute not in said
    }
    assumed = {attribute: value for attribute, value in assumed.items() if value is not None}
    for attribute, value in assumed.items():
        _put(config, table, attribute, value)
    for attribute in write.nullable:
        _put(config, table, attribute, None)
    if assumed:
        listed = ", ".join(f"{name.removeprefix('/')} = {value!r}" for name, value in assumed.items())
        yield f"{write.file}: not stated anywhere, so the default values of {system.name} were written: {listed}"


def _has(config: Mapping[str, Any], table: Mapping[str, Any], attribute: str) -> bool:
    place: Any = config if attribute[0] == "/" else table
    for part in attribute.removeprefix("/").split("."):
        if not isinstance(place, dict) or part not in place:
            return False
        place = cast("dict[str, Any]", place)[part]
    return True


def _notes(system: System, names: Mapping[str, Any]) -> Iterator[str]:
    return (text for rule, text in system.write.notes if evaluate(rule, names))


def _require_agreement(
    system: System, names: Mapping[str, Any], given_facts: ConfigFacts, stated: Mapping[str, Any]
) -> None:
    """A given config must be of this model; what the user states replaces its facts."""
    open_ = {name: value for name, value in names.items() if name not in stated}
    wrong = contradictions(given_facts, system, open_)
    if wrong:
        raise MismatchError(
            f"{given_facts.source} contradicts the checkpoint: {wrong[0]}",
            cure="pass the config of this model",
        )


def _require_same(projected: Projection, config: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """The written config must state the known sizes and facts when it is read back."""
    system, bound = projected.system, projected.source
    try:
        name = str(system.write.file)
        written = tell(system, complete_config(dict(config), name), name)
    except (UsageError, UnrepresentableError) as error:
        wrong = [str(error.args[0])]
    else:
        if system is not bound.system:
            require_carried(bound.family, bound.system, system, bound.config_facts, names, written)
        wrong = contradictions(written, system, names)
        for convention, one in system.conventions.items():
            value = evaluate(one.config, written.config) if one.config and written.config else None
            if value is not None and value != projected.chosen[convention]:
                wrong.append(f"{convention} is {value}, but {projected.chosen[convention]} in the tensors")
    if wrong:
        raise UnrepresentableError(
            f"{system.name} cannot hold this model: its {system.write.file} would contradict it: {wrong[0]}",
            cure=Cure(
                "choose another target, or declare how its config states this with {}",
                Argument("family-file"),
            ),
        )


def contradictions(config_facts: ConfigFacts, system: System, names: Mapping[str, Any]) -> list[str]:
    """The sizes and facts in which a config differs from the tensors and the source's config.

    A tie is not compared, and what only attributes state that the target decides: the tensors show them.
    """
    replaced = set(system.write.replaced)
    decided = {"tied", *(fact for fact, text in system.config.facts.items() if names_in(text) <= replaced)}
    sizes = [
        f"{axis} is {extent} ({system.config.sizes[axis]}), but {names[axis]} in the tensors"
        for axis, extent in config_facts.sizes.items()
        if axis in names and names[axis] != extent
    ]
    facts = [
        f"{fact} is {value!r} ({system.config.facts[fact]}), but {names[fact]!r} in the source's config"
        for fact, value in config_facts.facts.items()
        if fact not in decided and fact not in system.absorbs and fact in names and names[fact] != value
    ]
    return [*sizes, *facts]
