"""The tables of docs/reference/attributes.md: what becomes of each attribute of a Hugging Face config in each system.

They are made of tests/golden/attributes.json, which the walk over all attributes writes
(`python -m tests.support.walk.record`), so that nothing is converted or loaded here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from wherry.families import load_family

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Values: TypeAlias = Mapping[str, Mapping[str, str]]  # value → what it changes, and the end in each system
    Class: TypeAlias = Mapping[str, Values]  # attribute → values

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "attributes.json"
BASE = "(base)"
_LONGEST = 24  # characters of a value that a cell shows


def attribute_tables() -> str:
    """One table for each family: attributes that change what a model computes, and below it those that do not."""
    walked = json.loads(GOLDEN.read_text())
    return "\n" + "\n".join(_section(name, classes) for name, classes in sorted(walked.items())) + "\n"


def _section(family: str, classes: Mapping[str, Class]) -> str:
    walked = {
        system for rows in classes.values() for by in rows.values() for row in by.values() for system in row
    }
    systems = [name for name in load_family(family).systems if name in walked]  # others are only read
    names = sorted({name for rows in classes.values() for name in rows} - {BASE})
    there = {name: {label: rows[name] for label, rows in classes.items() if name in rows} for name in names}
    changing = [
        name for name in names if any(_matters(row) for by in there[name].values() for row in by.values())
    ]
    cells = [["attribute", *systems], ["---"] * (len(systems) + 1)]
    cells += [[f"`{name}`", *(_cell(there[name], system) for system in systems)] for name in changing]
    table = "".join(f"| {' | '.join(line)} |\n" for line in cells)
    without = ", ".join(f"`{name}`" for name in names if name not in changing)
    told = ", ".join(f"`{label}`" for label in classes)
    return f"## {family}\n\nClasses: {told}.\n\n{table}\nNo effect: {without}.\n"


def _matters(row: Mapping[str, str]) -> bool:
    return row["changes"] != "no"


def _cell(rows: Mapping[str, Values], system: str) -> str:
    """The word for all classes that the system has, or each word with its classes."""
    by: dict[str, list[str]] = {}
    had = {label: values for label, values in rows.items() if any(system in row for row in values.values())}
    for label, values in had.items():
        words = [(text, row[system]) for text, row in values.items() if _matters(row)]
        by.setdefault(_word(words) if words else "no effect", []).append(label)
    if len(by) == 1:
        return next(iter(by))
    return "<br>".join(f"{word} ({', '.join(labels)})" for word, labels in by.items())


def _word(ends: Sequence[tuple[str, str]]) -> str:
    words = {word for _text, word in ends}
    if words == {"refused"}:
        return "checked"
    if len(words) == 1:
        return next(iter(words))
    others = [f"{word}: {', '.join(_values(ends, word))}" for word in ("refused", "asked") if word in words]
    return "; ".join([*(["carried"] if "carried" in words else []), *others])


def _values(ends: Sequence[tuple[str, str]], word: str) -> Iterator[str]:
    seen: set[str] = set()
    for text, found in ends:
        value = text if len(text) <= _LONGEST else text.partition(" with ")[0]
        shown = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
        if found == word and shown not in seen:
            seen.add(shown)
            yield f"`{shown}`"
