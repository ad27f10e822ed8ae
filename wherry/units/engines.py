"""engines: what starts the workers of a job. The plan is the queue and the store is the memory, so this is all they do.

    threads          this process, without a job: the default
    processes:N      N processes of this machine

Whatever the engine, units are claimed through the records of the job: an engine that dies leaves a job that the same
command, another engine or `wherry work` takes up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Protocol, Self

from wherry.converter.convert import convert_all
from wherry.core.progress import Meter
from wherry.errors import StorageError, TargetExistsError, UsageError
from wherry.units.commit import commit
from wherry.units.cut import UNIT_BYTES
from wherry.units.split_job import split
from wherry.units.unit_receipt import done

if TYPE_CHECKING:
    from wherry.core.progress import OnProgress
    from wherry.core.receipt import GroupReceipt
    from wherry.core.request import ConvertRequest
    from wherry.units.split_job import SplitJob

THREADS = "threads"
_LOOK_SECONDS = 0.5


class Engine(Protocol):
    """Starts workers."""

    def __call__(self, made: SplitJob, where: str, progress: OnProgress | None) -> None:
        """Have every unit of a job made.

        Args:
            made: the job.
            where: what follows the name of the engine: a number of workers.
            progress: called a few times a second.

        Raises:
            UsageError: `where` is invalid.
            StorageError: workers failed, and units are left.
        """
        ...


def convert_on(
    request: ConvertRequest, on: str, *, unit_bytes: int = UNIT_BYTES, progress: OnProgress | None = None
) -> GroupReceipt:
    """Convert a checkpoint to one target on an engine; see `convert_all`.

    Args:
        request: with one target.
        on: `threads` or `processes:N`.
        unit_bytes: size of a unit.
        progress: called a few times a second.

    Raises:
        UsageError: there is no such engine, or there are several targets.
        WherryError: what `split`, the engine and `commit` raise.
    """
    name, _, where = on.partition(":")
    if name == THREADS:
        return convert_all(request, progress=progress)
    engine = _engine(name)
    if len(request.targets) != 1:
        raise UsageError("an engine makes one target at a time", cure="give one TARGET, or leave out --on")
    try:
        made = split(request, unit_bytes)
    except TargetExistsError:
        return convert_all(request, progress=progress)  # which says what is there
    engine(made, where, progress)
    return commit(made.uri, progress=progress)


def _engine(name: str) -> Engine:
    if name == "processes":
        return run_processes
    raise UsageError(f"unknown engine {name!r}", cure=f"choose {THREADS} or processes:N")


def run_processes(made: SplitJob, where: str, progress: OnProgress | None) -> None:
    """Start worker processes on this machine; see Engine."""
    line = [sys.executable, "-m", "wherry.cli", "work", made.uri, "--json"]
    running = [
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # noqa: S603  our own
        for _ in range(count_of(where))
    ]
    try:
        with UnitProgress(made, progress) as watch:
            while any(one.poll() is None for one in running):
                time.sleep(_LOOK_SECONDS)
                watch.look()
    finally:
        for one in running:
            one.terminate()
            one.wait()
    require_made(made, [_error(one) for one in running if one.returncode])


def count_of(where: str) -> int:
    """A number of workers; as many as there are cores by default.

    Raises:
        UsageError: it is not one.
    """
    if not where:
        return os.cpu_count() or 1
    if not where.isdecimal() or not int(where):
        raise UsageError(f"invalid number of workers: {where!r}", cure="write for example processes:4")
    return int(where)


def require_made(made: SplitJob, errors: list[str]) -> None:
    """Refuse to go on if units are left after all workers have ended.

    Args:
        made: the job.
        errors: of workers that have failed.

    Raises:
        StorageError: units are left.
    """
    left = len(made.units) - len(done(made.records.names()))
    if left:
        raise StorageError(
            f"{left} of {len(made.units)} units are not made; {len(errors)} workers failed"
            f"{': ' if errors else ''}{'; '.join(dict.fromkeys(errors))}",
            uri=made.uri,
            cure="run the same command again: it goes on with what is left",
            retryable=True,
        )


class UnitProgress:
    """Shows the progress of a job by its receipts; use it in a `with` statement."""

    def __init__(self, made: SplitJob, progress: OnProgress | None) -> None:
        self._made, self._seen = made, set[int]()
        self._meter = Meter("convert", sum(unit.nbytes for unit in made.units), progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.look()

    def look(self) -> None:
        """Count the units that were made since the last look."""
        for number in sorted(done(self._made.records.names()).keys() - self._seen):
            self._seen.add(number)
            unit = self._made.units[number]
            self._meter.add(unit.nbytes, unit.name)


def _error(process: subprocess.Popen[bytes]) -> str:
    """What a worker has said about its failure."""
    text = process.stdout.read() if process.stdout else b""
    try:
        return json.loads(text)["what"]
    except (ValueError, KeyError, TypeError):
        return f"process {process.pid} ended with exit code {process.returncode}"
