"""Line numbers of the fields of a TOML file, for errors: the standard parser does not return them.

The file has been parsed before, so headers and keys are well-formed. Only in multi-line strings may a line look like a
key; they are skipped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Possessive: a line of thousands of spaces would be tried in every division.
_HEADER = re.compile(r"\s*+(\[\[?+)([^\]]++)\]\]?+\s*+(?:#.*)?")
_KEY = re.compile(
    r"\s*+((?:[\w-]++|\"[^\"]*+\"|'[^']*+')(?:\s*+\.\s*+(?:[\w-]++|\"[^\"]*+\"|'[^']*+'))*+)\s*+="
)
_PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")
_FENCES = ('"""', "'''")

Path = tuple[str | int, ...]


def where(lines: Mapping[Path, int], at: Path, env: str | None) -> str:
    """A field for display: `line 12, routes.night.targets[0].format`.

    Args:
        lines: those of the file; see `lines_of`.
        at: the path of the field.
        env: the environment whose table overrides fields.
    """
    name, line = dotted_name(at), line_at(lines, at, env)
    return f"line {line}, {name}" if line else name


def line_at(lines: Mapping[Path, int], at: Path, env: str | None) -> int | None:
    """The line of a field, or of the nearest table around it; None if neither is in the file.

    Args:
        lines: those of the file; see `lines_of`.
        at: the path of the field; that of an array of tables means its first table.
        env: the environment whose table overrides fields.
    """
    for depth in range(len(at), 0, -1):
        for path in (at[:depth], (*at[:depth], 0)):
            line = (lines.get(("env", env, *path)) if env else None) or lines.get(path)
            if line is not None:
                return line
    return None


def dotted_name(at: Path) -> str:
    """A path of keys and indices as one dotted name."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).lstrip(".")


def lines_of(text: str) -> dict[Path, int]:
    """The line, from 1, of each key and table."""
    found: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    fence: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if fence is not None:
            fence = None if fence in line else fence
        elif header := _HEADER.fullmatch(line):
            table = _table(_parts(header.group(2)), counts, array=header.group(1) == "[[")
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_parts(key.group(1))), number)
            fence = next((one for one in _FENCES if line.count(one) % 2), None)
    return found


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
