"""BoxRecord: what one process has read of the boxes of a target: hashes of leaves, of bytes that storage gave.

Boxes are chunks that are no runs of bytes of a tensor, so no unit has hashed the leaves that they are part of. These
are read when all units have receipts, and the commit compares what several processes have read.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherry.core.algorithms import HASH_BYTES
from wherry.core.digest import sha256_of
from wherry.errors import CorruptError, describe_exception
from wherry.records.unit_receipt import receipts_by_unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_RECORD = re.compile(r"box-(?P<reading>\d+)-(?P<state>[0-9a-f]{8})-(?P<token>[0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class BoxRecord:
    """What was read.

    Attributes:
        reading: number of the reading, among those of the job.
        state: of the job's receipts; see `receipts_state`.
        digest: of the unit that the reading counts as.
        token: id of the attempt.
        version: of wherry.
        algorithm: of the hashes.
        receipts: digest of the names of the receipts whose files were read: one of each unit.
        hashes: raw hashes of the leaves, of each part of the reading.
        worker: host and process.
        seconds: how long it took.
    """

    reading: int
    state: str
    digest: str
    token: str
    version: str
    algorithm: str
    receipts: str
    hashes: tuple[tuple[bytes, ...], ...]
    worker: str
    seconds: float

    @property
    def name(self) -> str:
        """Name of the record."""
        return f"box-{self.reading:05d}-{self.state}-{self.token}"

    def to_json(self) -> dict[str, Any]:
        """The record; the inverse of `box_record_from`."""
        return {
            "reading": self.reading,
            "state": self.state,
            "digest": self.digest,
            "token": self.token,
            "run": self.token,
            "version": self.version,
            "algorithm": self.algorithm,
            "receipts": self.receipts,
            "hashes": [base64.b64encode(b"".join(leaves)).decode() for leaves in self.hashes],
            "worker": self.worker,
            "seconds": self.seconds,
        }


def box_record_from(row: Mapping[str, Any], uri: str) -> BoxRecord:
    """A record from its contents.

    Raises:
        CorruptError: they have another form.
    """
    try:
        return BoxRecord(
            reading=row["reading"],
            state=row["state"],
            digest=row["digest"],
            token=row["token"],
            version=row["version"],
            algorithm=row["algorithm"],
            receipts=row["receipts"],
            hashes=tuple(_leaves(base64.b64decode(text, validate=True)) for text in row["hashes"]),
            worker=row["worker"],
            seconds=row["seconds"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"invalid record of a reading: {describe_exception(error)}", uri=uri, cure="remove it"
        ) from error


def receipts_state(names: Iterable[str]) -> str:
    """Eight hex digits of the receipts among the names of records: what was read before another one came is void."""
    return used_receipts(name for rows in receipts_by_unit(names).values() for name in rows)[:8]


def used_receipts(names: Iterable[str]) -> str:
    """Identifies some receipts.

    Args:
        names: of the receipts.
    """
    return sha256_of("receipts", sorted(names))


def box_records_in(names: Iterable[str], state: str) -> dict[int, list[str]]:
    """Number of each reading that was made → the names of its records.

    Args:
        names: of the records of a job.
        state: of its receipts.
    """
    found: dict[int, list[str]] = {}
    for name in names:
        one = _RECORD.fullmatch(name)
        if one and one["state"] == state:
            found.setdefault(int(one["reading"]), []).append(name)
    return found


def _leaves(raw: bytes) -> tuple[bytes, ...]:
    return tuple(raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES))
