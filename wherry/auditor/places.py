"""The audit of one place, from metadata: is the checkpoint that the ledger saw there still there, whole and the same?

The sidecar must state the identity that the ledger states and must not contradict itself, every expected chunk must
be there, keys, shapes and dtypes must be the recorded ones, and the fingerprint of the files should be. Reading
the bytes is the business of `wherry.auditor.bytes`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.auditor.report import CheckpointAudit, Finding, gravity
from wherry.core.digest import checkpoint_digest
from wherry.core.keypath import render
from wherry.core.units import short
from wherry.errors import (
    CorruptError,
    DamagedError,
    HostileError,
    MissingExtraError,
    NotFoundError,
    StorageError,
    WherryError,
)
from wherry.formats.checkpoint import open_checkpoint, present_fingerprint
from wherry.formats.detect import describe_absent
from wherry.ledger.replay import READ, WRITTEN
from wherry.storage.sidecar import Sidecar, read_sidecar, sidecar_location
from wherry.storage.stores import is_live, locate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wherry.formats.checkpoint import Checkpoint
    from wherry.ledger.replay import CheckpointRecord, LedgerState, PlaceRecord

_DOUBTED = {
    "replaced",
    "source-changed",
    "sidecar-altered",
}  # after these a sidecar is no evidence of what was recorded
_OPEN = ("touched", "source-changed", "known-damage")  # what only the bytes can decide


class PlaceAudit(NamedTuple):
    """What came of a look at one place.

    Attributes:
        row: for the report.
        findings: what is wrong.
        recorded: whether a sidecar lies beside it.
        fingerprint: of its files now; empty where it did not open.
    """

    row: CheckpointAudit
    findings: tuple[Finding, ...] = ()
    recorded: bool = False
    fingerprint: str = ""

    def with_findings(
        self, found: list[Finding], level: str, seconds: float, devices: str = ""
    ) -> PlaceAudit:
        """The same after a deeper look; bytes that were proved settle what times and sizes of files left open."""
        read = level != self.row.level and not any(one.kind == "unreachable" for one in found)
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
        return PlaceAudit(row, every, self.recorded, self.fingerprint)


def verdict_of(findings: tuple[Finding, ...]) -> str:
    """`ok`, or the kind of the gravest error or warning."""
    kinds = [finding.kind for finding in findings if finding.severity != "note"]
    return min(kinds, key=gravity, default="ok")


def look_at(
    place: PlaceRecord, known: LedgerState, keep: Callable[[Sidecar], None] | None = None
) -> PlaceAudit:
    """Audit one place from metadata alone.

    Args:
        place: where the ledger saw a checkpoint.
        known: the ledger.
        keep: takes the record beside it as evidence, where that is the recorded one.
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
    look = _Look(place, subject, required=place.role != READ or bool(row.models))
    found = (*look.findings(), *_remembered(place, known))
    row = replace(
        row,
        verdict=verdict_of(found),
        seconds=round(time.monotonic() - clock, 3),
        manifest=look.sidecar is not None and not _DOUBTED & {finding.kind for finding in found},
    )
    if keep is not None and row.manifest and look.sidecar is not None:
        keep(look.sidecar)
    return PlaceAudit(row, found, look.sidecar is not None, look.fingerprint)


def _remembered(place: PlaceRecord, known: LedgerState) -> Iterator[Finding]:
    """Damage that was found before: metadata cannot see it, and nobody may forget it."""
    damage = known.damaged.get((place.checkpoint_digest, place.uri))
    if damage is not None:
        what = f"{damage.reason} (found {damage.time}; no verification of its bytes has passed since)"
        yield about(place, "known-damage", what, path=damage.path, leaf=damage.leaf)


class _Look:
    """One look at one place, which gathers what later steps need: the sidecar and the fingerprint."""

    def __init__(self, place: PlaceRecord, subject: CheckpointRecord, *, required: bool) -> None:
        self.place = place
        self.subject = subject
        self.required = required
        self.sidecar: Sidecar | None = None
        self.fingerprint = ""

    def findings(self) -> Iterator[Finding]:
        """Everything that is wrong with it, from metadata."""
        try:
            yield from self._findings()
        except WherryError as error:
            yield troubled(self.place, error)

    def _findings(self) -> Iterator[Finding]:
        if is_live(self.place.uri):
            return  # a training state that was exported from memory
        location = locate(self.place.uri)
        if location.entry is None:
            kind = "gone" if self.required else "source-gone"
            yield about(self.place, kind, "nothing is there any more")
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
            yield about(self.place, "sidecar-gone", "the record that wherry left beside it is not there")
        with open_checkpoint(self.place.uri, format=self.subject.format) as checkpoint:
            yield from self._contents(checkpoint)

    def _identity(self, sidecar: Sidecar) -> Iterator[Finding]:
        stated = sidecar.checkpoint
        if stated.checkpoint_digest != self.place.checkpoint_digest:
            yield about(
                self.place,
                "replaced" if self.required else "source-changed",
                f"checkpoint {short(stated.checkpoint_digest)} lies where the ledger has "
                f"{short(self.place.checkpoint_digest)}",
            )
        computed = checkpoint_digest(sidecar.manifest, stated.format, stated.format_version)
        if computed != stated.checkpoint_digest:
            yield about(
                self.place,
                "sidecar-altered",
                f"its manifest gives the digest {short(computed)}, and it states {short(stated.checkpoint_digest)}",
            )

    def _contents(self, checkpoint: Checkpoint) -> Iterator[Finding]:
        for piece in checkpoint.reader.absent():
            yield about(
                self.place, "incomplete", f"missing: {describe_absent(piece)}", path=render(piece.path)
            )
        if self.sidecar is not None:
            yield from self._structure(checkpoint, self.sidecar)
        self.fingerprint = present_fingerprint(checkpoint)
        marks = {self.fingerprint, present_fingerprint(checkpoint, marks=False)}
        recorded = {self.place.fingerprint, self.sidecar.checkpoint.fingerprint if self.sidecar else ""}
        if not marks & recorded:
            yield self._touched()

    def _structure(self, checkpoint: Checkpoint, sidecar: Sidecar) -> Iterator[Finding]:
        """What was recorded in detail and is otherwise now; tensors, then files beside them."""
        held, stated = checkpoint.manifest.tensors, sidecar.manifest.tensors
        for path in sorted({*held, *stated}):
            here, there = held.get(path), stated.get(path)
            if here is None or there is None:
                what = "a tensor that was not recorded" if there is None else "the tensor is gone"
                yield about(self.place, "structure", what, path=render(path))
            elif (here.shape, here.dtype) != (there.shape, there.dtype):
                what = f"{here.dtype} {list(here.shape)} where {there.dtype} {list(there.shape)} was recorded"
                yield about(self.place, "structure", what, path=render(path))
        sizes = {one.name: one.size for one in checkpoint.manifest.companions}
        for companion in sidecar.manifest.companions:
            if companion.name not in sizes:
                yield about(self.place, "incomplete", "the companion file is gone", path=companion.name)
            elif sizes[companion.name] != companion.size:
                what = f"the companion file has {sizes[companion.name]} bytes, {companion.size} were recorded"
                yield about(self.place, "altered", what, path=companion.name)

    def _touched(self) -> Finding:
        if self.required:
            what = "names, sizes or times of its files are not those that were recorded"
            return about(self.place, "touched", what, cure=f"wherry audit --level digest {self.place.uri}")
        return about(
            self.place,
            "source-changed",
            "its files are not those that were converted",
            cure="convert it again",
        )


def troubled(place: PlaceRecord | CheckpointAudit, error: WherryError) -> Finding:
    """What an error means that stopped the look."""
    kind = "unreadable"
    if isinstance(error, HostileError | DamagedError):
        kind = error.verdict
    elif isinstance(error, StorageError | MissingExtraError):
        kind = "unreachable"
    elif isinstance(error, NotFoundError):
        kind = "incomplete"
    return about(place, kind, error.what, path=error.path, cure=error.cure)


def about(place: PlaceRecord | CheckpointAudit, kind: str, what: str, **more: Any) -> Finding:
    """A finding about what lies at a place."""
    return Finding(kind, what, uri=place.uri, checkpoint_digest=place.checkpoint_digest, **more)
