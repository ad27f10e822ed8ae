"""Values that a field must not have, and documents with one of them in the place of each value.

Numbers of thousands of digits are among them: Python refuses to read or to print more than 4,300 digits, with a
ValueError that is none of wherry's errors. A number that can be read may have a product, a sum or a text that cannot be
printed.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from infra.attacks.case import document

NUMBERS = (0, 1, 7, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = (
    "../outside", "../../../../etc/passwd", "/etc/passwd", "a/../../b", "..", ".", "", " ", "//", "a\0b",
    "a\nb: forged", "\x1b]0;title\x07", "\x9b31m", "a\rb", "\u202egnp.exe", "\u2066x\u2069", "\ufeff",
    "\u2028line", "x" * 255, "y" * 5000, "é" * 200, "\ud800", "con", "-rf", "--help", "$(touch EVIL_MARKER)",
    "`touch EVIL_MARKER`", "%s%n", "{0.__class__}", "gs://127.0.0.1/x", "http://127.0.0.1:9/x",
    "file:///etc/passwd", "a\\b", "~root", "__class__", "a" + "/b" * 300, "model.safetensors", "wherry.json",
    ".wherry-out.lease", "[red]MARKUP[/red]", "'; DROP TABLE nodes; --",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, *NUMBERS[5:], 10**400, 1e308, float("nan"), float("inf"), 0.5, [], {}, [[]], [None] * 70,
    "0", "x" * 70_000, [2**40, 2**40], [-1], [0, 2**62], {"a": {"a": {}}}, [1] * 1000, "float32", "|O", "<f4",
    "os.system", *NAMES[:14],
)  # fmt: skip
LONG = "9" * 5000  # int() refuses it
DIGITS = {
    "long": LONG,
    "negative": f"-{LONG}",
    "product": "9" * 4000,  # two of them have a product that cannot be printed
    "point": f"{LONG}.0",
    "fraction": f"0.{LONG}",
    "exponent": f"1e{LONG}",
    "wide": "9" * 20,  # no number of 64 bits
}
_MARK = "\ue000"
_NUMBER = re.compile(rb"(?<=[=:\s])\d+(?=\s)")  # in YAML and gin


# ---- One value of a document


def places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a document, objects and arrays included."""
    listed = enumerate(document) if isinstance(document, list) else ()
    for key, value in document.items() if isinstance(document, dict) else listed:
        yield (*above, key)
        yield from places(value, (*above, key))


def value_at(document: Any, place: tuple[Any, ...]) -> Any:
    """The value at a place."""
    for key in place:
        document = document[key]
    return document


def replace_at(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place."""
    found = copy.deepcopy(document)
    value_at(found, place[:-1])[place[-1]] = value
    return found


def duplicate_at(document: Any, place: tuple[Any, ...], value: Any) -> str:
    """JSON in which the name at a place is stated once more, behind it, with another value."""
    found, again = copy.deepcopy(document), "\ue000 again"
    parent = value_at(found, place[:-1])
    rows = [row for key in parent for row in ((key, parent[key]), (again, value))[: 1 + (key == place[-1])]]
    parent.clear()
    parent.update(rows)
    return json.dumps(found).replace(json.dumps(again), json.dumps(place[-1]))


def lie(sound: Any, place: tuple[Any, ...], generator: random.Random) -> Any:
    """A document with one change at a place: another value, another name, or nothing."""
    kind = generator.random()
    if kind < 0.7:
        return replace_at(sound, place, generator.choice(VALUES))
    found = copy.deepcopy(sound)
    parent = value_at(found, place[:-1])
    if kind >= 0.85:
        del parent[place[-1]]
        return found
    name = generator.choice(NAMES)
    if isinstance(parent, dict):
        parent[name] = parent.pop(place[-1])
    return found


def documents(sound: Any, count: int, seed: str) -> Iterator[Any]:
    """So many documents that lie in one place; the same ones for the same seed."""
    generator = random.Random(seed)
    where = list(places(sound))
    for _number in range(count if where else 0):
        yield lie(sound, generator.choice(where), generator)


def texts_with_a_name_twice(sound: Any, seed: str, most: int = 6) -> Iterator[bytes]:
    """The document with one name stated twice, first or last with another value; and with odd beginnings and ends."""
    generator = random.Random(seed)
    named = [place for place in places(sound) if isinstance(place[-1], str)]
    for place in generator.sample(named, min(most, len(named))):
        yield duplicate_at(sound, place, generator.choice(VALUES)).encode("utf-8", "surrogatepass")
    if named:
        text = json.dumps(sound)
        yield from (
            b"\xef\xbb\xbf" + text.encode(),
            text.encode("utf-16"),
            text.encode() + b"\0",
            text.encode() + b"{}",
        )


# ---- Digits


def numbers(sound: Any) -> list[tuple[Any, ...]]:
    """The place of each whole number of a document."""
    return [where for where in places(sound) if type(value_at(sound, where)) is int]


def with_digits(sound: Any, where: Sequence[tuple[Any, ...]], digits: str) -> bytes:
    """JSON with these digits at places: json.dumps could not print the number."""
    for place in where:
        sound = replace_at(sound, place, _MARK)
    return json.dumps(sound).replace(json.dumps(_MARK), digits).encode("utf-8", "surrogatepass")


def texts_of_digits(sound: Any, forms: Sequence[str] = tuple(DIGITS)) -> Iterator[tuple[str, bytes]]:
    """Name and JSON: each number in the digits of one form, and all of them."""
    for form in forms:
        yield f"all-{form}", with_digits(sound, numbers(sound), DIGITS[form])
    for number, where in enumerate(numbers(sound)):
        form = forms[number % len(forms)]
        yield f"{'.'.join(map(str, where))}-{form}", with_digits(sound, [where], DIGITS[form])


def texts_of_numbers(file: Path, values: Sequence[str], most: int) -> Iterator[bytes]:
    """A config with another number in one place; nothing if it has no numbers, or is no config."""
    generator = random.Random(file.name)
    if file.suffix in (".yml", ".yaml", ".gin"):
        text = file.read_bytes()
        spans = [found.span() for found in _NUMBER.finditer(text)]
        for begin, end in generator.sample(spans, min(most, len(spans))):
            yield text[:begin] + generator.choice(values).encode() + text[end:]
        return
    sound = document(file)
    where = numbers(sound)
    for one in generator.sample(where, min(most, len(where))):
        yield with_digits(sound, [one], generator.choice(values))
