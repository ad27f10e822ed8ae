"""Proof of a rewrite, and of tensors that were carried in boxes.

After a rewrite the target is opened again, and must hold every tensor of the source under its new name. The metadata of
both sides is always compared. With digests, every tensor is read through the source's metadata and again through the
target's: equal bytes in the files would not prove that the new metadata refers to them correctly.

A box is a chunk that is not one run of the tensor's bytes (a layer of a stack, a shard of a mesh). Where its leaves
could not be hashed during the pass (`LeafHasher.update_box`), the written target is read again from storage and
compared with the source: directly if the source has the same tensor, otherwise through the inverse layout.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.converter.references import agree_with_source, reference, source_reference
from wherry.core.account import fold_entries
from wherry.core.detection import Detection
from wherry.core.digest import origin_digest
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Companion, Manifest
from wherry.core.progress import OnProgress, RunContext
from wherry.core.receipt import CheckpointRef, Receipt, software, utc_now
from wherry.core.request import RewriteRequest
from wherry.credentials import redact_values
from wherry.errors import DamagedError, MismatchError, UnsupportedError
from wherry.formats.checkpoint import Checkpoint, fingerprint, present_fingerprint
from wherry.formats.companions import digest_companion
from wherry.formats.detect import absence, look
from wherry.formats.format import Change, Glimpse
from wherry.formats.recorded_files import recorded_files
from wherry.formats.registry import find_format, formats
from wherry.layout.mapping import RENAMED
from wherry.mover.hashing import Hashes, compare, hash_checkpoint
from wherry.store.location import Location
from wherry.store.sidecar import Sidecar, read_sidecar
from wherry.transform.inverse import differences

if TYPE_CHECKING:
    from wherry.converter.rewrite_plan import RewritePlan


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """How the proof of a rewrite is made, and what its receipt states.

    Attributes:
        request: the request.
        algorithm: of the digests that are recorded; if nothing is read, the digests of the sidecar keep their own.
        memory: budget in bytes.
        running: when the run began, and the receiver of its progress.
        stated: the stated options of the request; see `wherry.converter.command`.
        folder: for spill files; a temporary folder by default.
    """

    request: RewriteRequest
    algorithm: str
    memory: int
    running: RunContext
    stated: Mapping[str, Any]
    folder: Path | None = None

    @property
    def digests(self) -> bool:
        """Whether every tensor is read."""
        return self.request.verify == "digest"


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """The digests of the source before anything is changed.

    Attributes:
        hashes: digests of its tensors.
        companions: its companion files with their digests.
        reference: its node of the lineage.
    """

    hashes: Hashes
    companions: tuple[Companion, ...]
    reference: CheckpointRef


def know(checkpoint: Checkpoint, wanted: ProofRequest) -> SourceFacts | None:
    """Read the source, or use the digests of its sidecar if it should not be read; None if there is no sidecar.

    Raises:
        MismatchError: it differs from its sidecar.
        DamagedError, StorageError: it cannot be read.
    """
    recorded = read_sidecar(checkpoint.location)
    hashes = _hashes(checkpoint, recorded, wanted)
    if hashes is None:
        return None
    companions = _digest_companions(checkpoint)
    node = source_reference(
        checkpoint,
        recorded,
        hashes.digests,
        companions,
        hashes.algorithm,
        wanted.memory,
        wanted.folder,
    )
    return SourceFacts(hashes, companions, node)


def prove(
    checkpoint: Checkpoint,
    change: Change,
    known: SourceFacts | None,
    written: Location,
    wanted: ProofRequest,
    rewriting: RewritePlan,
) -> Sidecar | None:
    """Open the written checkpoint, compare it with the source, and return its sidecar.

    Args:
        checkpoint: the source, opened before the change.
        change: the change that was made.
        known: the digests of the source.
        written: the present location of the result.
        wanted: how to prove it.
        rewriting: for the receipt.

    Returns:
        The sidecar with the receipt; None if no digests are known.

    Raises:
        MismatchError: something differs.
        DamagedError: it cannot be opened.
    """
    clock = time.monotonic()
    with open_written(written, checkpoint.detection, rewriting.target) as found:
        _require_alike(checkpoint.manifest, found.manifest, change, rewriting.target)
        missing = absence(found.reader)
        if missing is not None:
            raise MismatchError(f"the written checkpoint is incomplete: {missing}", uri=rewriting.target)
        if known is None:
            return None
        expected = known.hashes.renamed({path: change.name(path) for path in known.hashes.digests})
        if wanted.digests:
            read = _read(found, expected.algorithm, wanted, "verify")
            failed = compare(read, expected.digests, expected.leaves)
            del read
            if failed:
                raise MismatchError(
                    f"read-back differs from the source: {failed[0].reason}",
                    uri=rewriting.target,
                    path=failed[0].path,
                    cure="check the storage; nothing was committed",
                )
            odd = sorted({one.name for one in set(_digest_companions(found)) ^ set(known.companions)})
            if odd:
                raise MismatchError(
                    f"the companion file {odd[0]} differs from the source", uri=rewriting.target
                )
        seconds = round(time.monotonic() - clock, 3)
        proof = {"level": "digest", "ok": True, "tensors": len(expected.digests), "seconds": seconds}
        mark = fingerprint(found.reader.members(), written, marks=written.store.capabilities.local)
        files = recorded_files(found.reader, written)
        detection, manifest = found.detection, found.manifest
    origin = {
        **manifest.origin,
        **({"meta": redact_values(wanted.request.meta)} if wanted.request.meta else {}),
    }
    manifest = replace(manifest, origin=origin).with_digests(expected.digests, known.companions)
    node = reference(
        rewriting.target, detection.format, detection.format_version, manifest, mark, expected.algorithm
    )
    about = origin_digest(origin)
    receipt = _receipt(known.reference, node, rewriting, wanted, proof if wanted.digests else None, about)
    return Sidecar(manifest, node, receipt, expected.leaves, files)


def open_written(written: Location, source: Detection, target: str) -> Checkpoint:
    """Open the written checkpoint in its detected format, or in the source's format if that is a refinement of it.

    Raises:
        MismatchError: no format recognises it, or it cannot be opened: the rewrite does not fit this checkpoint.
    """
    claim = look(Glimpse(written), formats())
    if claim is None:
        raise MismatchError(
            "no format recognises the written checkpoint", uri=target, cure="convert the source"
        )
    if claim.format in find_format(source.format).refines:
        claim = replace(source, uri=written.uri, verdict="ok", reason=None)
    try:
        opened = find_format(claim.format).open(written, replace(claim, step=source.step))
    except (DamagedError, UnsupportedError) as error:
        raise MismatchError(
            f"the written checkpoint cannot be opened as {claim.format}: {error.what}",
            uri=target,
            cure="nothing was committed; convert the source",
        ) from error
    return Checkpoint(opened)


def _hashes(checkpoint: Checkpoint, recorded: Sidecar | None, wanted: ProofRequest) -> Hashes | None:
    if not wanted.digests:
        if recorded is None or recorded.checkpoint.fingerprint != present_fingerprint(checkpoint):
            return None  # the digests of the sidecar are not those of these files
        return Hashes(recorded.algorithm, recorded.manifest.digests, recorded.leaves)
    if recorded is not None:
        known = _read(checkpoint, recorded.algorithm, wanted, "digest")
        agree_with_source(checkpoint, recorded, known)
        if recorded.algorithm == wanted.algorithm:
            return known
    return _read(checkpoint, wanted.algorithm, wanted, "digest")


def _read(checkpoint: Checkpoint, algorithm: str, wanted: ProofRequest, stage: str) -> Hashes:
    return hash_checkpoint(
        checkpoint,
        algorithm,
        memory=wanted.memory,
        progress=wanted.running.progress,
        stage=stage,
        folder=wanted.folder,
        straight=stage == "verify",
    )


def _digest_companions(checkpoint: Checkpoint) -> tuple[Companion, ...]:
    return tuple(digest_companion(checkpoint, one) for one in checkpoint.manifest.companions)


def _require_alike(source: Manifest, found: Manifest, change: Change, uri: str) -> None:
    """Require the same tensors under their new names, and the same values, empty nodes and companion files."""
    rows: tuple[tuple[str, Mapping[Any, Any], Mapping[Any, Any]], ...] = (
        (
            "tensor",
            {render(change.name(path)): (one.shape, one.dtype) for path, one in source.tensors.items()},
            {render(path): (one.shape, one.dtype) for path, one in found.tensors.items()},
        ),
        ("value", _print_values(source.values), _print_values(found.values)),
        ("empty node", _print_values(source.empties), _print_values(found.empties)),
        (
            "companion file",
            {one.name: one.size for one in source.companions},
            {one.name: one.size for one in found.companions},
        ),
    )
    for what, before, after in rows:
        odd = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        if odd:
            raise MismatchError(
                f"the {what} {odd[0]} differs from the source",
                uri=uri,
                cure="report this; nothing was committed",
            )


def _print_values(held: Mapping[Any, Any]) -> dict[str, str]:
    """Values by printed key path, as text, so that 1 and True differ and a NaN equals itself."""
    return {render(path): repr(value) for path, value in held.items()}


def _receipt(
    source: CheckpointRef,
    target: CheckpointRef,
    rewriting: RewritePlan,
    wanted: ProofRequest,
    verification: dict[str, Any] | None,
    origin: str,
) -> Receipt:
    options: dict[str, Any] = {"rewrite": rewriting.name, "in_place": rewriting.in_place}
    options |= {"value": rewriting.value} if rewriting.value is not None else {}
    options |= {RENAMED: dict(rewriting.renamed)} if rewriting.renamed else {}
    return Receipt(
        source=source,
        target=target,
        plan_digest=rewriting.digest,
        options=options,
        software=software(),
        started=wanted.running.started,
        finished=utc_now(),
        seconds=wanted.running.seconds,
        bytes_read=source.nbytes if wanted.digests else 0,
        bytes_written=0 if rewriting.in_place else rewriting.carried[1],
        verification=verification,
        requested=dict(wanted.stated),
        ignored=[row.to_json() for row in fold_entries(rewriting.ignored)],
        origin=origin,
    )


def prove_boxes(
    source: Checkpoint,
    written: Checkpoint,
    pairs: Mapping[KeyPath, KeyPath],
    found: Hashes,
    known: Mapping[KeyPath, str] | None,
    *,
    memory: int,
    progress: OnProgress | None,
) -> None:
    """Compare tensors that were written in boxes with their source.

    Args:
        source: the source of the conversion, or the view of it through the target's layout.
        written: the target, opened.
        pairs: key path in the target → in the source, of these tensors.
        found: their digests in the target.
        known: digests of the source's own tensors, if `source` is a view of it.
        memory: budget for reading.
        progress: called a few times a second.

    Raises:
        MismatchError: they differ; the tensor is named.
    """
    failed = differences(source, written, pairs, found, known, memory=memory, progress=progress)
    if failed:
        raise MismatchError(
            f"the written target differs from the source: {failed[0].reason}",
            uri=written.uri,
            path=failed[0].path or render(next(iter(pairs))),
            cure="check the storage; nothing was committed",
        )
