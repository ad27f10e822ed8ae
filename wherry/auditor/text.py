"""The audit report for people: Markdown, for the flow's artifact, the evidence and the terminal.

Names come from storage and can hold anything; in a table nothing of them is markup.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from wherry.auditor.report import SEVERITIES
from wherry.core.digest import short
from wherry.core.units import show_seconds, show_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from wherry.auditor.report import AuditReport, Finding

LISTED = 200  # rows of a table; the JSON has them all
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#!])")


def markdown(report: AuditReport) -> str:
    """The whole report."""
    outcome = "nothing is wrong" if report.ok else "errors found"
    parts = [
        f"# Audit of {counted(len(report.checkpoints), 'checkpoint')}: {outcome}",
        _table(("what", "value"), summary(report)),
    ]
    for severity in ("error", "warning", "note"):
        rows = [row for row in report.findings if row.severity == severity]
        if rows:
            parts += [f"## {severity.capitalize()}s", _table(_COLUMNS, map(_cells, rows), len(rows))]
    if report.checkpoints:
        rows = [
            (
                row.verdict,
                f"{row.level}: {row.devices}" if row.devices else row.level,
                row.format,
                row.uri,
                short(row.checkpoint_digest),
                ", ".join(row.models),
            )
            for row in sorted(report.checkpoints, key=lambda row: (row.verdict == "ok", row.uri))
        ]
        columns = ("verdict", "level", "format", "where", "digest", "models")
        parts += ["## Checkpoints", _table(columns, rows, len(rows))]
    return "\n\n".join(parts) + "\n"


def summary(report: AuditReport) -> list[tuple[str, str]]:
    """The report in a few lines of (what, value)."""
    counts, chain = report.counts, report.chain
    devices = sorted({row.devices for row in report.checkpoints if row.devices})
    read = sum(row.nbytes for row in report.checkpoints if row.level != "present")
    return [
        ("scope", ", ".join(report.scope)),
        ("as of", report.as_of or f"now, {report.started}"),
        ("level", f"{report.level}{f': {report.sample}' if report.sample else ''}"),
        ("checkpoints", f"{counts['checkpoints']}, {counts['ok']} of them fine"),
        (
            "bytes read",
            f"{show_size(read)} of {counts['read']} checkpoints; {counts['loaded']} loaded natively"
            + (f" ({'; '.join(devices)})" if devices else ""),
        ),
        ("findings", ", ".join(counted(counts[f"{name}s"], name) for name in SEVERITIES)),
        ("ledger", f"{chain.statements} statements, {chain.altered or 'the chain is whole'}"),
        ("anchor", f"statement {chain.statements}: {chain.head}"),
        ("registry", _registry(report)),
        ("took", show_seconds(report.seconds)),
    ]


def counted(number: int, noun: str) -> str:
    """So many of something, in words."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


_COLUMNS = ("kind", "what", "where", "cure", "affected")


def _cells(row: Finding) -> tuple[str, ...]:
    tensor = f" ({row.path}{'' if row.leaf is None else f', leaf {row.leaf}'})" if row.path else ""
    affected = [
        f"{one.format} {short(one.checkpoint_digest)} {', '.join(one.models)}" for one in row.affected
    ]
    return row.kind, row.what + tensor, row.uri or "", row.cure or "", "; ".join([*row.models, *affected])


def _registry(report: AuditReport) -> str:
    if report.registry is None:
        return "none was compared"
    return f"{report.registry}: {report.versions} versions of ours"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], count: int = 0) -> str:
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(map(_plain, row)) for row, _ in zip(rows, range(LISTED), strict=False)]
    more = f"\n\nand {count - LISTED} more; report.json has them all" if count > LISTED else ""
    return "\n".join(f"| {line} |" for line in lines) + more


def _plain(text: str) -> str:
    """Text that no renderer takes for anything else: escaped, on one line, without control characters."""
    visible = "".join(character if character.isprintable() else " " for character in text)
    return _MARKUP.sub(r"\\\1", visible)
