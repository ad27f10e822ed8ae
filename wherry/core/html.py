"""html: tables for notebooks, in which every name from a checkpoint is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wherry.credentials import redact
from wherry.errors import printable

MOST_ROWS = 50


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a title; of many rows the first ones are shown, and the number of the others.

    Args:
        title: text above it.
        columns: headings.
        rows: cells, converted to text.
    """
    every = list(rows)
    shown = every[:MOST_ROWS]
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in shown]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    head = "".join(f"<th>{_text(name)}</th>" for name in columns)
    rest = f"<p>and {len(every) - len(shown):,} more</p>" if len(every) > len(shown) else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><p>{_text(title)}</p>{table}{rest}</div>"


def html_facts(title: str, facts: Iterable[tuple[str, object]]) -> str:
    """A table of names and values; those without a value are left out."""
    rows = [(name, value) for name, value in facts if value not in (None, "", (), [])]
    return html_table(title, ("", ""), rows)


def _text(value: object) -> str:
    from html import escape  # with all names of characters

    return escape(printable(redact("" if value is None else str(value))))
