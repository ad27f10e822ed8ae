"""dependence: the options of a layout on which a projection depends, and those on which only its config does.

A form decides something if another choice spells a parameter of the model otherwise, or is written into the config. A
fact is compared with what the target's software always computes, decides a convention or a value word, or is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from wherry.errors import WherryError
from wherry.families.adapters import is_of_adapters
from wherry.families.config_written import attribute_value, written_attributes
from wherry.families.fact_checks import known_names, relevant
from wherry.families.project import Projection
from wherry.families.schema import Cases, System
from wherry.families.templates import replace_macros, templates
from wherry.layout.expr import names_in

_TIE = "tied"  # decides whether second copies are kept


def deciding_options(projected: Projection) -> frozenset[str]:
    """The forms, conventions and facts on which the tensors or the checks of a projection depend."""
    bound, target = projected.source, projected.system
    sides = ((bound.system, bound.chosen), (target, projected.chosen))
    forms = {name for system, chosen in sides for name in _deciding_forms(projected, system, chosen)}
    conventions = {*bound.system.conventions, *target.conventions}
    known = {*relevant(bound.family, known_names(projected))}
    facts = {*bound.family.facts} if is_of_adapters(bound.family) else {*_facts_read(projected)} & known
    return frozenset({_TIE, *forms, *conventions, *facts})


def written_options(projected: Projection) -> frozenset[str]:
    """The forms and facts that the target's config states, or with which it must agree.

    An attribute of the config depends on a name if it has another value without it, or with another value of it.
    """
    if projected.system.write.file is None:
        return frozenset()
    known = relevant(projected.source.family, known_names(projected))
    written = list(written_attributes(projected.system).values())
    compared = {fact for fact, text in projected.system.config.facts.items() if not text.isidentifier()}
    return frozenset(
        name for name in known if name in compared or any(_depends(one, name, known) for one in written)
    )


def _depends(attribute: str | Cases, name: str, known: Mapping[str, Any]) -> bool:
    texts = [attribute] if isinstance(attribute, str) else [rule for rule, _value in attribute]
    if not any(name in names_in(text) for text in texts):
        return False
    own, value = attribute_value(attribute, known), known[name]
    # no value, and another of the same kind: a value that is the default of an attribute is stated all the same
    others: list[object] = [None]
    if isinstance(value, bool):
        others.append(not value)
    elif isinstance(value, int | float):
        others.append(2 * value + 1)
    for other in others:
        try:
            if attribute_value(attribute, {**known, name: other}) != own:
                return True
        except WherryError:  # it has no value at all
            return True
    return False


def _deciding_forms(projected: Projection, system: System, chosen: Mapping[str, str]) -> Iterator[str]:
    own = _spelling(projected, system, chosen)
    for name, form in system.forms.items():
        others = ({**chosen, name: choice} for choice in form.choices if choice != chosen.get(name))
        if any(_spelling(projected, system, other) != own for other in others):
            yield name


def _spelling(projected: Projection, system: System, chosen: Mapping[str, str]) -> object:
    """The layouts of parameters, and the places of moments, with these choices; None if there are none."""
    bound = projected.source
    optimizers = system.optimizers.values() if bound.present.keys() - {"params"} else ()
    tables = (table for one in optimizers for table in (one.slots, one.scalars, one.written))
    places = [text for table in tables for texts in table.values() for text in texts]
    try:
        made = templates(bound.family, system, chosen, {"params": system.slots["params"]})
        moments = [replace_macros(text, system, chosen) for text in places]
    except WherryError:
        return None
    return [one for one in made if {*one.parameters} & bound.present["params"]], moments


def _facts_read(projected: Projection) -> Iterator[str]:
    """The facts that conventions and value words of both systems read, and checks if the systems differ."""
    source, target = projected.source.system, projected.system
    for system in (source, target):
        texts = [one.facts for one in system.conventions.values() if one.facts]
        if source is not target:
            yield from system.assumes
            texts += [row[0] for row in system.accepts]
            texts += [one for one in system.assumes.values() if isinstance(one, str)]
        yield from (name for text in texts for name in names_in(text))
        words = " ".join(word for row in system.layouts for word in row.words)
        yield from re.findall(r"[A-Za-z_]\w*", words)
