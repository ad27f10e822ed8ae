"""entries: the checkpoints of the ledger, one entry for each place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEVELS = {"digest": "read-back"}  # level of the comparison in a conversion → its name in the list


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A checkpoint at one place.

    Attributes:
        uri: the place.
        checkpoint_digest, weights_digest: its identity, and that of its parameters.
        format: its format.
        family: its model family; empty if no conversion between layouts has stated it.
        kind: `params`, `train-state` or `other`.
        step: training step; None if it is unknown.
        tensors, parameters, nbytes: number of tensors, of their elements and of their bytes.
        versions: the model versions of its digest, such as `llama version 3`.
        verified: `level: verdict` of the last verification; `read-back: ok` if that was the reading of every byte
            when it was written, `store: ok` if the store's checksums were compared then. Empty without one.
        verified_at: when that was recorded (UTC); empty without one.
        seen: when it was last seen there (UTC).
        gone: when it was deleted there (UTC); None if it was not.
    """

    uri: str
    checkpoint_digest: str
    weights_digest: str
    format: str
    family: str
    kind: str
    step: int | None
    tensors: int
    parameters: int
    nbytes: int
    versions: tuple[str, ...]
    verified: str
    verified_at: str
    seen: str
    gone: str | None

    def to_json(self) -> dict[str, Any]:
        """One row of `ls --json`."""
        return asdict(self)


def entries() -> Iterator[CatalogEntry]:
    """Every checkpoint at every place that the ledger knows, deleted ones too.

    Raises:
        StorageError: the ledger cannot be read.
    """
    from wherry.ledger.nodes import every_digest, families_and_read_backs, nodes
    from wherry.ledger.record import open_ledger

    with open_ledger() as ledger:
        families, written = families_and_read_backs(ledger)
        known = nodes(ledger, every_digest(ledger))
    for node in known.values():
        digest = node.checkpoint_digest
        for place in node.places:
            read_back = written.get((digest, place.uri))
            last = read_back or node.verified
            names = _LEVELS if read_back else {}
            yield CatalogEntry(
                uri=place.uri,
                checkpoint_digest=digest,
                weights_digest=node.weights_digest,
                format=node.format,
                family=families.get(digest, ""),
                kind=node.kind,
                step=node.step,
                tensors=node.tensors,
                parameters=node.parameters,
                nbytes=node.nbytes,
                versions=tuple(str(row) for row in node.registrations),
                verified="" if last is None else f"{names.get(last.level, last.level)}: {last.verdict}",
                verified_at="" if last is None else last.time,
                seen=place.seen,
                gone=place.gone,
            )
