"""records: what is known about a checkpoint before it is read: its sidecar, and the ledger's entry for its place.

A sidecar is next to the bytes, so it can be rewritten together with them. Therefore it is compared with itself (its
manifest must have the digests that it states) and with the checkpoint that the ledger last recorded at the same place.
A ledger that cannot be read does not stop a verification, but its outcome is then never `ok`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.digest import origin_digest, weights_digest
from wherry.core.json_document import parse_json
from wherry.core.keypath import render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.receipt import CheckpointRef, Receipt, reference_from_json
from wherry.core.receipt import from_json as receipt_from_json
from wherry.core.units import short
from wherry.errors import CorruptError, WherryError
from wherry.formats.checkpoint import Checkpoint
from wherry.ledger.nodes import look_up
from wherry.ledger.replay import ADDED
from wherry.ledger.resolve import proved_digest
from wherry.mover.hashing import Failure
from wherry.store.local_store import locate
from wherry.store.sidecar import Sidecar, readable_sidecar

if TYPE_CHECKING:
    from wherry.formats.recorded_files import FileDifferences

_NODE = (
    "checkpoint_digest", "weights_digest", "format", "format_version", "kind", "step", "tensors", "parameters",
    "nbytes",
)  # fmt: skip
_TABLES = ("location", "checkpoint", "tombstone")
_PLACE = f"""
    SELECT {", ".join(f"node.{name}" for name in _NODE)}, place.uri, place.fingerprint, place.seen,
        CASE WHEN stone.statement >= place.statement THEN 1 ELSE 0 END
    FROM location AS place
    JOIN checkpoint AS node ON node.checkpoint_digest = place.checkpoint_digest
    LEFT JOIN tombstone AS stone
        ON stone.checkpoint_digest = place.checkpoint_digest AND stone.uri = place.uri
    WHERE place.uri = :uri ORDER BY place.statement DESC, place.seen DESC LIMIT 1
"""  # noqa: S608  names of columns

_CONVERSIONS = ("conversion", "statement")
_MADE = """
    SELECT entry.body FROM conversion AS done JOIN statement AS entry ON entry.seq = done.statement
    WHERE done.target = :digest AND done.target_uri = :uri ORDER BY done.statement
"""
_PASSING = ("already", "lineage", "schema")  # fields of a receipt that do not describe the conversion


STRUCTURE, INCOMPLETE, ALTERED = "structure", "incomplete", "altered"


class RecordDifference(NamedTuple):
    """A difference of a checkpoint from its sidecar that metadata shows.

    Attributes:
        kind: `structure` (names, shapes and dtypes of tensors), `incomplete` (a file is missing), `altered` (a file has
            another size) or `added` (the record does not have a file).
        path: of the tensor, or the name of the file.
        what: the difference.
    """

    kind: str
    path: str
    what: str


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The ledger's answer for one place.

    Attributes:
        node: the checkpoint that was last seen there; None if there is none, or if it was deleted there.
        seen: when that was recorded; UTC.
        unread: why the ledger could not be read; None if it could.
    """

    node: CheckpointRef | None = None
    seen: str = ""
    unread: str | None = None


def entry_at(uri: str) -> LedgerEntry:
    """The ledger's entry for the checkpoint at a URI."""
    try:
        rows = look_up(_PLACE, _TABLES, uri=uri)
        return _entry(rows[0] if rows else None)
    except WherryError as error:
        return LedgerEntry(unread=error.what)


def _entry(row: Any) -> LedgerEntry:
    if row is None or row[-1]:
        return LedgerEntry()
    *node, uri, fingerprint, seen, _gone = row
    fields = dict(zip(_NODE, node, strict=True))
    try:
        return LedgerEntry(reference_from_json({**fields, "uri": uri, "fingerprint": fingerprint}), seen)
    except (TypeError, AttributeError) as error:  # SQLite stores values of any type in any column
        raise CorruptError(f"the ledger holds invalid values: {error}", uri=uri) from error


def receipt_difference(sidecar: Sidecar, uri: str) -> Iterator[Failure]:
    """The difference of a sidecar's receipt from the conversions that the ledger recorded to this checkpoint and place.

    A sidecar without a receipt, as `inspect --write` makes it, states no conversion. Nothing is compared where the
    ledger has no conversion to this place.

    Raises:
        CorruptError: a statement of the ledger is invalid.
        StorageError: the ledger cannot be read.
    """
    if sidecar.receipt is None:
        return
    values = {"digest": sidecar.checkpoint.checkpoint_digest, "uri": uri}
    bodies = [body for (body,) in look_up(_MADE, _CONVERSIONS, **values)]
    made = [parse_json(body.encode(), "the statement", uri=uri) for body in bodies]
    recorded = [_conversion(receipt_from_json(body, uri)) for body in made]
    if recorded and _conversion(sidecar.receipt) not in recorded:
        reason = (
            "the sidecar was altered: its receipt is not that of the conversion that the ledger recorded here"
        )
        yield Failure("", reason)


def _conversion(receipt: Receipt) -> dict[str, Any]:
    return {name: value for name, value in receipt.to_json().items() if name not in _PASSING}


def known_node(uri: str) -> CheckpointRef | None:
    """The node of the checkpoint at a URI by its records; None if there are none, or if they contradict each other.

    Args:
        uri: the checkpoint; it need not be readable.

    Raises:
        StorageError: the storage failed.
    """
    entry, sidecar = entry_at(uri), readable_sidecar(locate(uri))
    if sidecar is None or any(contradictions(sidecar)):
        return entry.node
    stated = sidecar.checkpoint
    return None if entry.node and entry.node.checkpoint_digest != stated.checkpoint_digest else stated


def record_differences(checkpoint: Checkpoint, sidecar: Sidecar) -> Iterator[RecordDifference]:
    """Compare the metadata of a checkpoint with its sidecar: tensors first, then companion files.

    Args:
        checkpoint: opened.
        sidecar: its record.
    """
    held, stated = checkpoint.manifest.tensors, sidecar.manifest.tensors
    for path in sorted({*held, *stated}):
        here, there = held.get(path), stated.get(path)
        if here is None or there is None:
            what = "unrecorded tensor" if there is None else "missing tensor"
            yield RecordDifference(STRUCTURE, render(path), what)
        elif (here.shape, here.dtype) != (there.shape, there.dtype):
            what = f"expected {there.dtype} {list(there.shape)}, got {here.dtype} {list(here.shape)}"
            yield RecordDifference(STRUCTURE, render(path), what)
    sizes = {one.name: one.size for one in checkpoint.manifest.companions}
    for companion in sidecar.manifest.companions:
        if companion.name not in sizes:
            yield RecordDifference(INCOMPLETE, companion.name, "missing companion file")
        elif sizes[companion.name] != companion.size:
            what = f"size mismatch: expected {companion.size} bytes, got {sizes[companion.name]}"
            yield RecordDifference(ALTERED, companion.name, what)


def file_rows(files: FileDifferences) -> Iterator[RecordDifference]:
    """Files that are missing or have another size, for where nothing says which tensor that concerns."""
    for name in files.missing:
        yield RecordDifference(INCOMPLETE, name, "missing file")
    for name, (expected, found) in files.resized.items():
        yield RecordDifference(ALTERED, name, f"size mismatch: expected {expected} bytes, got {found}")


def added_rows(files: FileDifferences) -> Iterator[RecordDifference]:
    """Files that the record does not have, and that nothing is known to write."""
    for name in files.strange:
        yield RecordDifference(ADDED, name, "its record does not have this file")


def contradictions(sidecar: Sidecar) -> Iterator[Failure]:
    """The values that a sidecar states of its checkpoint, but that contradict its own manifest."""
    stated, manifest, digests = sidecar.checkpoint, sidecar.manifest, sidecar.manifest.digests
    computed = (
        ("checkpoint", stated.checkpoint_digest, proved_digest(sidecar)),
        ("weights", stated.weights_digest, weights_digest(digests, sidecar.algorithm)),
    )
    for what, says, has in computed:
        if says != has:
            reason = f"digest mismatch in the sidecar: it states {what} {short(says)}, its manifest has {short(has)}"
            yield Failure("", reason)
            return
    made = sidecar.receipt
    if made is not None and made.target != stated:
        yield Failure("", "the sidecar was altered: its checkpoint is not the target of its receipt")
        return
    if made is not None and made.origin and made.origin != origin_digest(manifest.origin):
        yield Failure("", "the sidecar was altered: its receipt has another digest of the origin")
        return
    held = {
        "kind": manifest.kind, "step": manifest.step, "tensors": len(manifest.tensors),
        "parameters": manifest.parameters, "nbytes": manifest.nbytes,
    }  # fmt: skip
    for name, value in held.items():
        if (says := getattr(stated, name)) != value:
            yield Failure("", f"the sidecar was altered: it states {name} {says}, its manifest has {value}")
            return


def replacement(
    entry: LedgerEntry, found: str, *, same_weights: bool, tensors_recorded: bool
) -> Iterator[Failure]:
    """The difference from the checkpoint that the ledger last recorded at the place.

    The ledger has one digest of all weights; the digests of single tensors are in sidecars only.

    Args:
        entry: of the place; its node is known.
        found: checkpoint digest of what is there now, by the algorithm of the entry.
        same_weights: whether its tensors are those of the entry.
        tensors_recorded: whether a sidecar has the digest of each tensor, with which they are compared too.
    """
    assert entry.node is not None
    expected = entry.node.checkpoint_digest
    if expected != found:
        part = ""
        if same_weights:
            part = "; its tensors are the same, a companion file or a value is not"
        elif not tensors_recorded:
            part = (
                "; the ledger has no digests of single tensors: name those that differ with "
                f"`wherry verify {shlex.quote(entry.node.uri)} --against COPY`, where COPY is a copy or a conversion "
                "of it"
            )
        yield Failure(
            "",
            f"not the checkpoint that the ledger recorded here on {entry.seen}: expected {short(expected)}, "
            f"got {short(found)}{part}",
        )
