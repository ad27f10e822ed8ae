"""hash_on: has the bytes of a checkpoint read and hashed by the workers of a carrier.

A checkpoint that is read is cut at leaves of its digests. Workers answer with hashes, which merge in any order; they
write nothing, so there is no job, and a unit that was lost is read again. Each worker first shows that it has the same
wherry, and sees the same state of the same checkpoint. What a worker finds damaged, this process reads itself, so that
the error is the one of a verification in one process.
"""

from __future__ import annotations

import base64
import os
import secrets
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from wherry.carriers.carrier import PROCESSES, carrier_of
from wherry.carriers.child_pool import child_pool
from wherry.carriers.coordinator import run_workload
from wherry.carriers.read_units import ReadUnit, read_units, units_digest
from wherry.carriers.workload import Call
from wherry.core.algorithms import HASH_BYTES
from wherry.core.digest import leaf_count, tensor_digest
from wherry.core.progress import Meter
from wherry.core.request import SourceRequest
from wherry.core.services import service
from wherry.errors import DamagedError, HostileError, MismatchError, WherryError, wherry_error
from wherry.formats.checkpoint import open_source, present_fingerprint
from wherry.ledger.open import resolve_named
from wherry.mover.hashing import Hashes, hash_leaves
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from wherry.carriers.worker_pool import WorkerPool
    from wherry.core.keypath import KeyPath
    from wherry.core.progress import OnProgress
    from wherry.formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """How a checkpoint is read by several workers.

    Attributes:
        source: the checkpoint, as every worker opens it.
        unit_bytes: size of a unit.
        algorithm: of the hashes.
        memory: budget of a worker.
    """

    source: SourceRequest
    unit_bytes: int
    algorithm: str
    memory: int

    def to_json(self) -> dict[str, Any]:
        """The argument of the functions of workers; the inverse of `_reading`."""
        return asdict(self)


class ReadWork:
    """The units of a checkpoint that is read; the result of each is its number and its raw hashes. See Workload."""

    again = "reads the checkpoint anew"

    def __init__(self, reading: ReadOrder, checkpoint: Checkpoint, units: tuple[ReadUnit, ...]) -> None:
        self._reading, self._units, self.uri = reading, units, checkpoint.uri
        self._seen = {"version": __version__, "units": units_digest(units), "state": _state(checkpoint)}
        self.names = [f"{number:05d}-{secrets.token_hex(2)}" for number in range(len(units))]

    def finished(self) -> dict[int, Any]:
        """See Workload: nothing is kept."""
        return {}

    def proof(self) -> Call:
        """See Workload."""
        return Call(prove_reading, (self._reading.to_json(),))

    def problem(self, answer: Mapping[str, Any]) -> str:
        """See Workload."""
        if answer.get("problem"):
            return str(answer["problem"])
        other = [name for name, value in self._seen.items() if answer.get(name) != value]
        words = {
            "version": f"wherry {answer.get('version')}",
            "units": "other tensors",
            "state": "another state",
        }
        return f"it sees {words[other[0]]} of the checkpoint" if other else ""

    def suits(self, number: int, answer: Mapping[str, Any]) -> bool:  # noqa: ARG002  of the protocol
        """See Workload."""
        return True

    def unit(self, number: int) -> Call:
        """See Workload."""
        return Call(read_unit, (self._reading.to_json(), number))

    def result(self, number: int, answer: Mapping[str, Any]) -> tuple[int, list[str] | None]:
        """See Workload; None if the worker found damage."""
        return number, answer["hashes"]

    def end(self) -> Call:
        """See Workload."""
        return Call(end_reading, ())


def hash_on(
    checkpoint: Checkpoint, reading: ReadOrder, on: str, *, progress: OnProgress | None = None
) -> Hashes:
    """Read every tensor of a checkpoint with a carrier; see `hash_checkpoint`.

    Args:
        checkpoint: the checkpoint, as this process sees it.
        reading: how it is read.
        on: the carrier; not `threads`.
        progress: called a few times a second.

    Raises:
        UsageError: there is no such carrier.
        DamagedError: bytes are missing or corrupt.
        StorageError: no worker can read it, or the storage failed.
    """
    units, specs = read_units(checkpoint.manifest.tensors, reading.unit_bytes), checkpoint.manifest.tensors
    leaves: dict[KeyPath, list[bytes]] = {
        path: [b""] * leaf_count(spec.nbytes) for path, spec in specs.items()
    }
    meter = Meter("verify", sum(spec.nbytes for spec in specs.values()), progress)
    with _pool(on) as pool:
        for number, hashes in run_workload(ReadWork(reading, checkpoint, units), pool):
            unit = units[number]
            for (path, rows), own in zip(
                unit.parts.items(), _hashes(checkpoint, reading, unit, hashes), strict=True
            ):
                if len(own) != len(rows):
                    raise MismatchError(
                        "a worker returned hashes of another unit",
                        uri=checkpoint.uri,
                        cure="run the same command again without --on",
                    )
                leaves[path][rows.start : rows.stop] = own
            meter.add(unit.nbytes(specs), f"unit {number}")
    full = {path: tuple(rows) for path, rows in leaves.items()}
    digests = {path: tensor_digest(specs[path], rows, reading.algorithm) for path, rows in full.items()}
    return Hashes(reading.algorithm, digests, full)


def source_of(source: SourceRequest) -> SourceRequest:
    """The request for a checkpoint as processes in other folders open it."""
    found = resolve_named(source)
    return found if "://" in found.uri else replace(found, uri=os.path.abspath(found.uri))  # noqa: PTH100


def _hashes(
    checkpoint: Checkpoint, reading: ReadOrder, unit: ReadUnit, answer: list[str] | None
) -> list[list[bytes]]:
    if answer is None:  # a worker found damage; if this process finds none, the worker was wrong
        own = hash_leaves(checkpoint, reading.algorithm, unit.parts, memory=reading.memory)
        return [list(own[path]) for path in unit.parts]
    raw = [base64.b64decode(text, validate=True) for text in answer]
    return [[one[at : at + HASH_BYTES] for at in range(0, len(one), HASH_BYTES)] for one in raw]


def _pool(on: str) -> AbstractContextManager[WorkerPool]:
    name = on.partition(":")[0]
    _carrier, where = carrier_of(on)
    return child_pool(where.workers) if name == PROCESSES else service(name).pool(where)


def _state(checkpoint: Checkpoint) -> str:
    return present_fingerprint(checkpoint)


def prove_reading(reading: Mapping[str, Any]) -> dict[str, Any]:
    """On a worker: show that it sees the checkpoint.

    Args:
        reading: as `ReadOrder.to_json` gives it.

    Returns:
        What it sees, or in `problem` why it cannot read.
    """
    how = _reading(reading)
    try:
        with open_source(how.source) as checkpoint:
            units = read_units(checkpoint.manifest.tensors, how.unit_bytes)
            return {"version": __version__, "units": units_digest(units), "state": _state(checkpoint)}
    except (WherryError, ImportError) as error:
        return {"problem": " ".join(str(error).split())}


def read_unit(reading: Mapping[str, Any], number: int) -> dict[str, Any]:
    """On a worker: read and hash a unit.

    Args:
        reading: as `ReadOrder.to_json` gives it.
        number: of the unit.

    Returns:
        `hashes`, of each part; None if it is damaged; or `error`.
    """
    clock, how = time.monotonic(), _reading(reading)
    try:
        with open_source(how.source) as checkpoint:
            unit = read_units(checkpoint.manifest.tensors, how.unit_bytes)[number]
            found = hash_leaves(checkpoint, how.algorithm, unit.parts, memory=how.memory)
        hashes = [base64.b64encode(b"".join(found[path])).decode() for path in unit.parts]
    except (DamagedError, HostileError):
        hashes = None
    except Exception as error:  # noqa: BLE001  the coordinator decides
        return {"error": wherry_error(error, uri=how.source.uri).to_json()}
    return {"hashes": hashes, "seconds": round(time.monotonic() - clock, 3)}


def end_reading() -> dict[str, Any]:
    """On a worker: nothing is open."""
    return {}


def _reading(row: Mapping[str, Any]) -> ReadOrder:
    source: dict[str, Any] = {**row["source"], "allow_opaque": tuple(row["source"]["allow_opaque"])}
    return ReadOrder(SourceRequest(**source), row["unit_bytes"], row["algorithm"], row["memory"])
