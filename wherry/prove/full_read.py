"""full_read: the comparison of every byte of a checkpoint with its sidecar, the ledger and another checkpoint.

Bytes and sidecar are compared by `wherry.prove.evidence`; here the evidence is compared with the ledger, and with
the checkpoint that it was made of.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import field, replace
from typing import Any

from wherry.config.settings import digest_choice
from wherry.converter.references import reference
from wherry.core.digest import weights_digest
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest, checkpoint_digest
from wherry.core.receipt import CheckpointRef
from wherry.core.request import SourceRequest
from wherry.formats.checkpoint import Checkpoint, object_pin, present_fingerprint, state_read
from wherry.formats.registry import checked_options, find_format, system_of
from wherry.layout.mapping import parameters_of
from wherry.layout.spelling import renaming_of
from wherry.ledger.resolve import open_checkpoint
from wherry.mover.hashing import Failure, Hashes, MeasuredError, hash_checkpoint
from wherry.prove.evidence import BytesEvidence, ReadOptions, compare, hash_tensors, tensor_differences
from wherry.prove.records import LedgerEntry, entry_at, receipt_difference, replacement
from wherry.store.sidecar import Sidecar
from wherry.transform.choose import whole_source
from wherry.transform.dequantize import as_recorded
from wherry.transform.ggml_view import RECORD as VALUES
from wherry.transform.quantize import RECORD as QUANTIZED

EQUAL, UNKNOWN, DIFFERENT = "equal", "unknown place", "different"
NOT_COMPARED = "not compared: "  # prefix of the reason
_PARAMETERS = "params"


@dataclass(frozen=True, slots=True)
class Other:
    """The checkpoint to compare with, and the family file, if wherry itself does not declare the family."""

    source: SourceRequest
    family_file: str | None
    measured: MeasuredError = field(default_factory=MeasuredError)


@dataclass(frozen=True, slots=True)
class FullRead:
    """The result of reading every byte of a checkpoint.

    Attributes:
        failed: the differences from what was recorded, and from the other checkpoint.
        proved: whether it was compared with anything that identifies it: a record, or another checkpoint.
        subject: the node that the result is about: what was recorded, or what was read where nothing was. Damage is
            about what the ledger has at the place: otherwise a sidecar that was rewritten together with the bytes
            would enter the ledger by the very record of its failure.
        ledger: the comparison with the ledger: `equal`, `different`, `unknown place`, or why there was none.
        digests: key path → tensor digest of what was read.
        warnings: which tensors hold only zeros, another value again and again, or NaN.
        state: what identifies the objects that were read; see `wherry.formats.checkpoint.state_read`.
    """

    failed: tuple[Failure, ...]
    proved: bool
    subject: CheckpointRef
    ledger: str
    digests: Mapping[KeyPath, str]
    warnings: tuple[str, ...] = ()
    state: str = ""


def read_all(
    checkpoint: Checkpoint, sidecar: Sidecar | None, against: Other | None, options: ReadOptions
) -> FullRead:
    """Read every byte of a checkpoint and compare it with everything that is known about it.

    Args:
        checkpoint: the opened checkpoint, without missing parts.
        sidecar: its record.
        against: another checkpoint whose tensors it must equal.
        options: budget and progress.

    Raises:
        CorruptError: a checksum of its container differs.
        WherryError: it or the other checkpoint cannot be read.
    """
    entry, pin = entry_at(checkpoint.uri), object_pin(checkpoint)
    if sidecar is not None:
        algorithm = sidecar.algorithm
    else:
        algorithm = digest_choice().algorithm if entry.node is None else entry.node.algorithm
    evidence = compare(checkpoint, sidecar, algorithm, options)
    word, changed = _with_the_ledger(checkpoint, sidecar, entry, evidence.manifest, options)
    failed = (*evidence.failed, *changed)
    if against is not None:
        failed += tuple(_with_another(checkpoint, evidence.hashes, sidecar, against, options))
    known = entry.node if word in (EQUAL, DIFFERENT) else None
    subject = known if failed else None
    return FullRead(
        failed=failed,
        proved=sidecar is not None or known is not None or against is not None,
        subject=_subject(checkpoint, sidecar, known, evidence) if subject is None else subject,
        ledger=word,
        digests=evidence.hashes.digests,
        warnings=tuple(evidence.hashes.notes(checkpoint.manifest.tensors)),
        # After the last byte, which a second algorithm or another checkpoint reads.
        state=state_read(pin, checkpoint),
    )


def _with_the_ledger(
    checkpoint: Checkpoint,
    sidecar: Sidecar | None,
    entry: LedgerEntry,
    present: Manifest,
    options: ReadOptions,
) -> tuple[str, list[Failure]]:
    """The comparison with the ledger in words, and the difference if there is one."""
    node = entry.node
    if entry.unread is not None:
        return f"{NOT_COMPARED}{entry.unread}", []
    if node is None:
        return UNKNOWN, []
    name, version = checkpoint.detection.format, node.format_version
    if sidecar is not None:
        name, version = sidecar.checkpoint.format, sidecar.checkpoint.format_version
    if sidecar is None and name != node.format:
        return (
            f"{NOT_COMPARED}it has the checkpoint as {node.format}; pass --format {shlex.quote(node.format)}",
            [],
        )
    if sidecar is not None and sidecar.algorithm != node.algorithm:
        present = present.with_digests(hash_tensors(checkpoint, node.algorithm, options).digests)
    digest = checkpoint_digest(present, name, version, node.algorithm)
    same_weights = weights_digest(present.digests, node.algorithm) == node.weights_digest
    recorded = sidecar is not None
    failed = list(replacement(entry, digest, same_weights=same_weights, tensors_recorded=recorded))
    if sidecar is not None and not failed and entry.unread is None:
        failed += receipt_difference(sidecar, checkpoint.uri)
    return (DIFFERENT if failed else EQUAL), failed


def _subject(
    checkpoint: Checkpoint, sidecar: Sidecar | None, known: CheckpointRef | None, evidence: BytesEvidence
) -> CheckpointRef:
    """The node of a checkpoint at its present place: the recorded one, or a new one."""
    if sidecar is not None and sidecar.checkpoint.uri == checkpoint.uri:
        return sidecar.checkpoint
    mark, found = present_fingerprint(checkpoint), checkpoint.detection
    stated = known if sidecar is None else sidecar.checkpoint
    if stated is not None:
        return replace(stated, uri=checkpoint.uri, fingerprint=mark)
    manifest, algorithm = evidence.manifest, evidence.hashes.algorithm
    return reference(checkpoint.uri, found.format, found.format_version, manifest, mark, algorithm)


def _with_another(
    checkpoint: Checkpoint, found: Hashes, sidecar: Sidecar | None, against: Other, options: ReadOptions
) -> Iterator[Failure]:
    """The differences from another checkpoint, through the layout or the renaming that the sidecar records."""
    recorded = None if sidecar is None else sidecar.manifest
    with open_checkpoint(against.source) as opened:
        receipt = None if sidecar is None else sidecar.receipt
        stated = None if receipt is None else receipt.requested.get("family")
        other = whole_source(opened, find_format(checkpoint.detection.format), stated)
        if sidecar is not None and {QUANTIZED, VALUES} & sidecar.manifest.origin.keys():
            yield from _quantised_again(found, sidecar, other, against, options)
            return
        if sidecar is not None and sidecar.manifest.origin.get("layout"):
            yield from _came_back(checkpoint, sidecar, other, against, options)
            return
        seen = _as_scanned(as_recorded(other, recorded), sidecar)
        paths = _expected_paths(seen, sidecar)
        source_hashes = hash_checkpoint(
            seen, found.algorithm, memory=options.memory, progress=options.progress, paths=paths
        )
    rename = renaming_of(recorded, sidecar.receipt.options if sidecar and sidecar.receipt else {})
    renamed = {rename(path): path for path in source_hashes.digests}
    expected = {path: source_hashes.digests[origin] for path, origin in renamed.items()}
    leaves = {path: source_hashes.leaves[origin] for path, origin in renamed.items()}
    yield from tensor_differences(found, expected, leaves)


def _expected_paths(source: Checkpoint, sidecar: Sidecar | None) -> list[KeyPath]:
    """The source's tensors, or only its parameters if the target records that it holds only these."""
    held, kind = source.manifest, sidecar.manifest.kind if sidecar else None
    receipt = sidecar.receipt if sidecar else None
    requested = receipt is not None and receipt.requested.get("only") == _PARAMETERS
    only = requested or (held.kind == "train-state" and kind == _PARAMETERS)
    return parameters_of(held, source.uri) if only else sorted(held.tensors)


def _as_scanned(source: Checkpoint, sidecar: Sidecar | None) -> Checkpoint:
    """The source with its layers stacked or unstacked, if the target records that and the source is not yet so."""
    record = sidecar.manifest.origin.get("scan") if sidecar else None
    if record is None:
        return source
    from wherry.transform.scan import fits, parse_scan, scanned_view

    scan = parse_scan(record["requested"])
    return scanned_view(source, scan.text) if fits(source.manifest, scan) else source


def _came_back(
    checkpoint: Checkpoint, sidecar: Sidecar, other: Checkpoint, against: Other, options: ReadOptions
) -> Iterator[Failure]:
    """Compare with a source of another system, through the inverse layout; with one of the same system, directly."""
    from wherry.transform.inverse import roundtrip, there_and_back

    layout: dict[str, Any] = {**sidecar.manifest.origin["layout"], "family_file": against.family_file}
    # It came from another system, and is compared with one of its own system and names.
    systems = {system_of(one.detection.format) for one in (other, checkpoint)}
    is_start = (
        len(systems) == 1
        and "" not in systems
        and layout["from"]["system"] != layout["to"]["system"]
        and other.manifest.tensors.keys() == checkpoint.manifest.tensors.keys()
    )
    compared = there_and_back if is_start else roundtrip
    yield from compared(
        checkpoint,
        other if is_start else as_recorded(other, sidecar.manifest),
        layout,
        sidecar.algorithm,
        memory=options.memory,
        progress=options.progress,
        measured=against.measured,
    )


def _quantised_again(
    found: Hashes, sidecar: Sidecar, other: Checkpoint, against: Other, options: ReadOptions
) -> Iterator[Failure]:
    """The differences from what the recorded rule makes of the source, and how far that is from the source."""
    from wherry.transform.inverse import as_laid_out
    from wherry.transform.quantize import as_quantised
    from wherry.transform.view import View

    origin = sidecar.manifest.origin
    seen = as_recorded(other, sidecar.manifest)
    if layout := origin.get("layout"):
        seen = as_laid_out(seen, {**layout, "family_file": against.family_file})
    if QUANTIZED in origin:
        coded = as_quantised(seen, origin)
    else:
        row = find_format(sidecar.checkpoint.format)
        checked = checked_options(row, origin[VALUES])
        coded = row.values(row.divided(seen, checked), checked)
    owned = (
        coded.is_view and coded is not other
    )  # it has a decoder of its own; whoever opened the source closes that
    with coded if owned else nullcontext():
        expected = hash_checkpoint(coded, found.algorithm, memory=options.memory, progress=options.progress)
    yield from tensor_differences(found, expected.digests, expected.leaves)
    if not isinstance(coded, View) or coded.transform is None:
        return  # no value of this source changes
    error = coded.transform.measured
    if error.error > against.measured.error:
        against.measured.tensors += len(coded.lossy)
        against.measured.error, against.measured.share = error.error, error.share
