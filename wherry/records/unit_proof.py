"""UnitProof: what another process than its maker has read back of a unit: hashes of leaves, of bytes that storage gave.

A proof is a record of the job, as a receipt is. It says what was read, not that it is right: the commit compares it
with the receipts.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.keypath import KeyPath, parse, render
from wherry.errors import CorruptError, describe_exception
from wherry.records.unit_receipt import MadeFile
from wherry.staging.journal import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.staging.journal import DurableMove

_PROOF = re.compile(r"proof-(?P<unit>\d+)-(?P<token>[0-9a-f]{8})")


class BlockHash(NamedTuple):
    """The hash of bytes in a block that a part shares with others; the commit may write such a block again.

    Attributes:
        source: key path of the tensor that the part belongs to.
        name: of the file.
        start, length: the bytes.
        digest: their hash.
    """

    source: KeyPath
    name: str
    start: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class UnitProof:
    """What was read back of a unit.

    Attributes:
        unit: number of the unit.
        digest: of the unit.
        token: id of the attempt.
        version: of wherry.
        algorithm: of the hashes.
        receipts: names of the receipts whose files were read: of the unit, and of units that share leaves with it.
        moves: the moves that were read back, with the hashes of their leaves, and with the checksums of what was read
            where the receipts have checksums.
        blocks: of local files.
        shared: the files that it has read and that several units have made, in the state before it has read them.
        boxes: tensor that the unit moves in boxes, all of which were read → digest of what was hashed of it.
        worker: host and process.
        nbytes: bytes that were read.
        seconds: how long it took.
    """

    unit: int
    digest: str
    token: str
    version: str
    algorithm: str
    receipts: tuple[str, ...]
    moves: tuple[DurableMove, ...]
    blocks: tuple[BlockHash, ...]
    worker: str
    nbytes: int
    seconds: float
    shared: tuple[MadeFile, ...] = ()
    boxes: Mapping[KeyPath, str] = field(default_factory=dict["KeyPath", str])

    @property
    def name(self) -> str:
        """Name of the record."""
        return f"proof-{self.unit:05d}-{self.token}"

    def to_json(self) -> dict[str, Any]:
        """The record; the inverse of `proof_from`."""
        return {
            "unit": self.unit,
            "digest": self.digest,
            "token": self.token,
            "run": self.token,
            "version": self.version,
            "algorithm": self.algorithm,
            "receipts": list(self.receipts),
            "moves": [encode(move) for move in self.moves],
            "blocks": [
                [render(one.source), *one[1:4], base64.b64encode(one.digest).decode()] for one in self.blocks
            ],
            "worker": self.worker,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "shared": [list(file) for file in self.shared],
            "boxes": {render(path): digest for path, digest in self.boxes.items()},
        }


def proof_from(row: Mapping[str, Any], uri: str) -> UnitProof:
    """A proof from its record.

    Raises:
        CorruptError: the record has another form.
    """
    try:
        blocks = tuple(
            BlockHash(parse(path), name, start, length, base64.b64decode(text, validate=True))
            for path, name, start, length, text in row["blocks"]
        )
        return UnitProof(
            unit=row["unit"],
            digest=row["digest"],
            token=row["token"],
            version=row["version"],
            algorithm=row["algorithm"],
            receipts=tuple(row["receipts"]),
            moves=tuple(decode(move) for move in row["moves"]),
            blocks=blocks,
            worker=row["worker"],
            nbytes=row["nbytes"],
            seconds=row["seconds"],
            shared=tuple(MadeFile(*file) for file in row["shared"]),
            boxes={parse(path): digest for path, digest in row["boxes"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            f"invalid proof of a unit: {describe_exception(error)}", uri=uri, cure="remove it"
        ) from error


def proofs_in(names: Iterable[str]) -> dict[int, list[str]]:
    """Number of each unit that was read back → the names of the records of its proofs."""
    found: dict[int, list[str]] = {}
    for name in names:
        if one := _PROOF.fullmatch(name):
            found.setdefault(int(one["unit"]), []).append(name)
    return found
