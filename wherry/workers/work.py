"""work: what workers of a job do: they make units, and read back units that others have made.

A worker takes tasks by itself (`work`): it claims units, makes them, and writes their receipts, until none is left.
Then it reads back. Nobody waits for that: what has no proof is read back by the commit. Any number of workers on any
machines do this at the same time. They agree only through records next to the target, so no engine and no coordinator
is needed; whatever starts the processes will do.

Or a coordinator gives it tasks (`JobWork`). A worker first shows that it can make a unit, and sees the same storage.
The coordinator leaves a record with a secret next to the target. A worker opens the job, which it can only do with the
same wherry, key, plan and source, reads the secret there, and leaves it in a record of its own. So both see what the
other writes. The secret does not pass through the engine. Arguments and answers are JSON values, so an engine carries
nothing else. A worker does one task at a time, with all of its cores; it opens the job once.
"""

from __future__ import annotations

import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, field
from hashlib import blake2b
from typing import Any

from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import UnitCounts, logger
from wherry.errors import (
    MismatchError,
    NotFoundError,
    TargetExistsError,
    WherryError,
    wherry_error,
)
from wherry.store.waits import waiting
from wherry.target.leftovers import CLAIM_SECONDS, JOB
from wherry.version import __version__
from wherry.workers.coordinator import Coordinator, WorkerPool, Workload
from wherry.workers.job import SplitJob, opened_job, require_able
from wherry.workers.records import (
    ChallengeRecord,
    Claim,
    Claims,
    Task,
    TaskKind,
    TaskRecord,
    claims_among,
    records_by_unit,
)
from wherry.workers.tasks import run_task, this_worker
from wherry.workers.unit import Unit

LOOK_SECONDS = 1.0  # between two looks, while other workers have the rest
LOOKED_AT = 2  # claims of others that a worker looks at before it takes a unit that nobody has claimed
LOOKED_AT_LAST = 4  # where there is no such unit
_MOST_FAILURES = 3  # of a worker, one after the other
_NAME = re.compile("[0-9a-f]{8}")
_log = logger(__name__)


# ---- a worker by itself ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkReport:
    """What one worker has done.

    Attributes:
        job: URI of the job.
        made: names of the units that it made.
        nbytes: bytes of their files.
        proved: names of the units that it read back.
        units: number of units of the job.
        ended: whether the job ended meanwhile, because it was committed.
    """

    job: str
    made: tuple[str, ...]
    nbytes: int
    units: int
    ended: bool = False
    proved: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The form of `wherry work --json`."""
        return {**asdict(self), "made": list(self.made), "proved": list(self.proved)}


def work(
    uri: str,
    *,
    expiry: float = CLAIM_SECONDS,
    on_unit: Callable[[Unit, TaskRecord], None] | None = None,
) -> WorkReport:
    """Make units of a job until every unit has a receipt; then read back what other processes have made.

    Args:
        uri: the folder of the job, or its target.
        expiry: seconds after which the claim of another worker that is not renewed expires.
        on_unit: called for each unit that was made.

    Raises:
        NotFoundError: there is no job.
        MismatchError: this process has another wherry, or sees another source or plan.
        MissingExtraError: this process lacks a codec.
        StorageError: it has too little memory for a unit.
        WherryError: making units failed several times.
    """
    with opened_job(uri) as split:
        require_able(split)
        claims = Claims(split.records, expiry)
        try:
            return _Worker(split, claims, on_unit).run()
        except (Exception, KeyboardInterrupt, SystemExit):
            with suppress(WherryError):  # otherwise they expire
                claims.release()
            raise


def in_order(rest: Sequence[Task], names: Sequence[str], worker: str = "") -> list[Task]:
    """The order in which a worker tries to claim tasks.

    To look at the claims of all other workers before each task would take requests that grow with their square. So each
    worker looks at few, and at the same ones as long as they are there, since it takes two looks to see that one has
    expired; each chooses others, so that together they see all. Which free task comes first is left to chance, so that
    two rarely try the same.

    Args:
        rest: the tasks that are not done, in the order of their units.
        names: of the records of the job.
        worker: id of the worker.
    """
    taken = {key for key, _attempt in claims_among(names)}
    held = [task for task in rest if task.key in taken]
    free = [task for task in rest if task.key not in taken]
    held.sort(key=lambda task: blake2b(f"{worker}-{task.key}".encode(), digest_size=8).digest())
    if not free:
        return held[:LOOKED_AT_LAST]
    first = [] if held else free[:1]  # a worker that is alone goes in order
    others = free[len(first) :]
    return [*held[:LOOKED_AT], *first, *random.sample(others, len(others))]


class _Worker:
    """The loop of one worker."""

    def __init__(
        self, split: SplitJob, claims: Claims, on_unit: Callable[[Unit, TaskRecord], None] | None
    ) -> None:
        self._split, self._claims, self._on_unit = split, claims, on_unit
        self._done: dict[TaskKind, list[Unit]] = {kind: [] for kind in TaskKind}
        self._makers: dict[str, str] = {}  # name of a receipt → who wrote it
        self._left_out = set[str]()  # keys of tasks that this worker leaves to others
        self._failures, self._ended = 0, False
        self._id = secrets.token_hex(4)

    def run(self) -> WorkReport:
        while (found := self._claim_next()) is not None:
            self._do(*found)
        made, read = self._done[TaskKind.MAKE], self._done[TaskKind.READ]
        return WorkReport(
            self._split.uri,
            tuple(unit.name for unit in made),
            sum(unit.nbytes for unit in made),
            len(self._split.units),
            self._ended,
            tuple(unit.name for unit in read),
        )

    def _claim_next(self) -> tuple[Task, Claim] | None:
        """The next task, once one can be claimed; None if none is left."""
        with waiting(self._split.uri, what="units that other workers make"):
            while True:
                names = self._split.records.names()
                if JOB not in names:
                    self._ended = True
                    return None
                done = {kind: records_by_unit(kind, names) for kind in TaskKind}
                left = [task for task in self._split.tasks if task.unit.number not in done[task.kind]]
                to_make = [task for task in left if task.kind is TaskKind.MAKE]
                rest = to_make or [task for task in left if task.key not in self._left_out]
                for task in in_order(rest, names, self._id):
                    if not to_make and this_worker() in map(
                        self._maker, done[TaskKind.MAKE][task.unit.number]
                    ):
                        self._left_out.add(task.key)
                    elif (claim := self._claims.take(task, names)) is not None:
                        return task, claim
                if not to_make:
                    return None
                time.sleep(LOOK_SECONDS)

    def _maker(self, name: str) -> str:
        """Who has written a receipt."""
        if name not in self._makers:
            row = self._split.records.read(name, TaskRecord)
            self._makers[name] = row.worker if row else ""
        return self._makers[name]

    def _do(self, task: Task, claim: Claim) -> None:
        """Do a task that was claimed; a failure to make a unit that may pass is counted."""
        record = None
        try:
            record = run_task(self._split, self._claims, task, claim)
        except TargetExistsError:
            # An earlier attempt was not dead but slow, and has made the object after all.
            self._note_failure(task.unit)
        except WherryError as error:
            if not error.retryable:
                raise
            if task.kind is TaskKind.MAKE:
                self._note_failure(task.unit, error)
            else:
                _log.warning("unit %s was not read back: %s", task.unit.name, error)
        if record is not None:
            self._failures = 0
            self._done[task.kind].append(task.unit)
            if task.kind is TaskKind.MAKE and self._on_unit is not None:
                self._on_unit(task.unit, record)
        elif task.kind is TaskKind.READ:
            self._left_out.add(task.key)

    def _note_failure(self, unit: Unit, error: WherryError | None = None) -> None:
        self._failures += 1
        _log.warning("unit %s was not written: %s", unit.name, error or "another attempt has written it")
        if self._failures >= _MOST_FAILURES:
            raise error or TargetExistsError(
                f"the objects of unit {unit.name} were made by somebody else",
                uri=self._split.job.committed.uri,
                cure="choose another target, or remove this one",
            )
        time.sleep(LOOK_SECONDS)


# ---- for a coordinator: what it gives to workers ---------------------------------------------------------------------


@contextmanager
def job_work(job: SplitJob) -> Generator[JobWork]:
    """The tasks of a job for a coordinator while the block runs; its records are removed at the end.

    Raises:
        StorageError: the storage failed.
    """
    tasks = JobWork(job)
    job.records.create(_challenge(tasks.token), ChallengeRecord(tasks.secret), tasks.token)
    try:
        yield tasks
    finally:
        for name in job.records.names():
            if name.startswith(_challenge(tasks.token)):
                job.records.remove(name)


def carry_with_pool(job: SplitJob, pool: WorkerPool, counts: UnitCounts | None = None) -> Generator[str]:
    """Have the units of a job made by a pool; see `wherry.workers.engines.carry`."""
    with job_work(job) as tasks:
        yield from Coordinator(tasks, pool, counts).results()


class JobWork(Workload):
    """The tasks of a job; the result of each is the name of its record.

    Units are read back when all are made, and by workers that have not made them. Where no such workers are left, the
    commit reads them back.

    Attributes:
        token: id of the coordinator; names its records, and marks the claims of its workers.
        secret: what its record holds.
    """

    again = "resumes with the units that are left"

    def __init__(self, job: SplitJob) -> None:
        self.token, self.secret = secrets.token_hex(4), secrets.token_hex(16)
        self.prove, self.do, self.close, self.arguments = prove, do, close, (job.uri, self.token)
        self._job, self._tasks = job, job.tasks
        self._left = set(range(len(job.units)))  # units without a receipt
        self._makers: dict[int, str] = {}  # number of a unit → who made it
        self.uri = job.uri
        self.names = [
            f"{unit.name}-{kind}" if kind is TaskKind.READ else unit.name for kind, unit in self._tasks
        ]

    def finished(self) -> dict[int, str]:
        """See Workload."""
        names = self._job.records.names()
        done = {kind: records_by_unit(kind, names) for kind in TaskKind}
        self._left.difference_update(done[TaskKind.MAKE])
        return {
            number: done[task.kind][task.unit.number][0]
            for number, task in enumerate(self._tasks)
            if task.unit.number in done[task.kind]
        }

    def difference(self, answer: Mapping[str, Any]) -> str:
        """See Workload.

        Raises:
            StorageError: the storage failed.
        """
        if answer.get("plan") != self._job.job.plan.digest:
            return "it has another plan"
        name, read = str(answer.get("name")), self._job.records.read
        row = read(_challenge(self.token, name), ChallengeRecord) if _NAME.fullmatch(name) else None
        if row is None or row.secret != self.secret:
            return "what it writes next to the target is not seen here"
        return ""

    def suits(self, number: int, answer: Mapping[str, Any]) -> bool:
        """See Workload."""
        task = self._tasks[number]
        if task.kind is TaskKind.MAKE:
            return True
        worker = str(answer.get("worker", ""))
        return not self._left and bool(worker) and worker != self._maker(task.unit.number)

    def unit(self, number: int) -> tuple[str, int]:
        """See Workload: the kind of the task, and the number of the unit of the job."""
        task = self._tasks[number]
        return str(task.kind), task.unit.number

    def result(self, number: int, answer: Mapping[str, Any]) -> str | None:
        """See Workload; None if a unit was not read back: that is left to the commit."""
        task = self._tasks[number]
        if task.kind is TaskKind.MAKE:
            self._left.discard(task.unit.number)
            if "worker" in answer:
                self._makers[task.unit.number] = answer["worker"]
        return answer["record"]

    def _maker(self, unit: int) -> str:
        """Who made a unit; the receipts that are not known are read together."""
        if unit not in self._makers:
            made = records_by_unit(TaskKind.MAKE, self._job.records.names())
            names = [names[0] for number, names in made.items() if number not in self._makers]
            for record in self._job.records.read_all(names, TaskRecord):
                self._makers[record.unit] = record.worker
        return self._makers.setdefault(unit, "")


def _challenge(token: str, name: str = "") -> str:
    """The name of the record of a coordinator, or of a worker's answer to it."""
    return f"challenge-{token}-{name}"


# ---- for a coordinator: on a worker ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenJob:
    """The job that this process has open for a coordinator.

    Attributes:
        token: id of the coordinator.
        stack: closes it.
        job: and its claims; None before it is open.
    """

    token: str = ""
    stack: ExitStack = field(default_factory=ExitStack)
    job: tuple[SplitJob, Claims] | None = None


_lock = threading.Lock()
_open = _OpenJob()


def prove(uri: str, token: str) -> dict[str, Any]:
    """Show that this worker can make units of a job.

    Args:
        uri: of the job.
        token: id of the coordinator.

    Returns:
        The answer, or in `problem` why it cannot.
    """
    try:
        with _lock:
            job, _claims = _open_job(uri, token)
            require_able(job)
            row = job.records.read(_challenge(token), ChallengeRecord)
            if row is None:
                raise MismatchError("it does not see the files that the coordinator wrote next to the target")
            name = secrets.token_hex(4)
            job.records.create(_challenge(token, name), row, name)
            plan, worker = job.job.plan.digest, this_worker()
            return {"version": __version__, "plan": plan, "name": name, "worker": worker}
    except (WherryError, ImportError) as error:
        return {"problem": " ".join(str(error).split())}


def do(uri: str, token: str, kind: str, number: int) -> dict[str, Any]:
    """Do a task of a job: make a unit, or read back one that another process has made.

    Args:
        uri: of the job.
        token: id of the coordinator.
        kind: of the task.
        number: of the unit.

    Returns:
        `record`, its name, None if this process cannot read the unit back; or `busy`, if another process does the task;
        or `error`.
    """
    try:
        with _lock:
            return _do(*_open_job(uri, token), TaskKind(kind), number)
    except TargetExistsError as error:  # an earlier attempt was not dead but slow, and has made an object
        return {"error": {**error.to_json(), "retryable": True}}
    except Exception as error:  # noqa: BLE001  the coordinator decides
        return {"error": wherry_error(error, uri=uri).to_json()}


def close(uri: str, token: str) -> dict[str, Any]:  # noqa: ARG001  as the others
    """Close the job that this process has open for a coordinator."""
    with _lock:
        if _open.token == token:
            _close()
    return {}


def _do(job: SplitJob, claims: Claims, kind: TaskKind, number: int) -> dict[str, Any]:
    names = job.records.names()
    if JOB not in names:
        raise NotFoundError("the job has ended", uri=job.uri, cure="run the same command again")
    if done := records_by_unit(kind, names).get(number):
        return {"record": done[0], "seconds": None}
    task = next(task for task in job.tasks if task.kind is kind and task.unit.number == number)
    claim = claims.take(task, names)
    if claim is None:
        return {"busy": True}
    record = run_task(job, claims, task, claim)
    if record is None:
        return {"record": None, "seconds": None}
    return {"record": record.name, "seconds": record.seconds, "worker": record.worker}


def _open_job(uri: str, token: str) -> tuple[SplitJob, Claims]:
    if _open.job is None or _open.token != token:
        _close()
        job = _open.stack.enter_context(opened_job(uri))
        _open.job, _open.token = (job, Claims(job.records, coordinator=token)), token
    return _open.job


def _close() -> None:
    _open.job, _open.token = None, ""
    _open.stack.close()
