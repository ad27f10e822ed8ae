"""The numbers of an attack in README's section about security: short tables between two marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

START, END = "<!-- attack:start -->", "<!-- attack:end -->"
_PARTS = {
    "files": "hostile files",
    "bombs": "bombs",
    "servers": "web servers that lie",
    "situations": "names, events, races, other users, signatures",
    "mutations": "mutations of sound checkpoints",
    "parsers": "inputs of single parsers",
}
_FAULTS = {
    "executed": "executed",
    "hung": "hung",
    "over memory": "over 300 MB",
    "outside": "ended as a bug",
}


def block(results: Mapping[str, Any]) -> str:
    """The tables of results as JSON, with the marks."""
    return "\n".join([START, "", *_attacks(results), "", *_scanners(results["scanners"]), "", END])


def put(file: Path, results: Mapping[str, Any]) -> None:
    """Replace the tables in a file."""
    before, _, rest = file.read_text().partition(START)
    _, _, after = rest.partition(END)
    file.write_text(f"{before}{block(results)}{after}")


def _attacks(results: Mapping[str, Any]) -> Iterator[str]:
    yield from _row(["attack", "cases", "runs", *_FAULTS.values()], head=True)
    for part, words in _PARTS.items():
        runs = [row for row in results["verbs"] if row["phase"] == part]
        if runs:
            yield from _row(
                [words, results["cases"][part], sum(row["tried"] for row in runs), *_sums(runs, " ")]
            )
        elif part == "parsers" and results["parsers"]:
            tried = sum(row["runs"] for row in results["parsers"])
            yield from _row([words, tried, tried, *_sums(results["parsers"], "_")])


def _sums(rows: Sequence[Mapping[str, Any]], space: str) -> list[int]:
    return [sum(row[name.replace(" ", space)] for row in rows) for name in _FAULTS]


def _scanners(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from _row(
        ["pickles that would run code, given to", "files", "refused or flagged", "passed", "no answer"],
        head=True,
    )
    for row in rows:
        tool = row["tool"] if row["tool"] == "wherry" else f"{row['tool']} {row['version']}"
        yield from _row([tool, row["files"], row["flagged"], row["passed"], row["unanswered"]])


def _row(values: Sequence[object], *, head: bool = False) -> Iterator[str]:
    yield "| " + " | ".join(f"{one:,}" if isinstance(one, int) else str(one) for one in values) + " |"
    if head:
        yield "| --- |" + " ---: |" * (len(values) - 1)
