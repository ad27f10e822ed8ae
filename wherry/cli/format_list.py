"""How the command line and the docs describe formats: whether each is read and written, what it holds, what loads it.

All of it comes from the `Format` rows; this module mentions no single format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from wherry.cli.say import print_json, print_rows, print_table, say
from wherry.formats.registry import rewrites

if TYPE_CHECKING:
    from wherry.formats.format import Format

COLUMNS = ("format", "system", "read", "written", "holds", "loaded by")
_SIZES = (8, 16, 32, 64)
# Names of sets of dtypes, for formats that hold the whole set.
_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("integers", tuple(f"{sign}int{size}" for sign in ("", "u") for size in _SIZES)),
    ("4-bit integers", ("int4", "uint4")),
    ("2-bit integers", ("int2", "uint2")),
    ("float16 to 64", ("float16", "float32", "float64")),
    ("complex", ("complex64", "complex128")),
)
# Common prefixes of dtypes, for formats that hold some of them.
_KINDS = (("float8", "float8_"), ("float6", "float6_"), ("float4", "float4_"), ("blocks", "ggml:"))
_PARTS = ("zero_size", "values", "empties", "companions")
_WORDS = {
    "values": "values",
    "empties": "empty nodes",
    "companions": "companion files",
    "stated": "config and tokenizer as metadata",
}


def show_formats(rows: list[Format], *, json_: bool) -> None:
    """Print the table of formats."""
    if json_:
        print_json([_format_json(row) for row in rows])
        return
    by_name = sorted(rows, key=lambda row: row.name)
    groups = (
        ("Formats of systems", [row for row in by_name if row.system]),
        ("Containers", [row for row in by_name if not row.system]),
    )
    for heading, group in groups:
        say(heading)
        print_table(("format", "is", "wherry"), ([row.name, row.title, _uses(row)] for row in group))
    say("`wherry formats NAME` shows what a format holds, its options and what loads it.")


def _uses(row: Format) -> str:
    words = ["reads"] * row.readable + ["writes"] * (row.is_written)
    return ", ".join(words) or "recognises"


def format_cells(row: Format) -> list[str]:
    """One row of the table of formats; `COLUMNS` names the cells."""
    read = "yes" if row.readable else "refused"
    return [
        row.name,
        row.title,
        read,
        "yes" if row.is_written else "no",
        held_words(row),
        row.loaded_by or "–",
    ]


def held_words(row: Format) -> str:
    """A short description of what a writable format holds."""
    if not row.is_written:
        return "–"
    keys = {None: "trees", 1: "flat names"}.get(row.holds.depth, f"trees {row.holds.depth} deep")
    others = [word for name, word in _WORDS.items() if getattr(row.holds, name)]
    return "; ".join([keys, ", ".join(dtype_words(row.holds.dtypes)), *filter(None, [", ".join(others)])])


def dtype_words(names: Iterable[str]) -> list[str]:
    """A short description of a set of dtypes: complete groups by their names, the others one by one."""
    left, words = set(names), list[str]()
    for word, group in _GROUPS:
        if left.issuperset(group):
            words.append(word)
            left.difference_update(group)
    for word, start in _KINDS:
        some = {name for name in left if name.startswith(start)}
        left -= some
        words += [f"{word} ({', '.join(sorted(name.removeprefix(start) for name in some))})"] if some else []
    return words + sorted(left)


def show_format(row: Format, *, json_: bool) -> None:
    """Print what one format holds, what loads it, and its options."""
    if json_:
        print_json(_format_json(row))
        return
    depth = row.holds.depth
    kinds = [name.replace("_", " ") for name in _PARTS if getattr(row.holds, name)]
    print_rows([
        ("name", row.name),
        ("system", row.title),
        ("aliases", ", ".join(row.aliases)),
        ("refines", ", ".join(row.refines)),
        ("read", "yes" if row.readable else "recognised, but not supported"),
        ("written", "yes" if row.is_written else "no"),
        ("loaded by", row.loaded_by),
        ("is", "one file" if row.single_file else "a folder"),
        ("key paths", "" if not row.is_written else "of any depth" if depth is None else f"of at most {depth} parts"),
        ("dtypes", ", ".join(dtype_words(row.holds.dtypes))),
        ("holds", ", ".join(kinds) if row.is_written else ""),
        ("step 1000 is", row.step_folder(1000) if row.step_folder else ""),
        ("commit member", ", ".join(row.commit_members)),
    ])  # fmt: skip
    for name, option in row.options.items():
        choices = f" ({' | '.join(option.choices)})" if option.choices else ""
        say(f"  --set {name}={option.default}{choices}  {option.help}")
    for name, one in rewrites(row.name).items():
        value = f"  (VALUE: {one.value})" if one.value else ""
        say(f"  rewrite --as {name}{'[=VALUE]' if one.value else ''}  {one.help}{value}")


def _format_json(row: Format) -> dict[str, Any]:
    return {
        "name": row.name,
        "title": row.title,
        "aliases": list(row.aliases),
        "refines": list(row.refines),
        "read": row.readable,
        "written": row.is_written,
        "single_file": row.single_file,
        "dtypes": sorted(row.holds.dtypes),
        "depth": row.holds.depth,
        "holds": [name for name in _PARTS if getattr(row.holds, name)],
        "loaded_by": row.loaded_by,
        "commit_members": list(row.commit_members),
        "rewrites": {
            name: {"help": one.help, "value": one.value} for name, one in rewrites(row.name).items()
        },
        "options": {name: asdict(option) for name, option in row.options.items()},
    }
