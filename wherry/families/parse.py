"""Reading a family from TOML; the form is described in `wherry.families.schema`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any, TypeVar

from wherry.cures import Argument, Blank, Cure
from wherry.errors import UsageError, describe_exception
from wherry.families.schema import (
    ConfigRules,
    Convention,
    Fact,
    Family,
    Form,
    Optimizer,
    Parameter,
    Row,
    Stack,
    System,
    Write,
)
from wherry.layout.expr import names_in
from wherry.layout.memory_names import MemoryNames, MergedNames, memory_names

_Made = TypeVar("_Made")
_HUGGINGFACE = "huggingface"
_FORM, _SAVED, _IN_MEMORY = "names", "saved", "memory"
_ABSENT = "-/"  # at the start of a key path that does not exist
_VALUES = frozenset({"assumes", "defaults", "fixed", "usual"})  # tables in which `false` is a value


def family_of(data: Mapping[str, Any], where: str) -> Family:
    """Read a family from parsed TOML.

    Raises:
        UsageError: a field is missing, unknown or of the wrong form.
    """
    known = {
        "name",
        "about",
        "model_types",
        "distinction",
        "yields_to",
        "axes",
        "constants",
        "facts",
        "parameters",
        "systems",
    }
    _no_others(data, known, where)
    try:
        family = Family(
            name=str(data["name"]),
            about=str(data["about"]),
            model_types=tuple(data.get("model_types", ())),
            distinction=data.get("distinction"),
            yields_to=data.get("yields_to"),
            axes=_texts(data["axes"]),
            constants={name: int(value) for name, value in data.get("constants", {}).items()},
            parameters={name: _parameter(row, where) for name, row in data["parameters"].items()},
            facts={name: _fact(row, where) for name, row in data.get("facts", {}).items()},
            systems={
                name: _system(name, _alike(row, data["systems"]), f"{where}: {name}")
                for name, row in data["systems"].items()
            },
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{where}: invalid family definition: {describe_exception(error)}",
            cure="correct the file; wherry/families/schema.py describes its fields",
        ) from error
    if _HUGGINGFACE in family.systems:
        system = _with_memory_names(family.systems[_HUGGINGFACE], family.model_types)
        family = replace(family, systems={**family.systems, _HUGGINGFACE: system})
    _require_facts(family, where)
    if family.distinction is not None and _HUGGINGFACE not in family.systems:
        raise UsageError(
            f"{where}: distinction reads a Hugging Face config, and there is no such system",
            cure=f"remove it, or declare [systems.{_HUGGINGFACE}]",
        )
    return family


def merge_tables(
    base: Mapping[str, Any], changes: Mapping[str, Any], *, values: bool = False
) -> dict[str, Any]:
    """Tables are merged, anything else is replaced; `false` removes a row, except in tables of values."""
    rows = dict(base)
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(rows.get(name), dict):
            rows[name] = merge_tables(rows[name], value, values=values or name in _VALUES)
        elif value is False and not values:
            rows.pop(name, None)
        else:
            rows[name] = value
    return rows


def _alike(row: Mapping[str, Any], systems: Mapping[str, Any]) -> dict[str, Any]:
    """A system with the config of the one that it is like."""
    other = systems[row["like"]] if "like" in row else {}
    return merge_tables({part: other[part] for part in ("config", "write") if part in other}, row)


def _require_facts(family: Family, where: str) -> None:
    """Every fact is declared, and every system says of every fact that changes outputs what it does with it."""
    outputs = {name for name, fact in family.facts.items() if fact.outputs}
    for system in family.systems.values():
        said = {*system.config.facts, *system.assumes, *system.absorbs}
        for names, wrong in (
            (said - set(family.facts), "facts that [facts] does not declare"),
            (outputs - said, "no value for facts that change outputs"),
        ):
            if names:
                raise UsageError(
                    f"{where}: {system.name}: {wrong}: {', '.join(sorted(names))}",
                    cure="declare each in [facts], and in each system under config.facts, assumes or absorbs",
                )


def _with_memory_names(system: System, model_types: Sequence[str]) -> System:
    """A system with both forms of names, if the models of these types have two and it declares none of its own."""
    own = [memory_names()[kind] for kind in model_types if kind in memory_names()]
    changed = {
        row: twins for row in system.layouts if (twins := list(_rows_in_memory(row, system.layouts, own)))
    }
    if not changed or _FORM in system.forms or {_SAVED, _IN_MEMORY} & {*system.macros, *system.stacks}:
        return system
    layouts = [replace(row, key=f"<{_SAVED}>{row.key}") if row in changed else row for row in system.layouts]
    layouts += dict.fromkeys(twin for twins in changed.values() for twin in twins)
    return replace(
        system,
        layouts=tuple(layouts),
        forms={**system.forms, _FORM: Form((_SAVED, _IN_MEMORY))},
        macros={
            **system.macros,
            _SAVED: {"by": _FORM, _SAVED: "", _IN_MEMORY: _ABSENT},
            _IN_MEMORY: {"by": _FORM, _SAVED: _ABSENT, _IN_MEMORY: ""},
        },
    )


def _rows_in_memory(row: Row, rows: Iterable[Row], names: Iterable[MemoryNames]) -> Iterator[Row]:
    """The rows in memory that hold what a row holds; none if its name is the same there."""
    for own in names:
        merged = next((twin for one in own.merged if (twin := _merged_row(row, rows, one))), None)
        twin = merged or row
        key = own.rename(twin.key)
        if key != row.key:
            yield replace(twin, key=f"<{_IN_MEMORY}>{key}")
            return


def _merged_row(row: Row, rows: Iterable[Row], merge: MergedNames) -> Row | None:
    """The row in memory of all that are merged with this one; None if they are not all there, and alike."""
    place = next((found for text in merge.saved if (found := _expert_place(row, text))), None)
    if place is None:
        return None
    whole = [one for text in merge.saved for one in rows if _expert_place(one, text) == place]
    if len(whole) != len(merge.saved) or any(
        one.words != row.words or len(one.parameters) > 1 for one in whole
    ):
        return None
    start, expert = place
    return Row(
        tuple(name for one in whole for name in one.parameters),
        start + merge.memory,
        tuple(f"{expert} {axes}" for one in whole for axes in one.axes),
        along=1 if len(whole) > 1 else 0,
        words=row.words,
    )


def _expert_place(row: Row, end: str) -> tuple[str, str] | None:
    """The start of a row's name and its axis of experts, if the name ends so."""
    before, after = end.split("*")
    found = re.fullmatch(rf"(.*){re.escape(before)}\{{([^{{}}]+)\}}{re.escape(after)}", row.key)
    return (found[1], found[2]) if found else None


def _acceptance_rule(where: str, rule: str, reason: str, cure: str = "") -> tuple[str, str, str]:
    """A rule, its reason, which may name facts of the rule in braces, and the option that helps, if one does."""
    try:
        named = {name for _text, name, _format, _conversion in Formatter().parse(reason) if name is not None}
    except ValueError:
        named = {reason}
    if not named <= names_in(rule):
        raise UsageError(
            f"{where}: invalid reason {reason!r}",
            cure="name in braces only facts that the rule reads, and write {{ for a brace",
        )
    if cure and not re.fullmatch(r"--[a-z-]+ \S+", cure):
        raise UsageError(
            f"{where}: invalid cure {cure!r}",
            cure=Cure("write one option with its value, such as {}", Argument("set", Blank("NAME=VALUE"))),
        )
    return rule, reason, cure


def _parameter(row: Any, where: str) -> Parameter:
    if isinstance(row, str):
        return Parameter(tuple(row.split()))
    _no_others(row, {"axes", "optional", "tie", "part"}, where)
    optional = bool(row.get("optional", "tie" in row or "part" in row))
    return Parameter(tuple(row["axes"].split()), optional, row.get("tie"), row.get("part"))


def _fact(row: Any, where: str) -> Fact:
    if isinstance(row, str):
        return Fact(row)
    _no_others(row, {"about", "when", "outputs", "named", "fits"}, where)
    outputs = bool(row.get("outputs", True))
    return Fact(str(row["about"]), row.get("when"), outputs, _texts(row.get("named", {})), row.get("fits"))


def _system(name: str, row: Mapping[str, Any], where: str) -> System:
    known = (set(System.__slots__) | {"bare"}) - {"name", "empties", "zeros", "bare_forms"}
    bare = row.get("bare", {})
    _no_others(bare, {"empties", "zeros", "forms"}, where)
    _no_others(row, known, where)
    return System(
        name=name,
        about=str(row["about"]),
        formats=tuple(row["formats"]),
        slots={slot: _several(text) for slot, text in row["slots"].items()},
        layouts=tuple(_row(name, one, where) for name, one in row["layouts"].items()),
        forms={key: _form(one) for key, one in row.get("forms", {}).items()},
        conventions={key: _build(Convention, one, where) for key, one in row.get("conventions", {}).items()},
        by_format=row.get("by_format", {}),
        stacks={key: _build(Stack, one, where) for key, one in row.get("stacks", {}).items()},
        macros={key: _texts(one) for key, one in row.get("macros", {}).items()},
        optimizers={key: _optimizer(one, where) for key, one in row.get("optimizers", {}).items()},
        scalars={key: _several(one) for key, one in row.get("scalars", {}).items()},
        tied=_texts(row.get("tied", {})),
        copies={key: _several(one) for key, one in row.get("copies", {}).items()},
        untied=_texts(row.get("untied", {})),
        empties=_texts(bare.get("empties", {})),
        zeros=_texts(bare.get("zeros", {})),
        bare_forms=_texts(bare.get("forms", {})),
        names=_texts(row.get("names", {})),
        ignore=tuple(_ignore_rule(*one) for one in row.get("ignore", [])),
        apart=tuple((str(start), str(mark), str(reason)) for start, mark, reason in row.get("apart", [])),
        towers=tuple((str(start), str(what)) for start, what in row.get("towers", [])),
        accepts=tuple(_acceptance_rule(where, *map(str, one)) for one in row.get("accepts", [])),
        assumes=row.get("assumes", {}),
        presumes=_texts(row.get("presumes", {})),
        absorbs=_texts(row.get("absorbs", {})),
        config=_config(row.get("config", {}), where),
        write=_write(row.get("write", {}), where),
        like=row.get("like"),
        yields_to=row.get("yields_to"),
    )


def _ignore_rule(pattern: str, reason: str, when: str = "True") -> tuple[str, str, str]:
    return str(pattern), str(reason), str(when)


def _config(row: Mapping[str, Any], where: str) -> ConfigRules:
    _no_others(row, set(ConfigRules.__slots__), f"{where}: config")
    return ConfigRules(
        defaults=row.get("defaults", {}),
        sizes=_texts(row.get("sizes", {})),
        facts=_texts(row.get("facts", {})),
        require=tuple((str(rule), str(reason)) for rule, reason in row.get("require", [])),
        usual=row.get("usual", {}),
        implied=_texts(row.get("implied", {})),
        ignored={str(name): reason for reason, names in row.get("ignored", {}).items() for name in names},
        table=row.get("table"),
        run=tuple(row.get("run", ())),
    )


def _write(row: Mapping[str, Any], where: str) -> Write:
    _no_others(row, set(Write.__slots__), f"{where}: write")
    attributes = row.get("attributes", {})
    return Write(
        file=row.get("file"),
        nested=bool(row.get("nested", False)),
        fixed=row.get("fixed", {}),
        attributes={
            name: one if isinstance(one, str) else tuple((str(rule), value) for rule, value in one)
            for name, one in attributes.items()
        },
        replaced=tuple(row.get("replaced", ())),
        nullable=tuple(row.get("nullable", ())),
        tabled={form: tuple(choices) for form, choices in row.get("tabled", {}).items()},
        defaults=row.get("defaults", {}),
        token_ids=tuple(row.get("token_ids", ())),
        notes=tuple((str(rule), str(text)) for rule, text in row.get("notes", [])),
        words=_texts(row.get("words", {})),
        snippet=row.get("snippet", ""),
    )


def _row(names: str, row: Any, where: str) -> Row:
    parameters = tuple(names.split("+"))
    if isinstance(row, list) and len(row) >= 2 and len(parameters) == 1:  # noqa: PLR2004  key path and axes
        key, axes, *words = (str(part) for part in row)
        return Row(parameters, key, (axes,), words=tuple(words))
    if isinstance(row, dict):
        _no_others(row, {"key", "axes", "along", "words", "each"}, where)
        axes = _several(row["axes"])
        if len(axes) == len(parameters):
            along, words = int(row.get("along", 0)), tuple(row.get("words", ()))
            return Row(parameters, row["key"], axes, along, words, row.get("each"))
    raise UsageError(f"{where}: invalid layout of {names}", cure="write [key path, axes, word …]")


def _form(row: Any) -> Form:
    if isinstance(row, list):
        return Form(tuple(str(choice) for choice in row))
    return Form(tuple(row["choices"]), row.get("config"), bool(row.get("kept", False)))


def _optimizer(row: Mapping[str, Any], where: str) -> Optimizer:
    _no_others(row, {"slots", "scalars", "lists", "empties", "without", "filler", "written"}, where)
    return Optimizer(
        {slot: _several(text) for slot, text in row["slots"].items()},
        {name: _several(text) for name, text in row.get("scalars", {}).items()},
        tuple(row.get("lists", ())),
        _texts(row.get("empties", {})),
        {slot: frozenset(text.split()) for slot, text in row.get("without", {}).items()},
        row.get("filler"),
        {name: _several(text) for name, text in row.get("written", {}).items()},
    )


def _build(kind: type[_Made], row: Mapping[str, Any], where: str) -> _Made:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    try:
        return kind(**fields)
    except TypeError as error:
        raise UsageError(f"{where}: invalid {kind.__name__.lower()}: {error}") from error


def _several(text: Any) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else tuple(str(one) for one in text)


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in row.items()}


def _no_others(row: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = set(row) - known
    if unknown:
        raise UsageError(
            f"{where}: unknown field {', '.join(sorted(unknown))}",
            cure=f"choose one of: {', '.join(sorted(known))}",
        )
