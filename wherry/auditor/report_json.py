"""The report of an audit, read from its JSON again, to compare an evidence bundle's report with its page."""

from __future__ import annotations

from typing import Any

from wherry.auditor.markdown import markdown
from wherry.auditor.report import (
    AffectedCheckpoint,
    AuditReport,
    ChainProof,
    CheckpointAudit,
    Finding,
)

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
    """What the JSON states differently than its own rows."""
    for finding, row in zip(report.findings, data["findings"], strict=True):
        if finding.severity != row["severity"]:
            return f"a finding of the kind {finding.kind} has the severity {row['severity']}"
    if report.counts != data["counts"]:
        return "its counts are not those of its checkpoints and findings"
    return None
