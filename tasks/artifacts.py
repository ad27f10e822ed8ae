"""Artifacts on the page of a run; names from checkpoints are shown escaped and without credentials.

An artifact that cannot be made is logged, and fails nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from wherry.credentials import redact
from wherry.errors import printable
from wherry.tasks.run_log import reporting


def show_text(text: str, *, lines: bool = False) -> str:
    """A text for a page: control characters and bidirectional marks escaped, credentials cut out.

    Args:
        text: text with names from checkpoints, paths or servers.
        lines: whether the text has several lines.
    """
    return printable(redact(text), lines=lines)


def show_table(rows: Sequence[Mapping[str, Any]], key: str, description: str) -> None:
    """Create a table artifact."""
    table = [
        {name: show_text(value) if isinstance(value, str) else value for name, value in row.items()}
        for row in rows
    ]
    shown = show_text(description)
    reporting(f"the table {key}", lambda: create_table_artifact(table, key=key, description=shown))


def show_link(page: str, text: str, key: str, description: str) -> None:
    """Create a link artifact."""
    words, shown = show_text(text), show_text(description)
    reporting(
        f"the link {key}", lambda: create_link_artifact(page, link_text=words, key=key, description=shown)
    )


def show_markdown(text: str, key: str, description: str) -> None:
    """Create a Markdown artifact from a report whose cells are escaped for Markdown."""
    page, shown = show_text(text, lines=True), show_text(description)
    reporting(f"the page {key}", lambda: create_markdown_artifact(page, key=key, description=shown))
