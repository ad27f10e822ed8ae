"""The tables of docs/reference/attributes.md: what becomes of each attribute of a Hugging Face config in each system.

They are made of tests/golden/attributes.json, which the walk over all attributes writes
(`python -m tests.support.walk.record`), and of tests/golden/judged.json, which says what the targets' own libraries
computed (`python -m tests.support.walk.judged`), so that nothing is converted or loaded here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from wherry.families import load_family

Values: TypeAlias = Mapping[str, Mapping[str, str]]  # value → what it changes, and the end in each system
Class: TypeAlias = Mapping[str, Values]  # attribute → values

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "attributes.json"
JUDGED = GOLDEN.with_name("judged.json")
BASE = "(base)"
_LONGEST = 24  # characters of a value that a cell shows


def attribute_tables() -> str:
    """One table for each family: attributes that change what a model computes, and below it those that do not."""
    walked, judged = json.loads(GOLDEN.read_text()), json.loads(JUDGED.read_text())
    sections = (_section(name, classes, judged) for name, classes in sorted(walked.items()))
    return "\n" + "\n".join(sections) + "\n"


def judged_attributes() -> str:
    """System, the values that are carried, and what judged how many of them."""
    walked, judged = json.loads(GOLDEN.read_text()), json.loads(JUDGED.read_text())
    cells: dict[str, list[tuple[str, str, str]]] = {}
    for classes in walked.values():
        for label, rows in classes.items():
            for system, attribute, value in carried(rows):
                cells.setdefault(system, []).append((label, attribute, value))
    lines, seen = [], 0
    for system, own in sorted(cells.items()):
        by = [
            f"{entry['by']}: {sum(_has(entry, *cell) for cell in own)}"
            for entry in _judges_of(judged, system)
        ]
        count = sum(not _why(judged, system, *cell) for cell in own)
        seen += count
        lines.append(f"| {system} | {len(own)} | {count} | {'<br>'.join(by)} |\n")
    every = sum(map(len, cells.values()))
    head = "| system | carried values | judged | by |\n| --- | --- | --- | --- |\n"
    return f"\n{head}{''.join(lines)}| all | {every} | {seen} ({100 * seen // every} %) | |\n"


def carried(rows: Class) -> Iterator[tuple[str, str, str]]:
    """System, attribute and value of each cell of a class that is carried and changes the outputs."""
    for attribute, by in rows.items():
        for value, row in by.items():
            if _matters(row):
                yield from ((system, attribute, value) for system, word in row.items() if word == "carried")


def _judges_of(judged: Mapping[str, Any], system: str) -> list[Mapping[str, Any]]:
    """The system's library, then the forward pass that is written from its source."""
    return [judged[name] for name in (system, f"{system}-written") if name in judged]


def _has(entry: Mapping[str, Any], label: str, attribute: str, value: str) -> bool:
    return value in entry["classes"].get(label, {}).get("judged", {}).get(attribute, ())


def _why(judged: Mapping[str, Any], system: str, label: str, attribute: str, value: str) -> str:
    """Why no judge has seen a cell; empty if one has."""
    entries = _judges_of(judged, system)
    if any(_has(entry, label, attribute, value) for entry in entries):
        return ""
    reasons = [
        entry["classes"].get(label, {}).get("unseen", {}).get(attribute, {}).get(value) for entry in entries
    ]
    return next(filter(None, reasons), "not yet judged")


def _unseen(classes: Mapping[str, Class], judged: Mapping[str, Any]) -> str:
    """A line for each system and reason, with the attributes or classes that have a value that no judge has seen."""
    by: dict[tuple[str, str], dict[str, None]] = {}
    for label, rows in classes.items():
        for system, attribute, value in carried(rows):
            if why := _why(judged, system, label, attribute, value):
                known = any(label in entry["classes"] for entry in _judges_of(judged, system))
                named = f"`{attribute}`" if known else f"all of {label}"
                by.setdefault((system, why.partition(":")[0]), {})[named] = None
    lines = [f"- {system}, {why}: {', '.join(names)}\n" for (system, why), names in sorted(by.items())]
    return f"\nSome carried values of these were seen by no judge:\n\n{''.join(lines)}" if lines else ""


def _section(family: str, classes: Mapping[str, Class], judged: Mapping[str, Any]) -> str:
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
    labels = ", ".join(f"`{label}`" for label in classes)
    return f"## {family}\n\nClasses: {labels}.\n\n{table}{_unseen(classes, judged)}\nNo effect: {without}.\n"


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
    others = [
        f"{word}: {', '.join(_values(ends, word))}" for word in ("refused", "required") if word in words
    ]
    return "; ".join([*(["carried"] if "carried" in words else []), *others])


def _values(ends: Sequence[tuple[str, str]], word: str) -> Iterator[str]:
    seen: set[str] = set()
    for text, found in ends:
        value = text if len(text) <= _LONGEST else text.partition(" with ")[0]
        shown = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
        if found == word and shown not in seen:
            seen.add(shown)
            yield f"`{shown}`"
