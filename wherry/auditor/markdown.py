"""markdown: the report of an audit as a page, for the artifact of the flow and for the evidence.

Each finding is a block of its own, since its sentences and URIs are too long for the columns of a table. Names come
from storage and may contain any character, so they are escaped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from wherry.auditor.report import KINDS, SEVERITIES, summary
from wherry.core.units import plural, short
from wherry.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from wherry.auditor.report import AuditReport, CheckpointAudit, Finding

LISTED = 200  # maximum blocks of a severity, and rows of a table; the JSON has all of them
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#!])")
_COLUMNS = ("verdict", "level", "format", "where", "digest", "models")


def markdown(report: AuditReport) -> str:
    """The report as Markdown."""
    outcome = "no errors" if report.ok else "errors found"
    parts = [
        f"# Audit of {plural(len(report.checkpoints), 'checkpoint')}: {outcome}",
        _table(("what", "value"), summary(report)),
    ]
    for severity in SEVERITIES:
        rows = [row for row in report.findings if row.severity == severity]
        if rows:
            blocks = (_block(number, row) for number, row in enumerate(rows[:LISTED], 1))
            parts += [f"## {severity.capitalize()}s", *blocks, *_more(len(rows))]
    if report.checkpoints:
        rows = sorted(report.checkpoints, key=lambda row: (row.verdict == "ok", row.uri))
        parts += ["## Checkpoints", _table(_COLUMNS, map(_cells, rows[:LISTED])), *_more(len(rows))]
    return "\n\n".join(parts) + "\n"


def _block(number: int, row: Finding) -> str:
    """A finding: its kind as the heading, then its sentence, and what is known as a list."""
    leaf = "" if row.leaf is None else f", leaf {row.leaf}"
    facts = {
        "Where": row.uri,
        "Tensor or file": f"{row.path}{leaf}" if row.path else None,
        "Checkpoint": row.checkpoint_digest,
        "Models": ", ".join(row.models),
        "Cure": row.cure,
        "Meaning": KINDS[row.kind].meaning,
    }
    lines = [f"- **{name}:** {_plain(value)}" for name, value in facts.items() if value]
    for one in row.affected:
        affected = ", ".join([f"{one.format} {short(one.checkpoint_digest)}", *one.uris, *one.models])
        lines.append(f"- **Affected:** {_plain(affected)}")
    return "\n\n".join([f"### {number}. {_plain(row.kind)}", _plain(row.what), "\n".join(lines)])


def _cells(row: CheckpointAudit) -> tuple[str, ...]:
    level = f"{row.level}: {row.devices}" if row.devices else row.level
    return row.verdict, level, row.format, row.uri, short(row.checkpoint_digest), ", ".join(row.models)


def _more(count: int) -> list[str]:
    return [f"and {count - LISTED} more; report.json lists all"] if count > LISTED else []


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(map(_plain, row)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _plain(text: str) -> str:
    """Escape a text for Markdown: on one line, without characters that nobody sees."""
    visible = "".join(one if one.isprintable() and printable(one) == one else " " for one in text)
    return _MARKUP.sub(r"\\\1", visible)
