"""The audit of one place from metadata: whether the recorded checkpoint is there, complete and unchanged.

The sidecar must be consistent and state the same identity as the ledger, every expected chunk must exist, and keys,
shapes and dtypes must be the recorded ones. A different fingerprint of the files is a warning. `wherry.prove.bytes`
reads the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from wherry.config.roots import root_of
from wherry.core.keypath import render
from wherry.core.request import SourceRequest
from wherry.core.units import short
from wherry.cures import Argument, Command, Cure
from wherry.errors import (
    CorruptError,
    DamagedError,
    HostileError,
    MissingExtraError,
    NotFoundError,
    StorageError,
    WherryError,
)
from wherry.formats.checkpoint import Checkpoint, open_source, present_fingerprint
from wherry.formats.detect import describe_absent
from wherry.formats.recorded_files import file_differences
from wherry.ledger.replay import READ, WRITTEN, CheckpointRecord, LedgerState, PlaceRecord
from wherry.ledger.resolve import proved_digest
from wherry.prove.records import added_rows, file_rows, record_differences
from wherry.prove.report import UNCHANGED, CheckpointAudit, Finding, gravity
from wherry.store.local_store import is_live, locate, locate_below, locate_recorded
from wherry.store.sidecar import Sidecar, read_sidecar, sidecar_location

_DOUBTED = {
    "replaced",
    "source-changed",
    "sidecar-altered",
}  # after these, the sidecar is not evidence of the record
_OPEN = ("touched", "source-changed", "known-damage")  # findings that reading the bytes settles


class PlaceAudit(NamedTuple):
    """The result of the audit of one place.

    Attributes:
        row: row of the report.
        findings: its findings.
        recorded: whether it has a sidecar.
        fingerprint: current fingerprint of its files; empty where it could not be opened.
        state: of the objects whose bytes were read; see `wherry.formats.checkpoint.state_read`.
    """

    row: CheckpointAudit
    findings: tuple[Finding, ...] = ()
    recorded: bool = False
    fingerprint: str = ""
    state: str = ""

    def with_findings(
        self, found: list[Finding], level: str, seconds: float, devices: str = ""
    ) -> PlaceAudit:
        """The result with those of a deeper check; verified bytes settle findings about times and sizes of files."""
        read = level != self.row.level and not any(
            one.kind in ("unreachable", "outside-routes") for one in found
        )
        settled = () if not read else _OPEN if not found else (_OPEN[-1],)
        kept = [one for one in self.findings if one.kind not in settled]
        every = (*kept, *found)
        row = replace(
            self.row,
            level=level,
            verdict=verdict_of(every),
            seconds=round(self.row.seconds + seconds, 3),
            devices=devices or self.row.devices,
        )
        return self._replace(row=row, findings=every)

    def unchanged(self, known: LedgerState) -> PlaceAudit | None:
        """The result without a read, if the ledger has a verification of exactly these objects; else None."""
        row = self.row
        state = known.states.get((row.checkpoint_digest, row.uri))
        if row.verdict != "ok" or not state or state != self.fingerprint:
            return None
        return self._replace(row=replace(row, level=UNCHANGED))


def verdict_of(findings: tuple[Finding, ...]) -> str:
    """`ok`, or the kind of the gravest error or warning."""
    kinds = [finding.kind for finding in findings if finding.severity != "note"]
    return min(kinds, key=gravity, default="ok")


def look_at(
    place: PlaceRecord,
    known: LedgerState,
    keep: Callable[[Sidecar], None] | None = None,
    *,
    stated: bool = True,
) -> PlaceAudit:
    """Audit one place from metadata.

    Args:
        place: a place from the ledger.
        known: the ledger state.
        keep: called with the sidecar, as evidence, where it is the recorded one.
        stated: whether only the ledger names the place, which then must be below a root; False below a folder that the
            user names.
    """
    clock = time.monotonic()
    subject = known.checkpoints[place.checkpoint_digest]
    row = CheckpointAudit(
        uri=place.uri,
        checkpoint_digest=place.checkpoint_digest,
        format=subject.format,
        role=place.role,
        tensors=subject.tensors,
        nbytes=subject.nbytes,
        models=known.models(place.checkpoint_digest),
        verified=known.proved.get(place.checkpoint_digest),
    )
    required = place.role != READ or bool(row.models)
    look = _Look(place, subject, required=required, stated=stated)
    found = tuple(look.findings())
    damage = known.damaged.get((place.checkpoint_digest, place.uri))
    if damage is not None:  # an earlier verification found what metadata cannot show
        what = f"{damage.reason} (found {damage.time}; no verification of its bytes has passed since)"
        found = (*found, about(place, "known-damage", what, path=damage.path, leaf=damage.leaf))
    row = replace(
        row,
        verdict=verdict_of(found),
        seconds=round(time.monotonic() - clock, 3),
        manifest=look.sidecar is not None and not _DOUBTED & {finding.kind for finding in found},
    )
    if keep is not None and row.manifest and look.sidecar is not None:
        keep(look.sidecar)
    return PlaceAudit(row, found, look.sidecar is not None, look.fingerprint)


class _Look:
    """The check of one place; it keeps the sidecar and the fingerprint for later steps."""

    def __init__(
        self, place: PlaceRecord, subject: CheckpointRecord, *, required: bool, stated: bool
    ) -> None:
        self.place = place
        self.stated = stated
        self.subject = subject
        self.required = required
        self.sidecar: Sidecar | None = None
        self.fingerprint = ""

    def findings(self) -> Iterator[Finding]:
        """All findings from metadata."""
        try:
            yield from self._findings()
        except WherryError as error:
            yield error_finding(self.place, error)

    def _findings(self) -> Iterator[Finding]:
        if is_live(self.place.uri):
            return  # a training state that was exported from memory
        below = None
        if self.stated:
            try:
                below = root_of(self.place.uri)
            except HostileError as error:
                yield about(self.place, "outside-routes", error.what, cure=error.cure)
                return
        locate_one = locate_recorded if self.stated else locate
        location = locate_one(self.place.uri) if below is None else locate_below(below, self.place.uri)
        if location.entry is None:
            kind = "gone" if self.required else "source-gone"
            yield about(self.place, kind, "file or folder not found")
            return
        try:
            self.sidecar = read_sidecar(location)
        except CorruptError as error:
            yield about(
                self.place,
                "sidecar-damaged",
                error.what,
                cure=f"restore {sidecar_location(location).uri} from a backup or from the evidence of an earlier audit",
            )
        if self.sidecar is not None:
            yield from self._identity(self.sidecar)
        elif self.place.role == WRITTEN:
            yield about(self.place, "sidecar-gone", "sidecar not found")
        source = SourceRequest(self.place.uri, self.subject.format, below=below)
        with open_source(source) as checkpoint:
            yield from self._contents(checkpoint)

    def _identity(self, sidecar: Sidecar) -> Iterator[Finding]:
        stated = sidecar.checkpoint
        if stated.checkpoint_digest != self.place.checkpoint_digest:
            yield about(
                self.place,
                "replaced" if self.required else "source-changed",
                f"another checkpoint at this URI: expected {short(self.place.checkpoint_digest)}, "
                f"got {short(stated.checkpoint_digest)}",
            )
        computed = proved_digest(sidecar)
        if computed != stated.checkpoint_digest:
            yield about(
                self.place,
                "sidecar-altered",
                f"digest mismatch in the sidecar: it states {short(stated.checkpoint_digest)}, but its manifest has "
                f"{short(computed)}",
            )

    def _contents(self, checkpoint: Checkpoint) -> Iterator[Finding]:
        missing = [
            about(self.place, "incomplete", f"missing: {describe_absent(piece)}", path=render(piece.path))
            for piece in checkpoint.reader.absent()
        ]
        yield from missing
        if self.sidecar is not None:
            rows = [*record_differences(checkpoint, self.sidecar)]
            if self.required:
                files = file_differences(checkpoint, checkpoint.location, self.sidecar)
                rows += [] if rows or missing else file_rows(files)
                rows += added_rows(files)
            for kind, path, what in rows:
                yield about(self.place, kind, what, path=path)
        self.fingerprint = present_fingerprint(checkpoint)
        marks = {self.fingerprint, present_fingerprint(checkpoint, marks=False)}
        recorded = {self.place.fingerprint, self.sidecar.checkpoint.fingerprint if self.sidecar else ""}
        if marks & recorded:
            return
        if self.required:
            what = "names, sizes or times of its files differ from the recorded ones"
            cure = Cure(
                "run {} to read its bytes", Command("audit", Argument("level", "digest"), self.place.uri)
            )
            yield about(self.place, "touched", what, cure=cure)
        else:
            what = "its files have changed since the conversion"
            yield about(self.place, "source-changed", what, cure="convert it again")


def error_finding(place: PlaceRecord | CheckpointAudit, error: WherryError) -> Finding:
    """The finding for an error that stopped the check."""
    kind = "unreadable"
    if isinstance(error, HostileError | DamagedError):
        kind = error.verdict
    elif isinstance(error, StorageError | MissingExtraError):
        kind = "unreachable"
    elif isinstance(error, NotFoundError):
        kind = "incomplete"
    return about(place, kind, error.what, path=error.path, cure=error.cure)


def about(place: PlaceRecord | CheckpointAudit, kind: str, what: str, **more: Any) -> Finding:
    """A finding about the checkpoint at a place."""
    return Finding(kind, what, uri=place.uri, checkpoint_digest=place.checkpoint_digest, **more)
