"""hash_on: has the bytes of a checkpoint read and hashed by the workers of an engine.

A checkpoint that is read is cut at leaves of its digests. Workers answer with hashes, which merge in any order; they
write nothing, so there is no job, and a unit that was lost is read again. Each worker first shows that it has the same
wherry, and sees the same state of the same checkpoint. If a worker finds damage, this process reads the same unit
again, so that the error is that of a verification in one process.
"""

from __future__ import annotations

import base64
import json
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import Any

from wherry.core import child, dtypes, threads
from wherry.core.digest import HASH_BYTES, LEAF, leaf_count, sha256_of, tensor_digest
from wherry.core.json_document import json_value
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import Meter, OnProgress
from wherry.core.request import SourceRequest
from wherry.core.services import service
from wherry.core.tensorspec import TensorSpec
from wherry.core.threads import ThreadPool
from wherry.cures import Argument, Cure
from wherry.errors import DamagedError, HostileError, MismatchError, StorageError, WherryError, wherry_error
from wherry.formats.checkpoint import Checkpoint, open_source, present_fingerprint
from wherry.ledger.resolve import resolve_named
from wherry.mover.hashing import Hashes, hash_leaves
from wherry.version import __version__
from wherry.workers.coordinator import Coordinator, WorkerFunction, WorkerPool, Workload
from wherry.workers.engines import PROCESSES, engine_of, variables

# Leaves of tensors that are read together: key path → their numbers.
ReadUnit = Mapping[KeyPath, range]


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


class ReadWork(Workload):
    """The units of a checkpoint that is read; the result of each is its number and its raw hashes. See Workload."""

    again = "reads the checkpoint anew"

    def __init__(self, reading: ReadOrder, checkpoint: Checkpoint, units: Sequence[ReadUnit]) -> None:
        self.prove, self.do, self.arguments = prove_reading, read_unit, (asdict(reading),)
        self.uri, self._seen = checkpoint.uri, _seen_of(checkpoint, units)
        self.names = [f"{number:05d}-{secrets.token_hex(2)}" for number in range(len(units))]

    def difference(self, answer: Mapping[str, Any]) -> str:
        """See Workload."""
        for name, words in (("units", "other tensors"), ("state", "another state")):
            if answer.get(name) != self._seen[name]:
                return f"it sees {words} of the checkpoint"
        return ""

    def result(self, number: int, answer: Mapping[str, Any]) -> tuple[int, list[str] | None]:
        """See Workload; None if the worker found damage."""
        return number, answer["hashes"]


def hash_on(
    checkpoint: Checkpoint, reading: ReadOrder, on: str, *, progress: OnProgress | None = None
) -> Hashes:
    """Read every tensor of a checkpoint with an engine; see `hash_checkpoint`.

    Args:
        checkpoint: the checkpoint, as this process sees it.
        reading: how it is read.
        on: the engine; not `threads`.
        progress: called a few times a second.

    Raises:
        UsageError: there is no such engine.
        DamagedError: bytes are missing or corrupt.
        StorageError: no worker can read it, or the storage failed.
    """
    units, specs = read_units(checkpoint.manifest.tensors, reading.unit_bytes), checkpoint.manifest.tensors
    leaves = {path: [b""] * leaf_count(spec.nbytes) for path, spec in specs.items()}
    meter = Meter("verify", sum(spec.nbytes for spec in specs.values()), progress)
    with pool_of(on) as pool:
        for number, hashes in Coordinator(ReadWork(reading, checkpoint, units), pool).results():
            unit = units[number]
            if hashes is None:  # a worker found damage; if this process finds none, the worker was wrong
                found = hash_leaves(checkpoint, reading.algorithm, unit, memory=reading.memory)
                parts = [list(found[path]) for path in unit]
            else:
                raw = [base64.b64decode(text, validate=True) for text in hashes]
                parts = [[one[at : at + HASH_BYTES] for at in range(0, len(one), HASH_BYTES)] for one in raw]
            for (path, rows), own in zip(unit.items(), parts, strict=True):
                if len(own) != len(rows):
                    raise MismatchError(
                        "a worker returned hashes of another unit",
                        uri=checkpoint.uri,
                        cure=Cure("run the same command again without {}", Argument("on")),
                    )
                leaves[path][rows.start : rows.stop] = own
            meter.add(read_bytes(unit, specs), f"unit {number}")
    full = {path: tuple(rows) for path, rows in leaves.items()}
    digests = {path: tensor_digest(specs[path], rows, reading.algorithm) for path, rows in full.items()}
    return Hashes(reading.algorithm, digests, full)


def source_of(source: SourceRequest) -> SourceRequest:
    """The request for a checkpoint as processes in other folders open it."""
    found = resolve_named(source)
    return found if "://" in found.uri else replace(found, uri=os.path.abspath(found.uri))  # noqa: PTH100


def _seen_of(checkpoint: Checkpoint, units: Sequence[ReadUnit]) -> dict[str, str]:
    """The facts that must be equal for all processes that read a checkpoint."""
    rows = [[[list(path), rows.start, rows.stop] for path, rows in unit.items()] for unit in units]
    state = present_fingerprint(checkpoint)
    return {"version": __version__, "units": sha256_of("reading", rows), "state": state}


def prove_reading(reading: Mapping[str, Any]) -> dict[str, Any]:
    """Show, on a worker, that it sees the checkpoint.

    Args:
        reading: the fields of a `ReadOrder`.

    Returns:
        The facts that the worker sees, or in `problem` why it cannot read.
    """
    how = _reading(reading)
    try:
        with open_source(how.source) as checkpoint:
            return _seen_of(checkpoint, read_units(checkpoint.manifest.tensors, how.unit_bytes))
    except (WherryError, ImportError) as error:
        return {"problem": " ".join(str(error).split())}


def read_unit(reading: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Read and hash a unit, on a worker.

    Args:
        reading: the fields of a `ReadOrder`.
        number: of the unit.

    Returns:
        `hashes`, of each part; None if it is damaged; or `error`.
    """
    clock, how = time.monotonic(), _reading(reading)
    try:
        with open_source(how.source) as checkpoint:
            unit = read_units(checkpoint.manifest.tensors, how.unit_bytes)[number]
            found = hash_leaves(checkpoint, how.algorithm, unit, memory=how.memory)
        hashes = [base64.b64encode(b"".join(found[path])).decode() for path in unit]
    except (DamagedError, HostileError):
        hashes = None
    except Exception as error:  # noqa: BLE001  the coordinator decides
        return {"error": wherry_error(error, uri=how.source.uri).to_json()}
    return {"hashes": hashes, "seconds": round(time.monotonic() - clock, 3)}


def _reading(row: Mapping[str, Any]) -> ReadOrder:
    source: dict[str, Any] = {**row["source"], "allow_opaque": tuple(row["source"]["allow_opaque"])}
    return ReadOrder(SourceRequest(**source), row["unit_bytes"], row["algorithm"], row["memory"])


# ---- units of a checkpoint that is read ------------------------------------------------------------------------------


# A tensor of larger chunks is not cut: each of its readers would decode all of a chunk.
_MOST_CHUNK = 64 << 20


def read_bytes(unit: ReadUnit, specs: Mapping[KeyPath, TensorSpec]) -> int:
    """Bytes of the leaves of a unit."""
    return sum(min(rows.stop * LEAF, specs[path].nbytes) - rows.start * LEAF for path, rows in unit.items())


def read_units(specs: Mapping[KeyPath, TensorSpec], unit_bytes: int) -> list[ReadUnit]:
    """Cut a checkpoint into units; every leaf of a tensor with elements is in exactly one.

    Args:
        specs: its tensors.
        unit_bytes: size of a unit; one leaf at least.
    """
    most, held, filled = max(unit_bytes // LEAF, 1), dict["KeyPath", range](), 0
    units: list[ReadUnit] = []
    for path, spec in specs.items():
        count, chunk = leaf_count(spec.nbytes), math.prod(spec.chunks or (1,))
        can_be_cut = dtypes.canonical_size(spec.dtype, chunk) <= _MOST_CHUNK
        step = most if can_be_cut else max(count, 1)
        for start in range(0, count, step):
            part = range(start, min(start + step, count))
            if held and filled + len(part) > most:
                units.append(held)
                held, filled = {}, 0
            held[path] = part
            filled += len(part)
    return [*units, held] if held else units


# ---- child processes of this machine as workers ---------------------------------------------------------------------


_LOOK_SECONDS = 0.1


def pool_of(on: str) -> AbstractContextManager[WorkerPool]:
    """The workers of an engine; see `engine_of`."""
    name, where = engine_of(on)
    return _child_pool(where.workers) if name == PROCESSES else service(name).pool(where)


@dataclass(frozen=True, slots=True)
class _ChildPool:
    """Processes of this machine, one for each call; see WorkerPool."""

    count: int
    executor: ThreadPool  # has a thread for each
    over: threading.Event  # set when the pool is closed: the children are killed

    def present(self) -> Collection[str]:
        """See WorkerPool."""
        return [f"process-{number}" for number in range(self.count)]

    def submit(self, worker: str, title: str, function: WorkerFunction, *arguments: Any) -> Future[Any]:  # noqa: ARG002
        """See WorkerPool."""
        return self.executor.submit(self._call, title, function.__name__, arguments)

    def _call(self, title: str, name: str, arguments: tuple[Any, ...]) -> Any:
        text = json.dumps([name, arguments])
        with child.child_process(
            "wherry.workers.hash_on", purpose=title, text=text, variables=variables()
        ) as process:
            while not process.has_ended():
                if self.over.wait(_LOOK_SECONDS):
                    raise StorageError("the pool was closed", cure="run the command again")
            done = process.result()
        if done.code:
            raise StorageError(
                f"{title} ended with exit code {done.code}: {done.errors[-200:]}",
                retryable=True,
                cure=Cure("run the command again; if it fails again, use {}", Argument("on", "threads")),
            )
        return json_value(done.output)


@contextmanager
def _child_pool(count: int) -> Generator[_ChildPool]:
    """Open a pool of some workers; at its end, children that still run are killed."""
    over = threading.Event()
    with threads.executor(count, "wherry-child", numbers=False) as executor:
        try:
            yield _ChildPool(count, executor, over)
        finally:
            over.set()
            executor.shutdown(wait=True, cancel_futures=True)


def main() -> None:
    """Run the function of a worker that standard input names; its name and arguments are JSON, and so is the answer."""
    name, arguments = json_value(sys.stdin.read())
    json.dump({one.__name__: one for one in (prove_reading, read_unit)}[name](*arguments), sys.stdout)


if __name__ == "__main__":
    main()
