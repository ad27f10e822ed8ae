"""The deep part of an audit: which checkpoints are read, reading them, and what the ledger is told of it.

Bytes are read one checkpoint after the other by `verify`, which uses the whole machine for each. A sample takes those
first whose last proof is oldest (never first), so that audits in a row come round to every checkpoint.

The signatures of an audit: where a checkpoint has one, is it by the configured key, and of this checkpoint?

From metadata: the signature fits the key, and the identity that was signed is the one that the ledger has. Where the
audit read the bytes, every file that the signature names is read, too, and compared. A checkpoint without a signature
is none of the audit's business: whether there must be one is a matter of the policy of a promotion.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from wherry.auditor.places import PlaceAudit, about, troubled
from wherry.auditor.report import Finding
from wherry.config.settings import configured
from wherry.converter.references import digested, reference
from wherry.core.digest import LEAF
from wherry.core.progress import Progress
from wherry.core.services import service
from wherry.core.units import short
from wherry.errors import (
    CorruptError,
    MismatchError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
    WherryError,
)
from wherry.formats.checkpoint import open_checkpoint
from wherry.ledger.replay import READ
from wherry.mover.hashing import hash_checkpoint
from wherry.runtime import threads
from wherry.runtime.child import NoAnswerError
from wherry.storage.sidecar import signature_location
from wherry.storage.stores import is_live, locate
from wherry.verifier.verify import Verification, verify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.auditor.places import PlaceAudit
    from wherry.auditor.report import CheckpointAudit
    from wherry.core.progress import OnProgress
    from wherry.core.receipt import CheckpointRef
    from wherry.ledger.record import Ledger
    from wherry.ledger.replay import CheckpointRecord, LedgerState


# After these verdicts the bytes can still say something.
_READABLE = ("ok", "touched", "sidecar-gone", "source-changed", "known-damage")
# These say something of this machine and of what is installed, and nothing of the checkpoint.
_NOT_RUN = (MissingExtraError, NoAnswerError, UnsupportedError, UsageError)


def read_all(
    looked: dict[str, PlaceAudit],
    known: LedgerState,
    *,
    sample: str | None,
    memory: int,
    ledger: Ledger | None,
    progress: OnProgress | None,
) -> str:
    """Read the bytes of all, or of a sample; what came of each is recorded at once, so that nothing is read in vain.

    Args:
        looked: URI → what came of the look at metadata; what comes of the bytes takes its place.
        known: the ledger as of the audit's moment.
        sample: how many; see `wherry.auditor.audit.audit`.
        memory: budget in bytes.
        ledger: where outcomes are recorded; None records none.
        progress: called a few times a second.

    Returns:
        How they were chosen, in words.
    """
    readable = oldest_proofs(looked)
    chosen = readable[: size_of(sample, len(readable))]
    meter = _Meter(progress, sum(looked[uri].row.nbytes for uri in chosen))
    for uri in chosen:
        done = read_bytes_of(looked[uri], known, memory=memory, progress=meter.report)
        meter.done += done.row.nbytes
        looked[uri] = done if ledger is None else _noted(done, known, ledger)
    return f"{len(chosen)} of {len(readable)} readable ones, those with the oldest proof first"


def load_some(looked: dict[str, PlaceAudit], known: LedgerState, count: int, ledger: Ledger | None) -> None:
    """Let the target's own libraries restore so many; what came of each takes its place and is recorded.

    Args:
        looked: as for `read_all`.
        known: the ledger.
        count: how many, those with the oldest proof first; formats that no library is known for come last.
        ledger: where outcomes are recorded; None records none.
    """
    if not count:
        return
    loaders = service("native").LOADERS
    order = sorted(oldest_proofs(looked), key=lambda uri: looked[uri].row.format not in loaders)
    for uri in order[:count]:
        done = load_natively(looked[uri])
        tried = done.row.level == "native"
        looked[uri] = _noted(done, known, ledger) if ledger is not None and tried else done


def oldest_proofs(looked: dict[str, PlaceAudit]) -> list[str]:
    """The readable places, those first whose bytes were proved longest ago; the order is the same for everybody."""
    readable = [one.row for one in looked.values() if one.row.verdict in _READABLE]
    readable.sort(key=lambda row: (row.verified or "", row.checkpoint_digest, row.uri))
    return [row.uri for row in readable]


def size_of(sample: str | None, count: int) -> int:
    """How many of so many a sample means.

    Raises:
        UsageError: it is neither a number nor a share.
    """
    if sample is None:
        return count
    text = sample.strip()
    try:
        wanted = -(-count * float(text[:-1]) // 100) if text.endswith("%") else int(text)
    except ValueError:
        wanted = -1
    if not 0 <= wanted < float("inf"):
        raise UsageError(f"not a sample: {sample!r}", cure="write a number or a share such as 10%")
    return min(int(wanted), count)


def read_bytes_of(
    looked: PlaceAudit, known: LedgerState, *, memory: int, progress: OnProgress | None
) -> PlaceAudit:
    """Read every byte of a place and compare it with the record; a source without one with the ledger's digest."""
    clock, row = time.monotonic(), looked.row
    subject = known.checkpoints[row.checkpoint_digest]
    try:
        if not looked.recorded:
            found = list(_without_sidecar(row, subject, memory, progress))
        else:
            outcome = verify(row.uri, level="digest", format=row.format, memory=memory, progress=progress)
            found = list(_failures(row, outcome))
    except WherryError as error:
        found = [troubled(row, error)]
    return looked.with_findings(found, "digest", time.monotonic() - clock)


def load_natively(looked: PlaceAudit) -> PlaceAudit:
    """Let the target's own library restore it, on the devices that are there; where it cannot be tried, say so."""
    clock, row, devices = time.monotonic(), looked.row, ""
    try:
        outcome = verify(row.uri, level="native", format=row.format)
    except _NOT_RUN as error:
        return looked.with_findings(
            [about(row, "native-not-run", error.what, cure=error.cure)], row.level, 0.0
        )
    except WherryError as error:
        found = [troubled(row, error)]
    else:
        found = [replace(one, kind="not-native") for one in _failures(row, outcome)]
        devices = outcome.native.devices if outcome.native else ""
    return looked.with_findings(found, "native", time.monotonic() - clock, devices)


def proved(looked: PlaceAudit, known: LedgerState) -> CheckpointRef:
    """The node that a verification is recorded for: as the ledger knows it, at this place, with its files' mark now."""
    from wherry.core.receipt import CheckpointRef

    subject = known.checkpoints[looked.row.checkpoint_digest]
    fields = {name: getattr(subject, name) for name in subject.__slots__}
    sound = looked.row.verdict == "ok"  # the mark of damaged files must not become the expected one
    mark = (sound and looked.fingerprint) or known.places[looked.row.uri].fingerprint
    return CheckpointRef(uri=looked.row.uri, fingerprint=mark, **fields)


def outcome_of(looked: PlaceAudit) -> dict[str, Any]:
    """The outcome of a deep look as the ledger keeps verifications."""
    failed = [one for one in looked.findings if one.severity == "error"]
    return {
        "uri": looked.row.uri,
        "level": looked.row.level,
        "verdict": looked.row.verdict if failed else "ok",
        "ok": not failed,
        "tensors": {
            "checked": looked.row.tensors,
            "failed": [{"path": one.path or "", "reason": one.what, "leaf": one.leaf} for one in failed],
        },
        "seconds": looked.row.seconds,
        "bytes": looked.row.nbytes,
        "by": "audit",
        **({"devices": looked.row.devices} if looked.row.devices else {}),
    }


def _failures(row: CheckpointAudit, outcome: Verification) -> Iterator[Finding]:
    """Damage that a verification found, as findings; the leaf also in bytes."""
    kind = "altered" if outcome.ok else outcome.verdict
    for failure in outcome.failed:
        where = ""
        if failure.leaf is not None:
            where = f", within {LEAF >> 20} MiB from byte {failure.leaf * LEAF} of the tensor on"
        yield about(row, kind, f"{failure.reason}{where}", path=failure.path or None, leaf=failure.leaf)


def _without_sidecar(
    row: CheckpointAudit, subject: CheckpointRecord, memory: int, progress: OnProgress | None
) -> Iterator[Finding]:
    """Take its digest anew, as the conversion did that read it, and compare it with the ledger's."""
    with open_checkpoint(row.uri, format=row.format) as checkpoint:
        manifest, gone = checkpoint.manifest, {piece.path for piece in checkpoint.reader.absent()}
        manifest = replace(manifest, tensors={p: s for p, s in manifest.tensors.items() if p not in gone})
        found = hash_checkpoint(checkpoint, memory=memory, progress=progress, paths=list(manifest.tensors))
        beside = tuple(digested(checkpoint, one) for one in manifest.companions)
        full = manifest.with_digests(found.digests, beside)
        node = reference(row.uri, subject.format, subject.format_version, full, "")
    if node.checkpoint_digest == row.checkpoint_digest:
        return
    part = "a companion file is" if node.weights_digest == subject.weights_digest else "its tensors are"
    kind = "altered" if row.role != READ or row.models else "source-changed"
    yield about(row, kind, f"{part} not what was recorded: the digest is {short(node.checkpoint_digest)} now")


def _noted(done: PlaceAudit, known: LedgerState, ledger: Ledger) -> PlaceAudit:
    from wherry.ledger.record import record_verification

    if any(one.kind == "unreachable" for one in done.findings):
        return done  # nothing was learnt of the bytes
    try:
        record_verification(ledger, proved(done, known), outcome_of(done))
    except WherryError as error:
        row = done.row
        note = Finding("not-recorded", error.what, row.uri, row.checkpoint_digest, cure=error.cure)
        return done._replace(findings=(*done.findings, note))
    return done


class _Meter:
    """The progress of many verifications as one."""

    def __init__(self, report: OnProgress | None, total: int) -> None:
        self._report, self._total = report, total
        self._clock = time.monotonic()
        self.done = 0

    def report(self, one: Progress) -> None:
        """Take the progress of the verification that is running."""
        if self._report is None:
            return
        done = min(self.done + one.done, self._total)
        rate = done / max(time.monotonic() - self._clock, 1e-9)
        eta = (self._total - done) / rate if rate else None
        self._report(Progress("audit", done, self._total, rate, eta, one.current))


_WORKERS = 16  # signatures wait for storage more than they compute
_READ = ("digest", "native")


def required_key(key: str | None) -> str | None:
    """The public key that signatures are checked with: the given one, or `audit.key` of the configuration.

    Raises:
        NotFoundError, UsageError, StorageError: it is not there, or no key.
        MissingExtraError: the package cryptography is not installed.
    """
    chosen = key or configured("audit.key")
    if chosen is not None:
        service("signing").load_public_key(chosen)  # a key that does not fit is said before anything is read
    return chosen


def check_signatures(looked: dict[str, PlaceAudit], key: str) -> None:
    """Check the signature of every place that has one; what comes of it takes the look's place.

    Args:
        looked: URI → what came of the look at it.
        key: file with the public key, PEM.
    """
    with threads.executor(_WORKERS, "wherry-audit") as executor:
        shallow = [one for one in looked.values() if one.row.level not in _READ]
        deep = [one for one in looked.values() if one.row.level in _READ]
        done = [*executor.map(partial(_checked, key=key), shallow), *(_checked(one, key) for one in deep)]
    looked.update({one.row.uri: one for one in done})


def _checked(one: PlaceAudit, key: str) -> PlaceAudit:
    clock, row = time.monotonic(), one.row
    try:
        if is_live(row.uri) or not signature_location(locate(row.uri)).exists():
            return one
        found = list(_findings(one, key))
    except (MismatchError, CorruptError) as error:
        found = [_broken(row, error.what)]
    except WherryError as error:
        found = [troubled(row, error)]
    return one.with_findings(found, row.level, time.monotonic() - clock)


def _findings(one: PlaceAudit, key: str) -> Iterator[Finding]:
    row, signing = one.row, service("signing")
    if row.level in _READ:
        signed = signing.verify(row.uri, key)
        for name, reason in signed.failed:
            yield _broken(row, f"since it was signed: {name} {reason}", path=name)
        identity = signed.identity
    else:
        identity = signing.identity(row.uri, key)
    digest = identity.get("checkpoint_digest")
    if digest is not None and digest != row.checkpoint_digest:
        what = (
            f"checkpoint {short(digest)} was signed, and the ledger has {short(row.checkpoint_digest)} here"
        )
        yield _broken(row, what)


def _broken(row: CheckpointAudit, what: str, **more: str) -> Finding:
    again = f"wherry sign {shlex.quote(row.uri)} --key KEY"
    cure = f"find out who changed or signed it; if it is sound, sign it again: {again}"
    return about(row, "signature", what, cure=cure, **more)
