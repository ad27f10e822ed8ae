"""Writes into README.md what the code says of itself: command-line help, the table of formats, the benchmark.

    python infra/readme.py

`tests/test_readme.py` compares README with the code, so run this after a change to either. It needs wherry installed.
The table of pairs is measured, not said: `infra/pairs.py` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from wherry.cli import cli
from wherry.console_formats import COLUMNS, format_cells
from wherry.families import families, load_family
from wherry.registry import formats

ROOT = Path(__file__).resolve().parents[1]


def help_block(words: str) -> str:
    """A console block with the help of one command as the terminal shows it."""
    result = CliRunner().invoke(cli, [*words.split(), "--help"], prog_name="wherry", terminal_width=100)
    return f"```console\n$ wherry {words}--help\n{result.output.strip()}\n```"


def format_table() -> str:
    """One row for each format of the registry, with the cells of `wherry formats`."""
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    rows += [[f"`{name}`", *format_cells(row)[1:]] for name, row in formats().items()]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in rows) + "\n"


def family_table() -> str:
    """One row for each model family, with the systems that it is declared for."""
    rows = [load_family(name) for name in families()]
    told = [f"| `{row.name}` | {row.about} | {', '.join(row.systems)} |\n" for row in rows]
    return f"\n| family | models | systems |\n| --- | --- | --- |\n{''.join(told)}\n"


def rewrite_table() -> str:
    """One row for each rewrite that a format offers."""
    found = {(name, how): row.name for row in formats().values() for name, how in row.rewrites.items()}
    rows = [
        f"| `{name}{how.value and '[=VALUE]'}` | `{where}` | {how.help}{how.value and f'; VALUE: {how.value}'} |\n"
        for (name, how), where in found.items()
    ]
    return f"\n| NAME | of | what it does |\n| --- | --- | --- |\n{''.join(sorted(rows))}\n"


def benchmark() -> str:
    """What `infra/bench` wrote last; empty before its first run."""
    results = ROOT / "infra" / "bench-results.md"
    text = results.read_text() if results.exists() else ""
    table = text.partition("do not edit.\n\n")[2].split("## Every process")[0]
    shown = table.replace("(bench-results.svg)", "(infra/bench-results.svg)").rstrip()
    shown = re.sub(r"^## ", "### ", shown, flags=re.MULTILINE)
    return f"\n{shown}\n\nEvery process by itself is in `infra/bench-results.md`.\n" if text else ""


def between(name: str, content: str, text: str) -> str:
    """The text with new content between the two markers of a name."""
    block = f"<!-- {name}:start -->\n{content}<!-- {name}:end -->"
    marked = f"<!-- {name}:start -->.*?<!-- {name}:end -->"
    return re.sub(marked, lambda _found: block, text, flags=re.DOTALL)


def rewritten(text: str) -> str:
    """README with everything that the code says of itself as it is now."""
    text = re.sub(
        r"```console\n\$ wherry ([^\n]*?)--help\n.*?```",
        lambda found: help_block(found[1]),
        text,
        flags=re.DOTALL,
    )
    text = between("formats", format_table(), text)
    text = between("families", family_table(), text)
    text = between("rewrites", rewrite_table(), text)
    return between("bench", benchmark(), text)


def main() -> None:
    """Rewrite README.md in place."""
    readme = ROOT / "README.md"
    readme.write_text(rewritten(readme.read_text()))


if __name__ == "__main__":
    main()
