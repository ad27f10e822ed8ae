"""job_work: the tasks of a job under a coordinator: what it asks of its workers, and what runs on a worker.

A worker first shows that it can make a unit, and sees the same storage. The coordinator leaves a record with a secret
next to the target. A worker opens the job, which it can only do with the same wherry, key, plan and source, reads the
secret there, and leaves it in a record of its own. So both see what the other writes. The secret does not pass through
the engine.

Arguments and answers are JSON values, so an engine carries nothing else. A worker does one task at a time, with all of
its cores; it opens the job once.
"""

from __future__ import annotations

import re
import secrets
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.errors import MismatchError, NotFoundError, TargetExistsError, WherryError, wherry_error
from wherry.target.leftovers import JOB
from wherry.version import __version__
from wherry.workers.claims import Claims
from wherry.workers.coordinator import Call, Workload, run_workload
from wherry.workers.job import opened_job, require_able
from wherry.workers.make import this_worker
from wherry.workers.record import ChallengeRecord, TaskKind, TaskRecord, records_by_unit
from wherry.workers.work import run_claimed

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from wherry.core.progress import UnitCounts
    from wherry.workers.coordinator import WorkerPool
    from wherry.workers.job import SplitJob


_NAME = re.compile("[0-9a-f]{8}")


@contextmanager
def job_work(job: SplitJob) -> Generator[JobWork]:
    """The tasks of a job for a coordinator while the block runs; its records are removed at the end.

    Raises:
        StorageError: the storage failed.
    """
    token, secret = secrets.token_hex(4), secrets.token_hex(16)
    job.records.create(_challenge(token), ChallengeRecord(secret), token)
    try:
        yield JobWork(job, token, secret)
    finally:
        for name in job.records.names():
            if name.startswith(_challenge(token)):
                job.records.remove(name)


def carry_with_pool(job: SplitJob, pool: WorkerPool, counts: UnitCounts | None = None) -> Generator[str]:
    """Have the units of a job made by a pool; see `wherry.workers.engines.carry`."""
    with job_work(job) as work:
        yield from run_workload(work, pool, counts)


class JobWork(Workload):
    """The tasks of a job; the result of each is the name of its record.

    Units are read back when all are made, and by workers that have not made them. Where no such workers are left, the
    commit reads them back.
    """

    again = "resumes with the units that are left"

    def __init__(self, job: SplitJob, token: str, secret: str) -> None:
        """Begin.

        Args:
            job: the job.
            token: id of the coordinator; names its records, and marks the claims of its workers.
            secret: what its record holds.
        """
        self._job, self.token, self._secret, self._tasks = job, token, secret, job.tasks
        self._left = set(range(len(job.units)))  # units without a receipt
        self._makers: dict[int, str] = {}  # number of a unit → who made it
        self.uri = job.uri
        self.names = [
            task.unit.name if task.kind is TaskKind.MAKE else f"{task.unit.name}-{task.kind}"
            for task in self._tasks
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

    def first(self) -> Call:
        """See Workload."""
        return Call(prove, (self._job.uri, self.token))

    def problem(self, answer: Mapping[str, Any]) -> str:
        """See Workload.

        Raises:
            StorageError: the storage failed.
        """
        if answer.get("problem"):
            return str(answer["problem"])
        if answer.get("version") != __version__:
            return f"it has wherry {answer.get('version')}; this process has wherry {__version__}"
        if answer.get("plan") != self._job.job.plan.digest:
            return "it has another plan"
        name, read = str(answer.get("name")), self._job.records.read
        row = read(_challenge(self.token, name), ChallengeRecord) if _NAME.fullmatch(name) else None
        if row is None or row.secret != self._secret:
            return "what it writes next to the target is not seen here"
        return ""

    def suits(self, number: int, answer: Mapping[str, Any]) -> bool:
        """See Workload."""
        task = self._tasks[number]
        if task.kind is TaskKind.MAKE:
            return True
        worker = str(answer.get("worker", ""))
        return not self._left and bool(worker) and worker != self._maker(task.unit.number)

    def call(self, number: int) -> Call:
        """See Workload."""
        task = self._tasks[number]
        return Call(do, (self._job.uri, self.token, str(task.kind), task.unit.number))

    def result(self, number: int, answer: Mapping[str, Any]) -> str | None:
        """See Workload; None if a unit was not read back: that is left to the commit."""
        task = self._tasks[number]
        if task.kind is TaskKind.MAKE:
            self._left.discard(task.unit.number)
            if "worker" in answer:
                self._makers[task.unit.number] = answer["worker"]
        return answer["record"]

    def last(self) -> Call:
        """See Workload."""
        return Call(close, (self.token,))

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


# ---- on a worker -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenJob:
    """The job that this process has open for a coordinator.

    Attributes:
        token: id of the coordinator.
        stack: closes it.
        job, claims: of the job; None before it is open.
    """

    token: str = ""
    stack: ExitStack = field(default_factory=ExitStack)
    job: SplitJob | None = None
    claims: Claims | None = None


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


def close(token: str) -> dict[str, Any]:
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
    record = run_claimed(job, claims, task, claim)
    if record is None:
        return {"record": None, "seconds": None}
    return {"record": record.name, "seconds": record.seconds, "worker": record.worker}


def _open_job(uri: str, token: str) -> tuple[SplitJob, Claims]:
    if _open.job is None or _open.claims is None or _open.token != token:
        _close()
        _open.job = _open.stack.enter_context(opened_job(uri))
        _open.claims, _open.token = Claims(_open.job.records, coordinator=token), token
    return _open.job, _open.claims


def _close() -> None:
    _open.job = _open.claims = None
    _open.token = ""
    _open.stack.close()
