"""overview: what a family declares, side by side for its systems: layouts, facts, and the judges of its conversions.

`wherry layouts FAMILY` prints it, and pages of the documentation are generated from it. The judges are the oracles of
the tests (`families/tables/judged.toml`), which compare what two systems compute from one model; they judge the
families that come with wherry, not those of a user's file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from wherry import families
from wherry.families import side_by_side
from wherry.families.schema import Family, System
from wherry.families.templates import form_choices, templates
from wherry.layout.expr import names_in
from wherry.transform.schemes import schemes

_TABLES = Path(families.__file__).parent / "tables"
_JUDGED = _TABLES / "judged.toml"
_WITHOUT = _TABLES / "without_layouts.toml"
_BLOCKS = _TABLES / "maxtext_blocks.toml"
_NAMES = _TABLES / "maxtext_names.toml"
_LAYER_FORMS = ("scan_layers", "layer_stack")  # forms in which layers are one tensor or one each
_SCANNED = "true"
_JUDGES = {"forward": "forward pass", "library": "own library"}
_REFERENCE = "huggingface"  # the system with which the others are compared
WAYS = {"into": "to the system", "out_of": "from the system"}


def overview(family: Family, *, own: bool) -> dict[str, Any]:
    """Everything that a family declares, as `wherry layouts --json` prints it.

    Args:
        family: the family.
        own: whether it comes with wherry, so that its conversions have judges.
    """
    rows = read_judges().get(family.name, {}) if own else {}
    return {
        "family": family.name,
        "parameters": side_by_side(family),
        "facts": facts_side_by_side(family),
        "judged": {
            name: {way: judges(rows.get(name, {}), way) for way in WAYS}
            for name in family.systems
            if name != _REFERENCE
        },
    }


@cache
def read_judges() -> Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]]:
    """Family → system → direction → by what its conversions are judged."""
    rows = tomllib.loads(_JUDGED.read_text(encoding="utf-8"))
    return {
        family: {
            system: {way: tuple(names) for way, names in ways.items()} for system, ways in systems.items()
        }
        for family, systems in rows.items()
    }


@cache
def without_layouts() -> Mapping[str, str]:
    """Model type of a Hugging Face config → why no family declares it."""
    known = {kind for name in families.families() for kind in families.model_types(name)}
    rows = tomllib.loads(_WITHOUT.read_text(encoding="utf-8"))
    return {kind: reason for kind, reason in rows.items() if kind not in known}


@cache
def blocks_without_layouts() -> Mapping[str, str]:
    """Decoder block of MaxText that models of its own table have → why no family declares it."""
    return tomllib.loads(_BLOCKS.read_text(encoding="utf-8"))


@cache
def models_without_layouts() -> Mapping[str, str]:
    """Model of MaxText's own list that no family holds, though one may declare its decoder block → why."""
    return tomllib.loads(_NAMES.read_text(encoding="utf-8"))


def matrix() -> list[list[str]]:
    """Family × system: in which forms of its layers a system holds a family, after a row with the systems' names.

    `scanned, unrolled` stands for layers that are one tensor or one each, as the user chooses, `unrolled` for those
    that a system never scans, though it scans others; `yes` for one form. The last column names the schemes in which
    quantised weights of Hugging Face are read, and those that are written too.
    """
    rows = [families.load_family(name) for name in families.families()]
    names = list(dict.fromkeys(system for row in rows for system in row.systems))
    return [
        ["family", *names, "quantised"],
        *([row.name, *(_cell(row, name) for name in names), _schemes(row)] for row in rows),
    ]


def _cell(family: Family, name: str) -> str:
    system = family.systems.get(name)
    if system is None:
        return "-"
    choices = [form.choices for kind, form in system.forms.items() if kind in _LAYER_FORMS]
    if not choices:
        return "yes"
    return "scanned, unrolled" if any(_SCANNED in one for one in choices) else "unrolled"


def _schemes(family: Family) -> str:
    """Schemes by which the family's tensors in Hugging Face can be read and written: by published names alone."""
    system = family.systems.get(_REFERENCE)
    forms = next(form_choices(system, {})) if system else {}
    made = templates(family, system, forms, {"params": ("@",)}) if system else []
    keys = [re.sub(r"\{[^}]*\}", "0", one.layouts[0].text.partition("  [")[0]) for one in made]
    found = [
        one.name
        for one in schemes()
        if any(re.search(rule.tensors, key) for rule in one.written for key in keys)
    ]
    return ", ".join(found) or "-"


def judges(row: Mapping[str, tuple[str, ...]], way: str) -> str:
    """The judges of one direction in words."""
    return ", ".join(_JUDGES[name] for name in row.get(way, ())) or "not judged"


def facts_side_by_side(family: Family) -> dict[str, dict[str, Any]]:
    """Fact → its meaning, whether it changes what the model computes, and where each system has it."""
    return {
        name: {
            "about": fact.about,
            "outputs": fact.outputs,
            "systems": {one.name: _place_of(name, one) for one in family.systems.values()},
        }
        for name, fact in family.facts.items()
    }


def _place_of(fact: str, system: System) -> str:
    """Where a system has a fact: attributes of its config, one value of its software, or the weights."""
    if fact in system.config.facts:
        return ", ".join(sorted(names_in(system.config.facts[fact])))
    if fact in system.assumes:
        value = system.assumes[fact]
        return f"always {value if isinstance(value, str) else repr(value)}"
    return "in the weights" if fact in system.absorbs else "not stated"
