"""The report of an audit: checkpoints, findings and cures.

A **finding** is about one thing (a checkpoint, a registration, a file, the ledger's chain). `KINDS` is the table of all
kinds, with severity and exit code. An error means that bytes, records or the ledger differ from the record; a warning
means that something should be examined; a note is for information.

`wherry.prove.markdown` shows it as a page.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any, NamedTuple

from wherry.core.lazy_dataclass import dataclass
from wherry.core.units import plural, show_seconds, show_size
from wherry.prove.check import SCHEMA

UNCHANGED = "unchanged"
_UNCHANGED = "the store states the generations or ETags whose bytes were verified; --deep reads them"
SEVERITIES = ("error", "warning", "note")


class Kind(NamedTuple):
    """A kind of finding: its severity, exit code and meaning."""

    severity: str
    exit_code: int
    meaning: str


KINDS: dict[str, Kind] = {
    "malicious": Kind("error", 6, "data that tries to reach outside or to run code"),
    "altered": Kind("error", 9, "bytes that differ from the recorded ones"),
    "replaced": Kind("error", 9, "another checkpoint at the recorded URI"),
    "structure": Kind("error", 9, "keys, shapes or dtypes differ from the recorded ones"),
    "signature": Kind("error", 9, "its signature is not by the configured key, or not of this checkpoint"),
    "sidecar-altered": Kind("error", 9, "the sidecar does not match the digest that it states"),
    "sidecar-damaged": Kind("error", 5, "the sidecar cannot be read"),
    "gone": Kind("error", 5, "the checkpoint does not exist at the recorded URI"),
    "incomplete": Kind("error", 5, "parts of it are missing"),
    "corrupt": Kind("error", 5, "its contents are invalid or inconsistent"),
    "unreadable": Kind("error", 5, "it exists, but cannot be opened"),
    "unreachable": Kind("error", 10, "its storage did not respond, or a package for it is missing"),
    "known-damage": Kind("error", 9, "an earlier verification failed, and none has passed since"),
    "not-native": Kind("error", 9, "the target's own library does not restore what was recorded"),
    "chain-altered": Kind("error", 9, "the ledger was changed after it was written"),
    "anchor-lost": Kind("error", 9, "the ledger does not contain the anchor that was kept elsewhere"),
    "registration-without-bytes": Kind("error", 5, "a model version whose checkpoint is missing everywhere"),
    "registration-altered": Kind("error", 9, "a model version whose tags differ from the record"),
    "added": Kind("error", 9, "a file in its folder that its record does not have"),
    "alias-unregistered": Kind("error", 9, "an alias on a model version that the ledger has not registered"),
    "not-recorded": Kind("error", 12, "the outcome could not be written to the ledger"),
    "registration-gone": Kind("warning", 0, "a registration in the ledger that is not in the registry"),
    "registration-unknown": Kind("warning", 0, "a model version that is not in the ledger"),
    "registration-pending": Kind("warning", 0, "a registration that did not finish"),
    "registration-unmarked": Kind("warning", 0, "the outcome could not be written on the model version"),
    "sidecar-gone": Kind("warning", 0, "the sidecar of the checkpoint is missing"),
    "touched": Kind(
        "warning",
        0,
        "its files changed since they were recorded; reading the bytes shows whether it is intact",
    ),
    "outside-routes": Kind(
        "warning", 0, "a recorded place in no folder that a route reads or writes: it was not read"
    ),
    "source-gone": Kind("warning", 0, "a converted source no longer exists"),
    "source-changed": Kind("warning", 0, "a source changed after it was converted"),
    "registry-not-compared": Kind("warning", 0, "the model registry was not compared"),
    "native-not-run": Kind("warning", 0, "native loading was not possible here"),
    "bytes-without-registration": Kind("note", 0, "a converted checkpoint that no model version points to"),
    "unrecorded": Kind("warning", 0, "a converted checkpoint that is not in the ledger"),
    "deleted": Kind("note", 0, "removed deliberately, as the ledger records"),
    "unconverted": Kind("note", 0, "a checkpoint that was never converted"),
    "unknown-file": Kind("note", 0, "a file that belongs to no checkpoint"),
    "passed-over": Kind("note", 0, "something that does not count as a checkpoint"),
}


@dataclass(frozen=True, slots=True)
class AffectedCheckpoint:
    """A checkpoint that was derived from a damaged one.

    Attributes:
        checkpoint_digest: its identity.
        format: its format.
        uris: its places.
        models: the model versions that point to it, as `name version N`.
    """

    checkpoint_digest: str
    format: str
    uris: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the audit found.

    Attributes:
        kind: one of `KINDS`.
        what: one sentence.
        uri: the checkpoint, file or registry in question.
        checkpoint_digest: identity of the checkpoint in the ledger.
        path: printed key path of the tensor, or the name of the file within the checkpoint.
        leaf: number of the damaged leaf (4 MiB of the tensor's canonical bytes), where it is known.
        models: model versions that point to it.
        cure: one line that says what to do.
        affected: checkpoints that were derived from it, by the ledger.
    """

    kind: str
    what: str
    uri: str | None = None
    checkpoint_digest: str | None = None
    path: str | None = None
    leaf: int | None = None
    models: tuple[str, ...] = ()
    cure: str | None = None
    affected: tuple[AffectedCheckpoint, ...] = ()

    @property
    def severity(self) -> str:
        """`error`, `warning` or `note`."""
        return KINDS[self.kind].severity


@dataclass(frozen=True, slots=True)
class CheckpointAudit:
    """One checkpoint at one place.

    Attributes:
        uri: the place in the ledger.
        checkpoint_digest: identity in the ledger.
        format: its format.
        role: `written` by wherry, `read` as a source, or only `seen`.
        verdict: `ok`, or the kind of its most severe finding.
        level: level of the check: `present`, `unchanged` (its objects are those whose bytes were verified), `digest`
            or `native`.
        tensors: number of recorded tensors.
        nbytes: bytes of all tensors in canonical form, as recorded.
        seconds: wall time of the check.
        models: model versions that point to it.
        verified: when its bytes were last verified before this audit; UTC.
        manifest: whether the evidence holds its manifest.
        devices: software and devices of the native loading; empty where there was none.
    """

    uri: str
    checkpoint_digest: str
    format: str
    role: str
    verdict: str = "ok"
    level: str = "present"
    tensors: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    models: tuple[str, ...] = ()
    verified: str | None = None
    manifest: bool = False
    devices: str = ""


@dataclass(frozen=True, slots=True)
class ChainProof:
    """The state of the ledger that the audit is based on.

    Attributes:
        ledger: its URL, without secrets.
        statements: number of statements (up to the date, if one was given).
        head: hash of the last one: the anchor of this audit.
        time: when that one was written; UTC.
        altered: what was changed after it was written, or None.
    """

    ledger: str
    statements: int
    head: str
    time: str
    altered: str | None


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        scope: `registered`, `all`, or the roots.
        level: `present` or `digest`.
        as_of: the time up to which statements count; UTC; None for now.
        sample: how the checkpoints of the deep check were chosen; empty where there was none.
        started: UTC.
        finished: UTC.
        seconds: wall time.
        wherry: version of the tool.
        chain: the ledger.
        checkpoints: one row for each checkpoint and place.
        findings: most severe first.
        registry: the compared registry, without secrets; None without one.
        versions: how many of its model versions are in the ledger.
        history: promotions, rollbacks and deletions in the ledger up to that time.
    """

    scope: tuple[str, ...]
    level: str
    as_of: str | None
    sample: str
    started: str
    finished: str
    seconds: float
    wherry: str
    chain: ChainProof
    checkpoints: tuple[CheckpointAudit, ...] = ()
    findings: tuple[Finding, ...] = ()
    registry: str | None = None
    versions: int = 0
    history: tuple[dict[str, Any], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no errors; warnings and notes do not count."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """Exit code of the command line: that of the most severe finding."""
        return next((KINDS[one.kind].exit_code for one in self.findings if one.severity == "error"), 0)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of checkpoints, of each level, and of findings by severity and kind."""
        levels = Counter(row.level for row in self.checkpoints)
        severities = Counter(finding.severity for finding in self.findings)
        return {
            "checkpoints": len(self.checkpoints),
            "ok": sum(row.verdict == "ok" for row in self.checkpoints),
            "read": levels["digest"] + levels["native"],
            "loaded": levels["native"],
            "unchanged": levels[UNCHANGED],
            **{f"{name}s": severities[name] for name in SEVERITIES},
            **dict(sorted(Counter(finding.kind for finding in self.findings).items())),
        }

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, for `audit --json` and the evidence."""
        data = asdict(self)
        data["findings"] = [{"severity": row.severity, **asdict(row)} for row in self.findings]
        return {"schema": SCHEMA, "ok": self.ok, "counts": self.counts, **data}


def gravity(kind: str) -> int:
    """Index of a kind in the table: the lower, the more severe."""
    return list(KINDS).index(kind)


def summary(report: AuditReport) -> list[tuple[str, str]]:
    """A summary of the report as rows of (name, value)."""
    counts, chain = report.counts, report.chain
    devices = sorted({row.devices for row in report.checkpoints if row.devices})
    read, same = (
        sum(row.nbytes for row in report.checkpoints if row.level in levels)
        for levels in (("digest", "native"), (UNCHANGED,))
    )
    registry = "not compared"
    if report.registry is not None:
        registry = f"{report.registry}: {plural(report.versions, 'version')} by wherry"
    return [
        ("scope", ", ".join(report.scope)),
        ("as of", report.as_of or f"now, {report.started}"),
        ("level", f"{report.level}{f': {report.sample}' if report.sample else ''}"),
        ("checkpoints", f"{counts['checkpoints']}, {counts['ok']} of them ok"),
        (
            "bytes read",
            f"{show_size(read)} of {plural(counts['read'], 'checkpoint')}; {counts['loaded']} loaded natively"
            + (f" ({'; '.join(devices)})" if devices else ""),
        ),
        *(
            [("not read", f"{show_size(same)} of {plural(counts[UNCHANGED], 'checkpoint')}: {_UNCHANGED}")]
            if same
            else []
        ),
        ("findings", ", ".join(plural(counts[f"{name}s"], name) for name in SEVERITIES)),
        ("ledger", f"{plural(chain.statements, 'statement')}, {chain.altered or 'the chain is intact'}"),
        ("anchor", f"statement {chain.statements}: {chain.head}"),
        ("registry", registry),
        ("took", show_seconds(report.seconds)),
    ]
