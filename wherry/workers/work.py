"""work: one worker of a job: it claims units, makes them, and writes their receipts, until none is left.

Then it reads back units that others have made. Nobody waits for that: what has no proof is read back by the commit.

Any number of workers on any machines do this at the same time. They agree only through records next to the target, so
no engine and no coordinator is needed; whatever starts the processes will do.
"""

from __future__ import annotations

import random
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from wherry.core.progress import logger
from wherry.errors import IncompleteError, MismatchError, TargetExistsError, WherryError
from wherry.remote.waits import waiting
from wherry.target.leftovers import CLAIM_SECONDS, JOB
from wherry.workers.claims import Claims, claims_among
from wherry.workers.job import opened_job, require_able
from wherry.workers.make import make_unit, this_worker
from wherry.workers.read_back import prove_unit
from wherry.workers.record import TaskKind, TaskRecord, records_by_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wherry.workers.claims import Claim
    from wherry.workers.job import SplitJob
    from wherry.workers.record import Task
    from wherry.workers.unit import Unit


LOOK_SECONDS = 1.0  # between two looks, while other workers have the rest
LOOKED_AT = 2  # claims of others that a worker looks at before it takes a unit that nobody has claimed
LOOKED_AT_LAST = 4  # where there is no such unit
_MOST_FAILURES = 3  # of a worker, one after the other
_log = logger(__name__)


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


def run_claimed(split: SplitJob, claims: Claims, task: Task, claim: Claim) -> TaskRecord | None:
    """Do a task that was claimed, and record what was done; the claim is renewed meanwhile.

    Args:
        split: the job.
        claims: its claims.
        task: what is done.
        claim: on the task.

    Returns:
        The record; None if what is to be read back is not there as its receipt says, which the commit will find.

    Raises:
        TargetExistsError: another attempt has made one of the objects.
        WherryError: the source cannot be read, or the storage failed.
    """
    with claims.renewed(claim):
        if task.kind is TaskKind.MAKE:
            record = make_unit(split, task.unit, claim)
        else:
            try:
                record = prove_unit(split, task.unit, split.records.names(), claim.token)
            except (IncompleteError, MismatchError) as error:
                _log.warning("unit %s was not read back: %s", task.unit.name, error)
                return None
        split.records.create(record.name, record, claim.token)
    return record


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
                made, read = (records_by_unit(kind, names) for kind in TaskKind)
                tasks = self._split.tasks
                left = [task for task in tasks if task.kind is TaskKind.MAKE and task.unit.number not in made]
                rest = left or [
                    task
                    for task in tasks
                    if task.kind is TaskKind.READ
                    and task.unit.number not in read
                    and task.key not in self._left_out
                ]
                for task in in_order(rest, names, self._id):
                    if not left and this_worker() in self._makers_of(made[task.unit.number]):
                        self._left_out.add(task.key)
                    elif (claim := self._claims.take(task, names)) is not None:
                        return task, claim
                if not left:
                    return None
                time.sleep(LOOK_SECONDS)

    def _makers_of(self, receipts: Sequence[str]) -> set[str]:
        """Who has written some receipts."""
        for name in receipts:
            if name not in self._makers:
                row = self._split.records.read(name, TaskRecord)
                self._makers[name] = row.worker if row else ""
        return {self._makers[name] for name in receipts}

    def _do(self, task: Task, claim: Claim) -> None:
        """Do a task that was claimed; a failure to make a unit that may pass is counted."""
        record = None
        try:
            record = run_claimed(self._split, self._claims, task, claim)
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
