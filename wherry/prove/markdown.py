"""markdown: the report of an audit as a page, for the artifact of the flow and for the evidence.

Each finding is a block of its own, since its sentences and URIs are too long for the columns of a table. Names come
from storage and may contain any character, so they are escaped. The page of a bundle is compared with that of its
report, which is read from its JSON again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from wherry.core.units import plural, short
from wherry.errors import printable
from wherry.prove.report import (
    KINDS,
    SEVERITIES,
    AffectedCheckpoint,
    AuditReport,
    ChainProof,
    CheckpointAudit,
    Finding,
    summary,
)

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


_DERIVED = ("schema", "ok", "counts")  # of the report
_LISTS = ("scope", "checkpoints", "findings", "history")
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


def render_page(data: dict[str, Any]) -> str:
    """The page (`report.md`) of a report that `AuditReport.to_json` has printed.

    Raises:
        ValueError: it is not such a report, or what is derived from its rows differs from them.
    """
    try:
        report = _report(data)
        fault = _difference(report, data)
        page = markdown(report)
    except _DAMAGE as error:
        raise ValueError(f"not the report of an audit: {type(error).__name__}: {error}") from error
    if fault is not None:
        raise ValueError(fault)
    return page


def _report(data: dict[str, Any]) -> AuditReport:
    own: dict[str, Any] = {name: value for name, value in data.items() if name not in _DERIVED}
    if not all(isinstance(data[name], list) for name in _LISTS):
        raise TypeError(f"each of {', '.join(_LISTS)} must be a list")
    own["scope"], own["history"] = tuple(data["scope"]), tuple(data["history"])
    own["chain"] = ChainProof(**data["chain"])
    own["checkpoints"] = tuple(_checkpoint(row) for row in data["checkpoints"])
    own["findings"] = tuple(_finding(row) for row in data["findings"])
    return AuditReport(**own)


def _checkpoint(row: dict[str, Any]) -> CheckpointAudit:
    own: dict[str, Any] = {**row, "models": tuple(row["models"])}
    return CheckpointAudit(**own)


def _finding(row: dict[str, Any]) -> Finding:
    own: dict[str, Any] = {name: value for name, value in row.items() if name != "severity"}
    own["models"] = tuple(row["models"])
    own["affected"] = tuple(_affected_checkpoint(one) for one in row["affected"])
    return Finding(**own)


def _affected_checkpoint(row: dict[str, Any]) -> AffectedCheckpoint:
    own: dict[str, Any] = {**row, "uris": tuple(row["uris"]), "models": tuple(row["models"])}
    return AffectedCheckpoint(**own)


def _difference(report: AuditReport, data: dict[str, Any]) -> str | None:
    """The differences between the counts in the JSON and its own rows."""
    for finding, row in zip(report.findings, data["findings"], strict=True):
        if finding.severity != row["severity"]:
            return f"a finding of the kind {finding.kind} has the severity {row['severity']}"
    if report.counts != data["counts"]:
        return "its counts are not those of its checkpoints and findings"
    return None
