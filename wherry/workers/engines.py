"""engines: has the units of a conversion made by the engine of a name, and commits.

threads              this process, without a job: the default
processes[:N]        N processes of this machine, each of which is a `wherry work`
dask[:N]             a Dask cluster of N workers on this machine, which is started, and ended with the conversion
dask://HOST:PORT     the scheduler of a Dask cluster
ray[:N]              a Ray cluster of N workers on this machine, likewise
ray://HOST:PORT      the client port of a Ray cluster
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherry.config.file import CONFIG_ENV, config_file
from wherry.converter.convert import convert_all
from wherry.core.progress import Meter, OnProgress, UnitCounts
from wherry.core.receipt import GroupReceipt
from wherry.core.request import ConvertRequest
from wherry.core.services import service
from wherry.core.units import plural
from wherry.errors import IncompleteError, StorageError, TargetExistsError, UsageError
from wherry.runtime import child, threads
from wherry.runtime.child import Child
from wherry.runtime.threads import ThreadPool
from wherry.target.key import key_for_workers
from wherry.text.json_values import json_value
from wherry.workers.commit import commit
from wherry.workers.coordinator import WorkerFunction, WorkerPool, Workplace
from wherry.workers.job import SplitJob, split
from wherry.workers.records import TaskKind, claims_among, records_by_unit
from wherry.workers.work import carry_with_pool

if TYPE_CHECKING:
    from concurrent.futures import Future


PROCESSES = "processes"
ENGINES = (PROCESSES, "dask", "ray")
CHOICES = "threads, processes:N, dask:N, dask://HOST:PORT, ray:N, ray://HOST:PORT"
LOOK_SECONDS = 0.5
_GRACE = 10.0  # seconds in which a worker that is stopped removes what it has begun
_ROUNDS = 3  # a file that was changed or removed after its receipt is made again
_PHASES = {TaskKind.MAKE: "convert", TaskKind.READ: "verify"}


def engine_of(on: str) -> tuple[str, Workplace]:
    """The engine of a name, and where its workers are.

    Raises:
        UsageError: there is no such engine, or what follows its name is invalid.
        MissingExtraError: it is not installed.
    """
    name, _, rest = on.partition(":")
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}", cure=f"choose one of: {CHOICES}")
    if name != PROCESSES:
        service(name)
    if rest.startswith("//"):
        if name == PROCESSES or rest == "//":
            raise UsageError(f"invalid engine {on!r}", cure=f"choose one of: {CHOICES}")
        return name, Workplace(rest.removeprefix("//"))
    if rest and not re.fullmatch(r"[1-9][0-9]{0,5}", rest):
        raise UsageError(f"invalid number of workers: {rest!r}", cure=f"write for example {name}:4")
    return name, Workplace(workers=int(rest) if rest else os.cpu_count() or 1)


def pool_of(on: str) -> AbstractContextManager[WorkerPool]:
    """The workers of an engine; see `engine_of`."""
    name, where = engine_of(on)
    return _child_pool(where.workers) if name == PROCESSES else service(name).pool(where)


def convert_units(
    request: ConvertRequest, on: str, unit_bytes: int, progress: OnProgress | None
) -> GroupReceipt:
    """Convert a checkpoint to one target with an engine: cut the plan, have the units made, and commit.

    Args, raises: see `convert_on`.
    """
    engine_of(on)
    if len(request.targets) != 1:
        raise UsageError(
            "an engine writes only one target at a time", cure="give one TARGET, or leave out --on"
        )
    try:
        job = split(request, unit_bytes)
    except TargetExistsError:
        return convert_all(request, progress=progress)  # which says what is there
    for _ in range(_ROUNDS - 1):
        with suppress(IncompleteError):
            return _round(job, on, progress)
    return _round(job, on, progress)


def _round(job: SplitJob, on: str, progress: OnProgress | None) -> GroupReceipt:
    """Have the units made that are left, and commit."""
    before = set(records_by_unit(TaskKind.MAKE, job.records.names()))
    counts = UnitCounts(len(job.units), len(before))
    total = sum(unit.nbytes for unit in job.units)
    meters = {kind: Meter(phase, total, progress, counts) for kind, phase in _PHASES.items()}
    meters[TaskKind.MAKE].resume(sum(job.units[number].nbytes for number in before))
    with closing(carry(job, on, counts)) as records:
        for name in records:
            kind, number = TaskKind(name.split("-")[0]), int(name.split("-")[1])
            is_new = kind is TaskKind.READ or number not in before
            counts.done += kind is TaskKind.MAKE and is_new
            meters[kind].add(job.units[number].nbytes * is_new, job.units[number].name)
    _require_made(job, [])
    return commit(job.uri, progress=progress)


def carry(job: SplitJob, on: str, counts: UnitCounts | None = None) -> Generator[str]:
    """Have every unit of a job made, and read back by others than its makers as far as these are there.

    Args:
        job: the job.
        on: the engine.
        counts: gets the numbers of workers and of failed attempts.

    Yields:
        The name of each record of a task, when it is there.

    Raises:
        StorageError: units are left.
        UsageError, MissingExtraError: see `engine_of`.
    """
    name, where = engine_of(on)
    if name == PROCESSES:
        yield from _carry_with_processes(job, where.workers, counts or UnitCounts())
        return
    with service(name).pool(where) as pool:
        yield from carry_with_pool(job, pool, counts)


# ---- processes of this machine ---------------------------------------------------------------------------------------


def _carry_with_processes(job: SplitJob, count: int, counts: UnitCounts) -> Generator[str]:
    """Have the units of a job made by so many processes, each of which is a `wherry work`."""
    known = set[str]()

    def fresh() -> list[str]:
        records = job.records.names()
        counts.failed = sum(attempt > 0 for _task, attempt in claims_among(records))
        counts.workers = sum(not process.has_ended() for process in workers)
        first = (names[0] for kind in TaskKind for names in records_by_unit(kind, records).values())
        found = [name for name in first if name not in known]
        known.update(found)
        return found

    with ExitStack() as stack:
        workers = [_start(stack, job) for _ in range(count)]
        stack.callback(stop, workers, _GRACE)
        while not all(process.has_ended() for process in workers):
            time.sleep(LOOK_SECONDS)
            yield from fresh()
        yield from fresh()
        errors = [text for process in workers if (text := _error(process))]
    _require_made(job, errors)


def variables() -> dict[str, str]:
    """The environment of a worker of this machine: that of this process, its configuration and its key."""
    file = config_file()
    return {**child.own_variables(), **key_for_workers(), **({CONFIG_ENV: str(file)} if file else {})}


def _start(stack: ExitStack, job: SplitJob) -> Child:
    words = ["work", job.uri, "--json"]
    return stack.enter_context(
        child.child_process("wherry.cli", words, purpose="wherry work", variables=variables())
    )


def stop(workers: Sequence[Child], grace: float) -> None:
    """Ask processes to end, and kill those that have not after some seconds."""
    for process in workers:
        process.ask_to_end()
    deadline = time.monotonic() + grace
    for process in workers:
        process.result(max(0.0, deadline - time.monotonic()))


def _require_made(job: SplitJob, errors: Sequence[str]) -> None:
    """Refuse to go on if units are left after all workers have ended, some with errors."""
    left = len(job.units) - len(records_by_unit(TaskKind.MAKE, job.records.names()))
    if left:
        raise StorageError(
            f"{left} of {plural(len(job.units), 'unit')} are not written; {plural(len(errors), 'worker')} failed"
            f"{': ' if errors else ''}{'; '.join(dict.fromkeys(errors))}",
            uri=job.uri,
            cure="run the same command again; it resumes with the units that are left",
            retryable=True,
        )


def _error(worker: Child) -> str:
    """What a worker has said about its failure; empty if it did not fail."""
    result = worker.result()
    if not result.code:
        return ""
    try:
        return json_value(result.output)["what"]
    except (ValueError, KeyError, TypeError):
        return f"process {worker.pid} ended with exit code {result.code}"


# ---- a pool of them, for calls ---------------------------------------------------------------------------------------


_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _ChildPool:
    """Processes of this machine; see WorkerPool."""

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
                cure="run the command again; if it fails again, use --on threads",
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
