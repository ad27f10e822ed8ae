"""SplitJob: a conversion that is cut into units, as each of its processes opens it.

The record of the job holds the request, not the plan: every process opens the source and plans by itself, and takes
part only if it gets the same plan of the same source with the same wherry. So no process believes what others report
about the source, and a worker that sees another storage, or another state of it, is named and left out.

Where the home cannot hold a key, each process has its own, and passes it on to the workers that it starts. When it has
ended, nobody can read the records of its job. So its record names the process, and the next conversion to the target
sets the job aside if no worker is left at it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from wherry.converter.convert import existing, plan_jobs
from wherry.converter.job import Job, algorithms_of, header_of, identity_of, inside
from wherry.core.interpreter import available_memory
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import RunContext, logger
from wherry.core.request import ConvertRequest
from wherry.core.units import show_size
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import (
    HostileError,
    MismatchError,
    MissingExtraError,
    NotFoundError,
    StorageError,
    TargetExistsError,
    TargetInUseError,
    UnsupportedError,
    schema_error,
    storage_errors,
)
from wherry.formats.checkpoint import open_source, settled_checkpoint
from wherry.installation import package_command
from wherry.ledger.resolve import resolve_named
from wherry.mover.map_writer import map_of
from wherry.store.folders import remove_leftover
from wherry.store.local_store import locate
from wherry.store.location import MOST_CONFIG, Location
from wherry.store.sidecar import read_sidecar
from wherry.target.clean import leftover_objects
from wherry.target.file_map import FileMap
from wherry.target.janitor import in_use, owner_text, text_has_ended
from wherry.target.lease import judge_all
from wherry.target.leftovers import JOB, clean_leftovers, owners_of_job, unverified_row
from wherry.target.signed_log import key_for_workers
from wherry.target.staging import FileStaging, require_file_commit, set_aside
from wherry.version import __version__
from wherry.workers.records import (
    SCHEMA,
    JobRecord,
    Records,
    Task,
    TaskKind,
    job_records,
    target_of,
)
from wherry.workers.unit import CLIENT_BYTES, Unit, units_of


@dataclass(frozen=True, slots=True)
class SplitJob:
    """A conversion that is cut into units.

    Attributes:
        job: the planned conversion.
        units: its units.
        records: what its processes leave for each other.
        record: the record of the job; the same in each of its processes.
        algorithms: with which its leaves are hashed.
        whole: why there is only one unit; empty if there are several.
    """

    job: Job
    units: tuple[Unit, ...]
    records: Records
    record: JobRecord
    algorithms: tuple[str, ...]
    whole: str = ""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What workers do: they make every unit; then they read units back, each another one's.

        Left to the commit are the regions of an object, which cannot be read before its upload is complete. None are
        left to anybody where nothing is read back at all.
        """
        reads, local = self.job.plan.verify == "digest", self.records.store is None
        return (
            *(Task(TaskKind.MAKE, unit) for unit in self.units),
            *(Task(TaskKind.READ, unit) for unit in self.units if reads and (local or unit.region is None)),
        )

    @property
    def uri(self) -> str:
        """The folder of the job."""
        return self.records.folder.uri

    def file_map(self) -> FileMap:
        """The map of the target; its files state another time than those that were written.

        Raises:
            WherryError: a companion that decides bytes cannot be read.
        """
        job, plan = self.job, self.job.plan
        companion = job.checkpoint.reader.companion
        return map_of(job.row, inside(job, job.committed), plan.manifest, plan.options, companion)


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
    resolved = replace(request, source=resolve_named(request.source))
    with _plan_job(resolved.anchored, unit_bytes) as opened:
        set_dead_job_aside(opened.records, opened.job.committed)
        if opened.records.read(JOB, JobRecord) is None:
            if existing(opened.job, request.if_exists) is not None:
                # Then records without a job are of a commit that was killed in `end`, or of a late worker.
                opened.records.end()
                raise TargetExistsError(
                    "the target exists already, and is the result of this conversion",
                    uri=opened.job.committed.uri,
                    cure="there is nothing to do",
                )
            opened.records.begin()
            if opened.job.row.single_file and opened.records.store is None:
                try:
                    with storage_errors(opened.uri):
                        require_file_commit(Path(opened.records.folder.path), opened.job.committed)
                except UnsupportedError:  # the file system cannot do the commit
                    opened.records.end()
                    raise
            opened.records.create(JOB, opened.record, opened.record.run)
        if difference := _difference(_record(opened.records), opened):
            raise TargetInUseError(
                f"a job of another conversion to this target exists, with {difference}",
                uri=opened.uri,
                cure=Cure("finish it with {}, or remove {}", Command("commit", opened.uri), opened.uri),
            )
        return opened


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
    row = _record(job_records(target_of(locate(uri))))
    if (version := row.header.get("version")) != __version__:
        raise MismatchError(
            f"the job was made by wherry {version}; this process has wherry {__version__}",
            uri=uri,
            cure=f"install wherry {version} for this worker",
        )
    with _plan_job(row.request, row.unit_bytes) as opened:
        if difference := _difference(row, opened):
            raise MismatchError(
                f"this process sees {difference} than the one that made the job",
                uri=opened.uri,
                cure="check that all workers see the same storage, and that the source has not changed",
            )
        yield opened


@contextmanager
def _plan_job(request: ConvertRequest, unit_bytes: int) -> Generator[SplitJob]:
    """The job that this process would make of a request."""
    with (
        settled_checkpoint(lambda: open_source(resolve_named(request.source))) as checkpoint,
        in_use(checkpoint.uri),
    ):
        [job] = plan_jobs(checkpoint, request, RunContext.begun())
        units, whole = units_of(job.checkpoint, job.plan, job.committed, unit_bytes)
        store = job.committed.store
        if not units or not (store.capabilities.local or store.capabilities.parts):
            raise UnsupportedError(
                f"{job.row.name} cannot be written by several processes here{whole and ': '}{whole}",
                uri=job.target.uri,
                cure=Cure("use {}", Command("convert")),
            )
        algorithms = algorithms_of(job.algorithm, read_sidecar(checkpoint.location))
        header, digests = header_of(job, algorithms), tuple(unit.digest for unit in units)
        members, run = tuple(job.row.commit_members), identity_of(header)
        owner = owner_text() if key_for_workers() else ""  # else the home or `WHERRY_KEY` has the key
        record = JobRecord(header, request, unit_bytes, digests, members, run, owner, SCHEMA)
        yield SplitJob(job, units, job_records(job.committed), record, algorithms, whole)


def _record(records: Records) -> JobRecord:
    row = records.read(JOB, JobRecord)
    if row is None:
        raise NotFoundError(
            "no job found",
            uri=records.folder.uri,
            cure=Cure(
                "create one: {}",
                Command("split", Blank("SOURCE"), Blank("TARGET"), Argument("to", Blank("FORMAT"))),
            ),
        )
    if row.schema != SCHEMA:
        uri = records.folder.uri
        raise schema_error("job", row.schema, SCHEMA, uri, cure=f"remove {uri} and begin again")
    return row


def _difference(row: JobRecord, opened: SplitJob) -> str:
    """How a job's record differs from what this process plans; empty if it does not."""
    own = opened.record
    changed = [name for name, value in own.header.items() if row.header.get(name) != value]
    if changed:
        return f"another {' and another '.join(changed)}"
    return "" if row.units == own.units else "another size of units"


# ---- a job without its key -------------------------------------------------------------------------------------------


_log = logger(__name__)


def set_dead_job_aside(records: Records, target: Location) -> None:
    """Remove a job that nobody can finish: its process has ended with its key, and its workers have ended too.

    Args:
        records: of the job, if there is one.
        target: what it was to make.

    Raises:
        StorageError: the storage failed.
    """
    if not _is_lost(records):
        return
    owners = owners_of_job(records.folder)
    if owners.live(judge_all(list(owners.watches))):
        return
    if records.store is None:
        with suppress(TargetInUseError, FileNotFoundError), FileStaging(target, "0" * 8, resume=False):
            # Entering has discarded the staging areas of the job.
            remove_leftover(set_aside(Path(records.folder.path)))
    elif left := leftover_objects(target, records.folder):
        clean_leftovers([left], dry_run=False)
    if not _is_lost(records):
        _log.warning(
            "%s: the job of a process that has ended was set aside: nobody has its key; the conversion starts again",
            records.folder.uri,
        )


def _is_lost(records: Records) -> bool:
    """Whether the record of a job was signed with the key of a process that has ended."""
    try:
        records.read(JOB, JobRecord)
    except HostileError:
        key_owner = ""  # cannot be checked: whoever could lie here could remove the job
        with suppress(NotFoundError):
            row = unverified_row(records.folder.join(JOB).read_whole(MOST_CONFIG))
            key_owner = str(row.get("key_owner", ""))
        return text_has_ended(key_owner)
    return False


# ---- what a worker needs before it takes a unit ----------------------------------------------------------------------


_CODECS = ("blake3", "deflate", "isal", "ml_dtypes", "numpy", "tensorstore", "zstandard")


def require_able(split: SplitJob) -> None:
    """Refuse to work on a job that this process cannot make a unit of.

    Args:
        split: the job, opened.

    Raises:
        MissingExtraError: a codec is not installed.
        StorageError: there is too little memory.
    """
    for name in _CODECS:
        try:
            import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"this worker lacks the package {name}: {error}", cure=f"run `{package_command(name)}` there"
            ) from error
    needed, free = split.job.plan.peak_memory + CLIENT_BYTES, available_memory()
    if free is not None and free < needed:
        raise StorageError(
            f"this worker has {show_size(free)} of free memory; a unit needs {show_size(needed)}",
            uri=split.uri,
            cure=Cure("give the worker more memory, or lower {} of the conversion", Argument("memory")),
            retryable=True,
        )
