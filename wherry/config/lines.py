"""Line numbers of the fields of a TOML file, for errors: the standard parser does not return them.

The file has been parsed before, so headers and keys are well-formed. Only in multi-line strings may a line look like a
key; they are skipped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")
_FENCES = ('"""', "'''")

Path = tuple[str | int, ...]


def where(text: str, at: Path, env: str | None) -> str:
    """A field for display: `line 12, routes.night.targets[0].format`."""
    name = dotted_name(at)
    line = (line_of(text, ("env", env, *at)) if env else None) or line_of(text, at)
    short = at
    while line is None and len(short) > 1:
        short = short[:-1]
        line = (line_of(text, ("env", env, *short)) if env else None) or line_of(text, short)
    return f"line {line}, {name}" if line else name


def dotted_name(at: Path) -> str:
    """A path of keys and indices as one dotted name."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).lstrip(".")


def line_of(text: str, at: Path) -> int | None:
    """The line, from 1, of a key or table; None where the file has no such line."""
    return next((number for number, path in _paths(text) if path == at), None)


def _paths(text: str) -> Iterator[tuple[int, Path]]:
    """Every header and key with its line and its path from the top."""
    table: Path = ()
    counts: dict[Path, int] = {}
    fence: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if fence is not None:
            fence = None if fence in line else fence
            continue
        if header := _HEADER.fullmatch(line):
            table = _table(_parts(header.group(2)), counts, array=header.group(1) == "[[")
            yield number, table
        elif key := _KEY.match(line):
            yield number, (*table, *_parts(key.group(1)))
            opened = next((one for one in _FENCES if line.count(one) % 2), None)
            fence = opened


def _table(parts: list[str], counts: dict[Path, int], *, array: bool) -> Path:
    """The path of a header, with the index of each array of tables on the way."""
    path: Path = ()
    for position, part in enumerate(parts):
        path = (*path, part)
        last = position == len(parts) - 1
        if last and array:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _parts(text: str) -> list[str]:
    return [part.strip("\"'") for part in _PART.findall(text)]
