"""What the command line prints about formats."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from wherry.console import print_json, print_rows, print_table

if TYPE_CHECKING:
    from wherry.format import Format


def show_formats(rows: list[Format], *, json_: bool) -> None:
    """What is read and written."""
    if json_:
        print_json([_format_json(row) for row in rows])
        return
    cells = (
        [
            row.name,
            row.title,
            "yes" if row.readable else "refused",
            "yes" if row.create else "no",
            row.loaded_by,
        ]
        for row in rows
    )
    print_table(["format", "system", "read", "written", "loaded by"], cells)


def show_format(row: Format, *, json_: bool) -> None:
    """What one format holds and which options it takes."""
    if json_:
        print_json(_format_json(row))
        return
    data = _format_json(row)
    print_rows(
        (name, ", ".join(value) if isinstance(value, list) else value)
        for name, value in data.items()
        if name != "options"
    )
    for name, option in row.options.items():
        choices = f" ({' | '.join(option.choices)})" if option.choices else ""
        click.echo(f"  --set {name}={option.default}{choices}  {option.help}")


def _format_json(row: Format) -> dict[str, Any]:
    return {
        "name": row.name,
        "title": row.title,
        "aliases": list(row.aliases),
        "refines": list(row.refines),
        "read": row.readable,
        "written": row.create is not None,
        "single_file": row.single_file,
        "dtypes": sorted(row.holds.dtypes),
        "depth": row.holds.depth,
        "holds": [
            name for name in ("zero_size", "values", "empties", "companions") if getattr(row.holds, name)
        ],
        "loaded_by": row.loaded_by,
        "options": {name: asdict(option) for name, option in row.options.items()},
    }
