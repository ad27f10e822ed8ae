"""Values that a field must not have, and documents with one of them in the place of each value."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

NUMBERS = (0, 1, 7, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = (
    "../outside",
    "../../../../etc/passwd",
    "/etc/passwd",
    "a/../../b",
    "..",
    ".",
    "",
    " ",
    "//",
    "a\0b",
    "a\nb: forged",
    "\x1b]0;title\x07",
    "\x9b31m",
    "a\rb",
    "\u202egnp.exe",
    "\u2066x\u2069",
    "\ufeff",
    "\u2028line",
    "x" * 255,
    "y" * 5000,
    "é" * 200,
    "\ud800",
    "con",
    "-rf",
    "--help",
    "$(touch EVIL_MARKER)",
    "`touch EVIL_MARKER`",
    "%s%n",
    "{0.__class__}",
    "gs://127.0.0.1/x",
    "http://127.0.0.1:9/x",
    "file:///etc/passwd",
    "a\\b",
    "~root",
    "__class__",
    "a" + "/b" * 300,
    "model.safetensors",
    "wherry.json",
    ".wherry-out.lease",
    "[red]MARKUP[/red]",
    "'; DROP TABLE nodes; --",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    *NUMBERS[5:],
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    0.5,
    [],
    {},
    [[]],
    [None] * 70,
    "0",
    "x" * 70_000,
    [2**40, 2**40],
    [-1],
    [0, 2**62],
    {"a": {"a": {}}},
    [1] * 1000,
    "float32",
    "|O",
    "<f4",
    "os.system",
    *NAMES[:14],
)


def places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a document, objects and arrays included."""
    rows = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in rows:
        yield (*above, key)
        yield from places(value, (*above, key))


def replace_at(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place."""
    found = copy.deepcopy(document)
    _parent(found, place)[place[-1]] = value
    return found


def without(document: Any, place: tuple[Any, ...]) -> Any:
    """A copy without what is at a place."""
    found = copy.deepcopy(document)
    del _parent(found, place)[place[-1]]
    return found


def rename_at(document: Any, place: tuple[Any, ...], name: str) -> Any:
    """A copy in which a key has another name; the same where the place is in an array."""
    found = copy.deepcopy(document)
    parent = _parent(found, place)
    if isinstance(parent, dict):
        parent[name] = parent.pop(place[-1])
    return found


def duplicate_at(document: Any, place: tuple[Any, ...], value: Any) -> str:
    """JSON in which the name at a place is stated once more, behind it, with another value."""
    found, again = copy.deepcopy(document), "\ue000 again"
    parent = _parent(found, place)
    rows = [row for key in parent for row in ((key, parent[key]), (again, value))[: 1 + (key == place[-1])]]
    parent.clear()
    parent.update(rows)
    return json.dumps(found).replace(json.dumps(again), json.dumps(place[-1]))


def value_at(document: Any, place: tuple[Any, ...]) -> Any:
    """The value at a place."""
    return _parent(document, place)[place[-1]]


def _parent(document: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        document = document[key]
    return document


def documents(sound: Any, count: int, seed: str) -> Iterator[tuple[str, Any]]:
    """So many documents that lie in one place, each with a number; the same ones for the same seed."""
    generator = random.Random(seed)
    where = list(places(sound))
    for number in range(count if where else 0):
        yield f"{number}", lie(sound, generator.choice(where), generator)


def lie(sound: Any, place: tuple[Any, ...], generator: random.Random) -> Any:
    """A document with one change at a place."""
    kind = generator.random()
    if kind < 0.7:
        return replace_at(sound, place, generator.choice(VALUES))
    if kind < 0.85:
        return rename_at(sound, place, generator.choice(NAMES))
    return without(sound, place)
