"""Writes into README.md what the code says of itself: command-line help, the table of formats, the benchmark.

    python infra/readme.py

Tests compare README with the code, so run this after a change to either. It needs wherry installed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from click.testing import CliRunner

from wherry.cli import cli
from wherry.registry import formats

if TYPE_CHECKING:
    from wherry.format import Format

ROOT = Path(__file__).resolve().parents[1]
TABLE_HEAD = "| format | system | read | written | loaded by |\n|---|---|---|---|---|\n"


def help_block(words: str) -> str:
    """A console block with the help of one command as the terminal shows it."""
    result = CliRunner().invoke(cli, [*words.split(), "--help"], prog_name="wherry", terminal_width=100)
    return f"```console\n$ wherry {words}--help\n{result.output.strip()}\n```"


def format_table() -> str:
    """One row for each format of the registry."""

    def works(row: Format) -> str:
        return f"{'yes' if row.readable else 'refused'} | {'yes' if row.create else 'no'}"

    rows = (
        f"| `{name}` | {row.title} | {works(row)} | {row.loaded_by or '–'} |"
        for name, row in formats().items()
    )
    return TABLE_HEAD + "\n".join(rows) + "\n"


def benchmark() -> str:
    """What `infra/bench` wrote last; empty before its first run."""
    results = ROOT / "infra" / "bench-results.md"
    text = results.read_text() if results.exists() else ""
    table = text.partition("do not edit.\n\n")[2].split("## Every process")[0]
    shown = table.replace("(bench-results.svg)", "(infra/bench-results.svg)").rstrip()
    return f"\n{shown}\n\nEvery process by itself is in `infra/bench-results.md`.\n" if text else ""


def main() -> None:
    """Rewrite README.md in place."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    text = re.sub(
        r"```console\n\$ wherry (.*?)--help\n.*?```",
        lambda found: help_block(found[1]),
        text,
        flags=re.DOTALL,
    )
    text = re.sub(re.escape(TABLE_HEAD) + r"(?:\|.*\n)*", lambda _found: format_table(), text)
    block = f"<!-- bench:start -->\n{benchmark()}<!-- bench:end -->"
    text = re.sub(r"<!-- bench:start -->.*?<!-- bench:end -->", lambda _found: block, text, flags=re.DOTALL)
    readme.write_text(text)


if __name__ == "__main__":
    main()
