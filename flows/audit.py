"""The audit flow: check that all checkpoints of the ledger exist, are complete and match their records.

Load it as `flows/audit.py:audit` or `wherry.flows.audit.audit`; without parameters it reads the metadata of all
checkpoints. The report is a Markdown artifact, the evidence a file. If the audit finds errors, the flow ends as Failed
after report, evidence and message are written, so that alerts on failed runs see them.
"""

from typing import Any, ClassVar, Literal

from prefect import flow
from pydantic import Field

from wherry.errors import MismatchError
from wherry.flows.form import FormModel
from wherry.nightly.ending import Ending
from wherry.prove.report import plural
from wherry.tasks.common import show_markdown
from wherry.tasks.ending import ending
from wherry.tasks.steps import audit as audit_task


class AuditSpec(FormModel):
    """What to audit; the only parameter of the flow, and its form in the Prefect UI."""

    FIRST: ClassVar[tuple[str, ...]] = ("scope", "roots", "level", "sample", "fail_on")

    scope: Literal["registered", "all", "roots"] = Field(
        default="all",
        description="What to audit: checkpoints of model versions, all in the ledger, or those below `roots`.",
    )
    roots: tuple[str, ...] = Field(
        default=(),
        description="Folders or URIs for scope `roots`; lists unconverted checkpoints and unknown files too.",
    )
    level: Literal["present", "digest"] = Field(
        default="present", description="Read only metadata, or every byte."
    )
    sample: str | None = Field(
        default=None,
        description="At level `digest`: number or percentage (10%) of checkpoints to read, oldest proof first.",
    )
    deep: bool = Field(
        default=False,
        description="At level `digest`: read objects too whose generation or ETag is the verified one.",
    )
    native_sample: int = Field(
        default=0,
        ge=0,
        description="Number of checkpoints to restore with the target system's own library on this worker.",
    )
    as_of: str | None = Field(default=None, description="Date or time; audit against the ledger as of then.")
    bundle: str | None = Field(
        default=None, description="File or folder on the worker to write the evidence to; none by default."
    )
    anchor: str | None = Field(
        default=None, description="Hash of a statement, stored elsewhere, that the ledger must contain."
    )
    key: str | None = Field(
        default=None,
        description="Public key (PEM file) on the worker to verify signatures with; [audit] of wherry.toml by default.",
    )
    record: bool | None = Field(
        default=None,
        description="Whether to record the audit in the ledger; `record` in [audit] of wherry.toml by default.",
    )
    memory: str = Field(default="128MiB", description="Memory budget for data in flight.")
    tracking_uri: str | None = Field(
        default=None, description="MLflow tracking store; an embedded one by default."
    )
    registry_uri: str | None = Field(
        default=None, description="MLflow registry; the tracking store by default."
    )
    fail_on: Literal["error", "native-not-run", "warning", "never"] = Field(
        default="error",
        description="Findings that end the flow as Failed; `native-not-run`: errors, and samples that could not be "
        "loaded on this worker.",
    )


@flow(name="audit", flow_run_name="audit {spec.scope} {spec.level}", result_serializer="json")
def audit(spec: AuditSpec = AuditSpec()) -> dict[str, Any]:  # noqa: B008  frozen
    """Audit, publish the report, and send a message with the findings.

    Returns:
        The JSON form of the report.

    Raises:
        MismatchError: there are findings that `fail_on` selects.
    """
    with ending("audit", "wherry audit failed to run") as end:
        chosen = spec.model_dump(exclude={"scope", "roots", "fail_on"})
        done = audit_task(list(spec.roots) if spec.scope == "roots" else spec.scope, **chosen)
        report = done["report"]
        show_markdown(done["markdown"], "wherry-audit-report", "Audit report")
        first = _first(report, spec.fail_on)
        say(end, report, first)
        if first is not None:
            raise MismatchError(
                f"the audit found {_count(report)}; first: {first['what']}",
                uri=first["uri"],
                path=first["path"],
                cure=first["cure"],
                stage="audit",
            )
    return report


def say(end: Ending, report: dict[str, Any], first: dict[str, Any] | None) -> None:
    """Put the report into the message.

    Args:
        end: takes the message.
        report: JSON form of the report.
        first: the most severe finding on which the flow fails.
    """
    end.counts = {
        name: report["counts"][name] for name in ("checkpoints", "ok", "errors", "warnings", "notes")
    }
    end.title = f"wherry audit: {'no problems found' if first is None else _count(report)}"
    if first is not None:
        end.first_error = ": ".join(
            str(part) for part in (first["uri"], first["path"], first["what"]) if part
        )
        end.cure = first["cure"]


def _first(report: dict[str, Any], fail_on: str) -> dict[str, Any] | None:
    """The most severe finding that counts as a failure; findings are sorted by severity."""
    grave = {"warning": ("error", "warning"), "never": ()}.get(fail_on, ("error",))
    findings = report["findings"]
    return next((row for row in findings if row["severity"] in grave or row["kind"] == fail_on), None)


def _count(report: dict[str, Any]) -> str:
    counts = report["counts"]
    return f"{plural(counts['errors'], 'error')} and {plural(counts['warnings'], 'warning')}"
