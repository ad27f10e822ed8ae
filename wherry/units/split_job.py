"""SplitJob: a conversion that is cut into units, as each of its processes opens it.

The record of the job holds the request, not the plan: every process opens the source and plans by itself, and takes
part only if it gets the same plan of the same source with the same wherry. So nothing that a process is told is
believed about the source, and a worker that sees another storage, or another state of it, is named and left out.
"""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wherry.converter.convert import existing, plan_jobs
from wherry.converter.job import header_of, identity_of
from wherry.converter.passes import algorithms_of
from wherry.converter.traffic import streams
from wherry.core.progress import RunContext
from wherry.errors import MismatchError, NotFoundError, TargetExistsError, TargetInUseError, UnsupportedError
from wherry.formats.checkpoint import open_source
from wherry.formats.pin import settled_checkpoint
from wherry.ledger.open import resolve_named
from wherry.records.record_schema import request_of
from wherry.records.records import JOB, Records, records_beside, target_of
from wherry.staging.in_use import in_use
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import locate
from wherry.units.estimate import units_of
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from wherry.converter.job import Job
    from wherry.core.request import ConvertRequest
    from wherry.records.unit import Unit

_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class SplitJob:
    """A conversion that is cut into units.

    Attributes:
        job: the planned conversion.
        units: its units.
        records: what its processes tell each other.
        header: what identifies the conversion; the same in each of its processes.
        algorithms: with which its leaves are hashed.
        request: as it was stated.
        unit_bytes: size of a unit.
        whole: why there is only one unit; empty if there are several.
    """

    job: Job
    units: tuple[Unit, ...]
    records: Records
    header: Mapping[str, str]
    algorithms: tuple[str, ...]
    request: ConvertRequest
    unit_bytes: int
    whole: str = ""

    @property
    def identity(self) -> str:
        """Eight hex digits of the conversion; name its staging area."""
        return identity_of(self.header)

    @property
    def proof_units(self) -> tuple[Unit, ...]:
        """The proofs of the units that other workers read back, as units with numbers of their own.

        Left to the commit are the regions of an object, which cannot be read before its upload is complete. None are
        left to anybody where nothing is read back at all.
        """
        if self.job.plan.verify != "digest":
            return ()
        return tuple(self.proof_of(unit) for unit in self.units if self._is_readable(unit))

    def proof_of(self, unit: Unit) -> Unit:
        """The proof of a unit, as a unit with a number of its own."""
        return replace(unit, number=len(self.units) + unit.number)

    def _is_readable(self, unit: Unit) -> bool:
        return unit.region is None or self.records.store is None

    @property
    def uri(self) -> str:
        """The folder of the job."""
        return self.records.folder.uri

    def to_json(self) -> dict[str, Any]:
        """The record of the job."""
        return {
            "schema": _SCHEMA,
            "header": dict(self.header),
            "request": self.request.to_json(),
            "unit_bytes": self.unit_bytes,
            "units": [unit.digest for unit in self.units],
            "members": list(self.job.row.commit_members),
            "run": self.identity,
        }


def split(request: ConvertRequest, unit_bytes: int) -> SplitJob:
    """Make a job of a conversion to one target; workers can take units of it from then on.

    Args:
        request: with one target.
        unit_bytes: size of a unit.

    Raises:
        UnsupportedError: the target's format cannot be written by several processes.
        TargetExistsError: the target exists.
        TargetInUseError: there is a job of another conversion to this target.
        WherryError: what planning raises.
    """
    asked = replace(request, source=resolve_named(request.source))
    with _plan_job(asked.anchored, unit_bytes) as made:
        if made.records.read(JOB) is None:
            _require_absent(made)
            made.records.begin()
            made.records.create(JOB, made.to_json(), made.identity)
        if other := _difference(_record(made.records), made):
            raise TargetInUseError(
                f"a job of another conversion to this target exists, with {other}",
                uri=made.uri,
                cure=f"finish it with `wherry commit {shlex.quote(made.uri)}`, or remove {made.uri}",
            )
        return made


@contextmanager
def opened_job(uri: str) -> Generator[SplitJob]:
    """Open a job by its folder or its target, as each of its processes does; the source is open in the block.

    Raises:
        NotFoundError: there is no job.
        MismatchError: this process has another wherry, or sees another source or plan.
        HostileError: the job was made with another key.
        CorruptError: its record is invalid.
        WherryError: what planning raises.
    """
    row = _record(records_beside(target_of(locate(uri))))
    if row["header"].get("version") != __version__:
        raise MismatchError(
            f"the job was made by wherry {row['header'].get('version')}; this process has wherry {__version__}",
            uri=uri,
            cure=f"install wherry {row['header'].get('version')} for this worker",
        )
    with _plan_job(request_of(row["request"], JOB, uri), row["unit_bytes"]) as made:
        if other := _difference(row, made):
            raise MismatchError(
                f"this process sees {other} than the one that made the job",
                uri=made.uri,
                cure="check that all workers see the same storage, and that the source has not changed",
            )
        yield made


@contextmanager
def _plan_job(request: ConvertRequest, unit_bytes: int) -> Generator[SplitJob]:
    """The job that this process would make of a request."""
    with (
        settled_checkpoint(lambda: open_source(resolve_named(request.source))) as checkpoint,
        in_use(checkpoint.uri),
    ):
        [job] = plan_jobs(checkpoint, request, RunContext.begun())
        units, whole = units_of(job.checkpoint, job.plan, job.committed, unit_bytes)
        _require_units(job, units, whole)
        algorithms = algorithms_of(job.algorithm, read_sidecar(checkpoint.location))
        records = records_beside(job.committed)
        header = header_of(job, algorithms)
        yield SplitJob(job, units, records, header, algorithms, request, unit_bytes, whole)


def _require_units(job: Job, units: Sequence[Unit], whole: str) -> None:
    local = job.committed.store.capabilities.local
    if not units or not (local or streams(job.row.name, job.committed)):
        raise UnsupportedError(
            f"{job.row.name} cannot be written by several processes here{whole and ': '}{whole}",
            uri=job.target.uri,
            cure="use `wherry convert`",
        )


def _require_absent(made: SplitJob) -> None:
    """Refuse a target that exists, also if it is the result of this conversion: there is nothing to split.

    Then records without a job are those of a commit that was killed while it removed them, or of a late worker.
    """
    if existing(made.job, made.request.if_exists) is not None:
        made.records.end()
        raise TargetExistsError(
            "the target exists already, and is the result of this conversion",
            uri=made.job.committed.uri,
            cure="there is nothing to do",
        )


def _record(records: Records) -> dict[str, Any]:
    row = records.read(JOB)
    if row is None:
        raise NotFoundError(
            "no job found",
            uri=records.folder.uri,
            cure="create one: `wherry split SOURCE TARGET --to FORMAT`",
        )
    return row


def _difference(row: Mapping[str, Any], made: SplitJob) -> str:
    """How a job's record differs from what this process plans; empty if it does not."""
    mine = made.to_json()
    changed = [name for name, value in mine["header"].items() if row["header"].get(name) != value]
    if changed:
        return f"another {' and another '.join(changed)}"
    return "" if row["units"] == mine["units"] else "another size of units"
