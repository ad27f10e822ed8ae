"""fact_checks: every fact that changes outputs reaches the target, or the conversion is refused.

A config is part of the model. A fact is *carried* if the target's own config states it and reads back equal, *checked*
if the target's software always uses that value, *absorbed* if the layout's words put it into the weights. Any other
value is refused by name. The user must state a fact that nobody else states: nothing is filled in from another model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from wherry.cures import Argument, Arguments, Blank, Cure
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.families.facts import assumed_facts, require_accepted
from wherry.families.project import tied_copies
from wherry.layout.expr import evaluate, names_in

if TYPE_CHECKING:
    from wherry.families.facts import ConfigFacts
    from wherry.families.project import Projection
    from wherry.families.schema import Family, System

_MOST_SHOWN = 80  # characters of a value in a message
_ELSEWHERE = "choose another target"


def known_names(projected: Projection) -> dict[str, Any]:
    """Sizes and facts of the model, forms and conventions of the target, `there.P`, `source.C`, `dtype`, `moments`.

    A tied parameter that the target stores nevertheless is there; `copied.P` says that it is one.
    """
    bound = projected.source
    copies = tied_copies(bound, projected.system)
    there = {*bound.present["params"], *copies}
    ties = [name for name, one in bound.family.parameters.items() if one.tie]
    facts = dict(bound.config_facts.facts)
    if ties:
        facts["tied"] = not any(name in there for name in ties)
    slots = {piece.parameter[0] for one in projected.targets.values() for piece in one.pieces}
    dtypes: Counter[str] = Counter()  # of parameters, by their elements
    for one in projected.targets.values():
        if one.pieces and one.pieces[0].parameter[0] == "params":
            dtypes[one.spec.dtype] += one.spec.size
    return {
        **bound.solved.sizes,
        **facts,
        **{name: _choice(text) for name, text in projected.chosen.items()},
        "there": dict.fromkeys(there, True),
        "copied": dict.fromkeys(copies, True),
        "source": dict(bound.chosen),
        "dtype": dtypes.most_common(1)[0][0],
        "moments": bool(slots - {"params", "scalars"}),
    }


def _choice(text: str) -> str | int | bool:
    """A form as a config value: scanned or not, along which axis."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text


def applicable(family: Family, names: Mapping[str, Any]) -> Iterator[str]:
    """The facts that change the outputs of a model of which these names are known."""
    for name, fact in family.facts.items():
        if fact.outputs and (fact.when is None or evaluate(fact.when, names)):
            yield name


def relevant(family: Family, names: Mapping[str, Any]) -> dict[str, Any]:
    """The known names without the facts that mean nothing for this model."""
    meant = set(applicable(family, names))
    moot = {name for name, fact in family.facts.items() if fact.outputs and name not in meant}
    return {name: value for name, value in names.items() if name not in moot}


def require_assumed(
    family: Family, source: System, target: System, config_facts: ConfigFacts, names: Mapping[str, Any]
) -> None:
    """Check the facts of a model against what the target's software always uses.

    Args:
        family: declares the facts.
        source: the source's system.
        target: the target's system.
        config_facts: the facts of the source, from its config and from elsewhere.
        names: the known names, as far as they are known; facts that need others are left out.

    Raises:
        UnrepresentableError: a fact has another value; attribute, both values and the cure are named.
    """
    always = assumed_facts(target, names)
    for fact in different(family, names, always):
        raise UnrepresentableError(
            f"{family.name}: {fact_text(source, config_facts, fact, names[fact], always[fact])}, "
            f"but {target.name} always uses {_excerpt(always[fact], names[fact])}",
            cure=_accepting(family, fact, always[fact]),
        )


def require_fitting(
    family: Family,
    config_facts: ConfigFacts,
    sizes: Mapping[str, int],
    parameters: Collection[str] | None = None,
) -> None:
    """Check what the user states of a source against its sizes and parameters.

    Args:
        family: declares which facts sizes show.
        config_facts: the facts of the source, with those that the user states.
        sizes: axis → extent, as far as they are known.
        parameters: those of the source; None if they are not known yet.

    Raises:
        MismatchError: a stated fact is not that of the tensors; both are named.
    """
    names = {**sizes, **config_facts.facts}
    ties = {name for name, one in family.parameters.items() if one.tie}
    for fact, value in config_facts.stated.items():
        if fact not in family.facts:
            continue  # a number of adapters
        rule = family.facts[fact].fits
        text = f"{fact}={_stated_as(family, fact, value)}"
        shown = ""
        if rule and evaluate(rule, names) is False:
            read = sorted(names_in(rule) & sizes.keys())
            shown = f"the tensors have {', '.join(f'{name} = {sizes[name]}' for name in read)} ({rule})"
        elif (
            fact == "tied" and value is False and ties and parameters is not None and not ties & {*parameters}
        ):
            shown = f"the tensors hold no {' or '.join(sorted(ties))} of their own"
        if shown:
            raise MismatchError(
                f"{text} is stated, but {shown}", cure=Cure("leave {} out", Argument("set", text))
            )


def different(family: Family, names: Mapping[str, Any], always: Mapping[str, Any]) -> Iterator[str]:
    """The facts of which a model of these names has another value than the one that a software always uses."""
    for fact in applicable(family, names):
        if fact in always and names.get(fact) is not None and names[fact] != always[fact]:
            yield fact


def require_computed(
    family: Family, source: System, config_facts: ConfigFacts, names: Mapping[str, Any]
) -> None:
    """Check the config of a source that has another system's config, of which its own software ignores a part.

    Args:
        family: declares the facts.
        source: the source's system; nothing is checked of one with a config of its own.
        config_facts: the facts of the source, from its config and from elsewhere.
        names: the known names, as far as they are known.

    Raises:
        UnrepresentableError: the config states another model; attribute and both values are named.
    """
    always = assumed_facts(source, names) if source.like else {}
    for fact in different(family, names, always):
        raise UnrepresentableError(
            f"{config_facts.source} states another model than {source.name} computes: "
            f"{fact_text(source, config_facts, fact, names[fact], always[fact])}, "
            f"but it always uses {_excerpt(always[fact], names[fact])}",
            cure=Cure(
                "correct the config to the model that was trained, or state it with {}",
                Argument("set", f"{fact}={_stated_as(family, fact, always[fact])}"),
            ),
        )
    if source.like:
        require_accepted(source, names, config_facts.source)


def require_known(family: Family, source: System, target: System, names: Mapping[str, Any]) -> None:
    """Check that nothing that changes outputs would have to be guessed.

    A fact that the source's weights contain, and that nothing states, need not be known: any value describes them.

    Raises:
        UsageError: facts are not stated; all of them are named.
    """
    held = {*source.absorbs, *target.absorbs}
    missing = [fact for fact in applicable(family, names) if fact not in held and names.get(fact) is None]
    if missing:
        listed = ", ".join(f"{fact} ({family.facts[fact].about})" for fact in missing)
        raise UsageError(
            f"no config states what changes the outputs of this model: {listed}",
            cure=Cure(
                "pass the model's config with {} (MaxText's YAML or JSON, or a config.json), or state "
                "them: {}",
                Argument("config", Blank("FILE")),
                Arguments(*(Argument("set", Blank(f"{fact}=VALUE")) for fact in missing)),
            ),
        )


def require_carried(
    family: Family,
    source: System,
    target: System,
    config_facts: ConfigFacts,
    names: Mapping[str, Any],
    written: ConfigFacts,
) -> None:
    """Check that a target's config states the facts of the model when it is read back.

    Args:
        family: declares the facts.
        source: the source's system.
        target: the target's system.
        config_facts: the facts of the source, from its config and from elsewhere.
        names: the known names.
        written: the target's config, read back.

    Raises:
        UnrepresentableError: the target's software would use another value; attribute and both values are named.
    """
    of_target = {**assumed_facts(target, names), **written.facts}
    for fact in applicable(family, names):
        value = names.get(fact)
        if value is None or fact in target.absorbs or of_target.get(fact) == value:
            continue
        kept = of_target.get(fact)
        other = f"would use {_excerpt(kept, value)}" if fact in of_target else "has no attribute for it"
        raise UnrepresentableError(
            f"{family.name}: {fact_text(source, config_facts, fact, value, kept)}, but {target.name} {other}: "
            f"{target.write.file} cannot state it",
            cure=_accepting(family, fact, kept),
        )


def fact_text(system: System, config_facts: ConfigFacts, fact: str, value: object, other: object) -> str:
    """A fact in the words of the config that states it, for messages, where it differs from another value."""
    shown = _excerpt(value, other)
    if fact in config_facts.stated:
        return f"{fact} is {shown} as stated"
    text = system.config.facts.get(fact)
    if text is not None and config_facts.config:
        names = sorted(name for name in names_in(text) if config_facts.config.get(name) is not None)
        if len(names) == 1:
            return f"{names[0]} is {_excerpt(config_facts.config[names[0]], other)} in {config_facts.source}"
        if names:
            return f"{fact} is {shown} according to {', '.join(names)} in {config_facts.source}"
    return f"{fact} is {shown} in this model"


def _excerpt(value: object, other: object) -> str:
    """A value in a message that compares it with another one: of two tables, the entries that differ; cut if long."""
    if isinstance(value, dict) and isinstance(other, dict):
        table, rest = cast("dict[str, object]", value), cast("dict[str, object]", other)
        value = {key: one for key, one in table.items() if key not in rest or rest[key] != one}
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def _accepting(family: Family, fact: str, value: object) -> str:
    """The cure of a refusal: the user states the value that the target uses, by its word if it has one."""
    if value is None:
        return Cure("{}, or declare how its config states this with {}", _ELSEWHERE, Argument("family-file"))
    text = _stated_as(family, fact, value)
    return Cure("{}, or accept the difference with {}", _ELSEWHERE, Argument("set", f"{fact}={text}"))


def _stated_as(family: Family, fact: str, value: Any) -> str:
    """The text with which a user states a value: its word if it has one."""
    words = (word for word in family.facts[fact].named if family.facts[fact].stated(word) == value)
    return next(words, value if isinstance(value, str) else json.dumps(value))
