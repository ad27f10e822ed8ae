"""The deep part of an audit: read the bytes of checkpoints, load them natively, check signatures, record the outcomes.

Bytes are read one checkpoint after the other by `verify`, which uses the whole machine for each. A sample takes the
checkpoints with the oldest verification first (never verified ones before all), so that successive audits reach every
checkpoint.

A signature must be by the configured key and of this checkpoint. From metadata, the signature is verified with the key,
and the signed identity is compared with that of the ledger. Where the audit reads the bytes, every file that the
signature lists is read and compared, too. A missing signature is not a finding: the policy of a promotion can require
one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from wherry.config.settings import configured_value
from wherry.converter.references import reference
from wherry.core import threads
from wherry.core.child import NoAnswerError
from wherry.core.digest import LEAF, algorithm_of
from wherry.core.progress import OnProgress, Progress
from wherry.core.request import SourceRequest
from wherry.core.services import service
from wherry.core.units import plural, short
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import (
    CorruptError,
    MismatchError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
    WherryError,
)
from wherry.formats.checkpoint import object_pin, open_source, state_read
from wherry.ledger.record import Ledger
from wherry.ledger.replay import READ, CheckpointRecord, LedgerState
from wherry.prove.evidence import ReadOptions, compare
from wherry.prove.places import PlaceAudit, about, error_finding
from wherry.prove.report import UNCHANGED, CheckpointAudit, Finding
from wherry.prove.verify import UNCOMPARED, Verification, uncompared_error, verify
from wherry.store.local_store import is_live, locate
from wherry.store.sidecar import signature_location

# Verdicts after which it is still useful to read the bytes.
_READABLE = ("ok", "touched", "sidecar-gone", "source-changed", "known-damage", "added")
# Errors of this machine or of missing packages, not of the checkpoint.
_NOT_RUN = (MissingExtraError, NoAnswerError, UnsupportedError, UsageError)


def read_all(
    looked: dict[str, PlaceAudit],
    known: LedgerState,
    *,
    sample: str | None,
    deep: bool,
    options: ReadOptions,
    ledger: Ledger | None,
    progress: OnProgress | None,
) -> str:
    """Read the bytes of all checkpoints, or of a sample; each outcome is recorded at once, so that none is lost.

    Args:
        looked: URI → result of the check of metadata; it is replaced by the result for the bytes.
        known: the ledger state as of the audit's date.
        sample: how many; see `wherry.prove.audit.audit`.
        deep: whether objects are read too whose bytes were verified in their present state.
        options: memory, and the workers that read.
        ledger: where outcomes are recorded; None records none.
        progress: called a few times a second.

    Returns:
        A description of how they were chosen.
    """
    if not deep:
        looked |= {uri: same for uri, one in looked.items() if (same := one.unchanged(known)) is not None}
    readable = [uri for uri in _oldest_proofs(looked) if looked[uri].row.level != UNCHANGED]
    chosen = readable[: _size_of(sample, len(readable))]
    meter = _Meter(progress, sum(looked[uri].row.nbytes for uri in chosen))
    for uri in chosen:
        done = _read_bytes_of(looked[uri], known, replace(options, progress=meter.report))
        meter.done += done.row.nbytes
        looked[uri] = done if ledger is None else _note(done, known, ledger)
    return f"{len(chosen)} of {plural(len(readable), 'readable checkpoint')}, those with the oldest verification first"


def load_some(looked: dict[str, PlaceAudit], known: LedgerState, count: int, ledger: Ledger | None) -> None:
    """Restore a number of checkpoints with the target's own libraries; record each outcome.

    Args:
        looked: as for `read_all`.
        known: the ledger state.
        count: how many, those with the oldest verification first; formats without a known library come last.
        ledger: where outcomes are recorded; None records none.
    """
    if not count:
        return
    loaders = service("native").LOADERS
    order = sorted(_oldest_proofs(looked), key=lambda uri: looked[uri].row.format not in loaders)
    for uri in order[:count]:
        done = _load_natively(looked[uri])
        tried = done.row.level == "native"
        looked[uri] = _note(done, known, ledger) if ledger is not None and tried else done


def _oldest_proofs(looked: dict[str, PlaceAudit]) -> list[str]:
    """The readable places in a deterministic order, those with the oldest verification of bytes first."""
    readable = [one.row for one in looked.values() if one.row.verdict in _READABLE]
    readable.sort(key=lambda row: (row.verified or "", row.checkpoint_digest, row.uri))
    return [row.uri for row in readable]


def _size_of(sample: str | None, count: int) -> int:
    """The size of a sample of `count` checkpoints.

    Raises:
        UsageError: the sample is neither a number nor a share.
    """
    if sample is None:
        return count
    text = sample.strip()
    try:
        wanted = -(-count * float(text[:-1]) // 100) if text.endswith("%") else int(text)
    except ValueError:
        wanted = -1
    if not 0 <= wanted < float("inf"):
        raise UsageError(f"invalid sample {sample!r}", cure="write a number or a share such as 10%")
    return min(int(wanted), count)


def _read_bytes_of(looked: PlaceAudit, known: LedgerState, options: ReadOptions) -> PlaceAudit:
    """Read every byte of a place and compare it with the sidecar, or for a source without one with the ledger."""
    clock, row, state = time.monotonic(), looked.row, ""
    subject = known.checkpoints[row.checkpoint_digest]
    try:
        if not looked.recorded:
            found, state = _without_sidecar(row, subject, options)
        else:
            outcome = verify(
                row.uri, level="digest", format=row.format, memory=options.memory, progress=options.progress,
                on=options.on, unit=options.unit_bytes,
            )  # fmt: skip
            found = list(_failures(looked, outcome))
            if outcome.verdict == UNCOMPARED:
                found.append(error_finding(row, uncompared_error(outcome)))
            state = outcome.full_read.state if outcome.full_read else ""
    except WherryError as error:
        found = [error_finding(row, error)]
    return looked.with_findings(found, "digest", time.monotonic() - clock)._replace(state=state)


def _load_natively(looked: PlaceAudit) -> PlaceAudit:
    """Restore a checkpoint with its system's library on the available devices; a finding says if this fails."""
    clock, row, devices = time.monotonic(), looked.row, ""
    try:
        outcome = verify(row.uri, level="native", format=row.format)
    except _NOT_RUN as error:
        return looked.with_findings(
            [about(row, "native-not-run", error.what, cure=error.cure)], row.level, 0.0
        )
    except WherryError as error:
        found = [error_finding(row, error)]
    else:
        found = [replace(one, kind="not-native") for one in _failures(looked, outcome)]
        devices = outcome.native.devices if outcome.native else ""
    return looked.with_findings(found, "native", time.monotonic() - clock, devices)


def _failures(looked: PlaceAudit, outcome: Verification) -> Iterator[Finding]:
    """The failures of a verification as findings, with the byte position of the leaf, but for known added files."""
    row, kind = looked.row, "altered" if outcome.ok else outcome.verdict
    known = {one.path for one in looked.findings if one.kind == "added"}
    for failure in outcome.failed:
        if failure.path in known:
            continue
        where = ""
        if failure.leaf is not None:
            where = f", in the {LEAF >> 20} MiB from byte {failure.leaf * LEAF} of the tensor"
        yield about(row, kind, f"{failure.reason}{where}", path=failure.path or None, leaf=failure.leaf)


def _without_sidecar(
    row: CheckpointAudit, subject: CheckpointRecord, options: ReadOptions
) -> tuple[list[Finding], str]:
    """Recompute the digest of a source that has no sidecar, and compare it with the digest in the ledger.

    Returns:
        The findings, and the state of what was read.
    """
    algorithm = algorithm_of(row.checkpoint_digest)
    source = SourceRequest(row.uri, row.format)
    with open_source(source) as checkpoint:
        pin, gone = object_pin(checkpoint), {piece.path for piece in checkpoint.reader.absent()}
        evidence = compare(checkpoint, None, algorithm, replace(options, source=source), without=gone)
        state = state_read(pin, checkpoint)
    node = reference(row.uri, subject.format, subject.format_version, evidence.manifest, "", algorithm)
    if node.checkpoint_digest == row.checkpoint_digest:
        return [], state
    part = "a companion file" if node.weights_digest == subject.weights_digest else "its tensors"
    kind = "altered" if row.role != READ or row.models else "source-changed"
    what = (
        f"digest mismatch in {part}: expected checkpoint {short(row.checkpoint_digest)}, "
        f"got {short(node.checkpoint_digest)}"
    )
    return [about(row, kind, what)], ""


def _note(done: PlaceAudit, known: LedgerState, ledger: Ledger) -> PlaceAudit:
    """Record the outcome as a verification of the ledger's node, at this place, with its current fingerprint."""
    from wherry.core.receipt import CheckpointRef
    from wherry.ledger.record import record_verification

    if any(one.kind in ("unreachable", "outside-routes") for one in done.findings):
        return done  # the bytes were not read
    row, node = done.row, known.checkpoints[done.row.checkpoint_digest]
    failed = [one for one in done.findings if one.severity == "error"]
    sound = row.verdict == "ok"  # the fingerprint of damaged files must not become the expected one
    mark = (sound and done.fingerprint) or known.places[row.uri].fingerprint
    fields = {name: getattr(node, name) for name in node.__slots__}
    outcome = {
        "uri": row.uri,
        "level": row.level,
        "verdict": row.verdict if failed else "ok",
        "ok": not failed,
        "tensors": {
            "checked": row.tensors,
            "failed": [{"path": one.path or "", "reason": one.what, "leaf": one.leaf} for one in failed],
        },
        "seconds": row.seconds,
        "bytes": row.nbytes,
        "by": "audit",
        **({"devices": row.devices} if row.devices else {}),
        **({"state": done.state} if done.state and not failed else {}),
    }
    try:
        record_verification(ledger, CheckpointRef(uri=row.uri, fingerprint=mark, **fields), outcome)
    except WherryError as error:
        note = Finding("not-recorded", error.what, row.uri, row.checkpoint_digest, cure=error.cure)
        return done._replace(findings=(*done.findings, note))
    return done


class _Meter:
    """Combines the progress of several verifications."""

    def __init__(self, report: OnProgress | None, total: int) -> None:
        self._report, self._total = report, total
        self._clock = time.monotonic()
        self.done = 0

    def report(self, one: Progress) -> None:
        """Report the progress of the current verification."""
        if self._report is None:
            return
        done = min(self.done + one.done, self._total)
        rate = done / max(time.monotonic() - self._clock, 1e-9)
        eta = (self._total - done) / rate if rate else None
        self._report(Progress("audit", done, self._total, rate, eta, one.current))


# ---- signatures ------------------------------------------------------------------------------------------------------


_WORKERS = 16  # checking signatures mostly waits for storage
_READ = ("digest", "native")


def required_key(key: str | None) -> str | None:
    """The public key for signatures: the given one, or `audit.key` of the configuration.

    Raises:
        NotFoundError, UsageError, StorageError: it does not exist, or is not a key.
        MissingExtraError: the package cryptography is not installed.
    """
    chosen = key or configured_value("audit.key")
    if chosen is not None:
        service("signing").load_public_key(chosen)  # an invalid key fails before anything is read
    return chosen


def check_signatures(looked: dict[str, PlaceAudit], key: str) -> None:
    """Check the signature of every place that has one, and add the findings to its result.

    Args:
        looked: URI → result so far.
        key: file with the public key, PEM.
    """
    with threads.executor(_WORKERS, "wherry-audit") as executor:
        shallow = [one for one in looked.values() if one.row.level not in _READ]
        deep = [one for one in looked.values() if one.row.level in _READ]
        done = [*executor.map(partial(_check, key=key), shallow), *(_check(one, key) for one in deep)]
    looked.update({one.row.uri: one for one in done})


def _check(one: PlaceAudit, key: str) -> PlaceAudit:
    clock, row = time.monotonic(), one.row
    try:
        if is_live(row.uri) or not signature_location(locate(row.uri)).exists():
            return one
        found = list(_findings(one, key))
    except (MismatchError, CorruptError) as error:
        found = [_broken(row, error.what)]
    except WherryError as error:
        found = [error_finding(row, error)]
    return one.with_findings(found, row.level, time.monotonic() - clock)


def _findings(one: PlaceAudit, key: str) -> Iterator[Finding]:
    row, signing = one.row, service("signing")
    if row.level in _READ:
        signed = signing.verify(row.uri, key)
        for name, reason in signed.failed:
            yield _broken(row, f"signature mismatch: {name} {reason}", path=name)
        identity = signed.identity
    else:
        identity = signing.identity(row.uri, key)
    digest = identity.get("checkpoint_digest")
    if digest is not None and digest != row.checkpoint_digest:
        what = f"signature mismatch: it is for checkpoint {short(digest)}, expected {short(row.checkpoint_digest)}"
        yield _broken(row, what)


def _broken(row: CheckpointAudit, what: str, **more: str) -> Finding:
    again = Command("sign", row.uri, Argument("key", Blank("KEY")))
    cure = Cure("find out who changed or signed it; if it is intact, sign it again: {}", again)
    return about(row, "signature", what, cure=cure, **more)
