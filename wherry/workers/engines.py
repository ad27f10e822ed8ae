"""engines: has the units of a conversion made by the engine of a name, and commits.

threads              this process, without a job: the default
processes[:N]        N processes of this machine, each of which is a `wherry work`
dask[:N]             a Dask cluster of N workers on this machine, which is started, and ended with the conversion
dask://HOST:PORT     the scheduler of a Dask cluster
ray[:N]              a Ray cluster of N workers on this machine, likewise
ray://HOST:PORT      the client port of a Ray cluster
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, suppress

from wherry.config.file import CONFIG_ENV, config_file
from wherry.converter.convert import convert_all
from wherry.core import child
from wherry.core.child import Child
from wherry.core.json_document import json_value
from wherry.core.progress import Meter, OnProgress, UnitCounts
from wherry.core.receipt import GroupReceipt
from wherry.core.request import ConvertRequest
from wherry.core.services import service
from wherry.core.units import plural
from wherry.cures import Argument, Cure
from wherry.errors import IncompleteError, StorageError, TargetExistsError, UsageError
from wherry.target.signed_log import key_for_workers
from wherry.workers.commit import commit
from wherry.workers.coordinator import Workplace
from wherry.workers.job import SplitJob, split
from wherry.workers.records import TaskKind, claims_among, records_by_unit
from wherry.workers.work import carry_with_pool

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


def convert_units(
    request: ConvertRequest, on: str, unit_bytes: int, progress: OnProgress | None
) -> GroupReceipt:
    """Convert a checkpoint to one target with an engine: cut the plan, have the units made, and commit.

    Args, raises: see `convert_on`.
    """
    engine_of(on)
    if len(request.targets) != 1:
        raise UsageError(
            "an engine writes only one target at a time",
            cure=Cure("give one TARGET, or leave out {}", Argument("on")),
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
    """Have the units of a job made by several processes, each of which runs `wherry work`."""
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
    """The error that a worker has reported; empty if it did not fail."""
    result = worker.result()
    if not result.code:
        return ""
    try:
        return json_value(result.output)["what"]
    except (ValueError, KeyError, TypeError):
        return f"process {worker.pid} ended with exit code {result.code}"
