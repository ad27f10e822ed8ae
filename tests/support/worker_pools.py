"""A pool without an engine: its workers run in this process, and fail as a test says."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future

from tests.support.jobs import undisturbed, worker_named
from wherry.core.request import TargetRequest, convert_request
from wherry.workers import work as working
from wherry.workers.commit import commit
from wherry.workers.coordinator import Coordinator
from wherry.workers.job import split
from wherry.workers.records import TaskKind
from wherry.workers.work import carry_with_pool

MOST_BYTES = 2000  # of an argument or an answer


class ImaginaryPool:
    """Workers that answer at once, or as `faults` says.

    Attributes:
        workers: those that are there.
        faults: called with worker, kind of task or name of function, and number of the call; returns an answer in place
            of the real one, `HANGS`, or None.
        calls: worker and title of everything that was run.
    """

    HANGS = object()

    def __init__(self, workers, faults=lambda _worker, _function, _call: None):
        self.workers, self.faults, self.calls, self.futures = set(workers), faults, [], []

    def present(self):
        return set(self.workers)

    def submit(self, worker, title, function, *arguments):
        self.calls.append((worker, title))
        future = Future()
        self.futures.append(future)
        what = TaskKind(arguments[2]) if function is working.do else function.__name__
        answer = self.faults(worker, what, len(self.calls))
        if answer is self.HANGS:
            return future
        answer = answer or function(*arguments)
        if isinstance(answer, Exception):
            future.set_exception(answer)
            return future
        assert len(json.dumps([arguments, answer])) < MOST_BYTES
        future.set_result(answer)
        return future

    def proofs_of(self, worker):
        """The numbers of the units that a worker has read back."""
        return [int(title.split("-")[1]) for title in self.units_of(worker) if TaskKind.READ in title]

    def units_of(self, worker):
        return [title for one, title in self.calls if one == worker and title.startswith("unit-")]


class SeparatePool(ImaginaryPool):
    """Workers that are known as different processes, so that they read back what others have made."""

    def submit(self, worker, title, function, *arguments):
        with worker_named(f"process of {worker}"):
            return super().submit(worker, title, function, *arguments)


def job_of(source, target, shard="100KB", unit=110_000):
    """A job of 12 units."""
    return split(request_of(source, target, shard), unit)


def request_of(source, target, shard="100KB"):
    return convert_request(
        str(source), [TargetRequest(str(target), "hf", {"max_shard_size": shard})], lineage=False
    )


def carried(made, pool):
    """The numbers of the units whose receipts came in, in order."""
    return [int(name.split("-")[1]) for name in carry_with_pool(made, pool)]


def coordinated(made, pool):
    """The coordinator that has carried a job."""
    with working.job_work(made) as tasks:
        coordinator = Coordinator(tasks, pool)
        assert len(list(coordinator.results())) == len(made.units)
    return coordinator


def same_tensors(receipt, source, folder):
    """Whether the result has the digests of one process; the sizes of its files are others."""
    return receipt.target.checkpoint_digest == undisturbed(source, folder).checkpoint_digest


def makes(what):
    return what == TaskKind.MAKE


def committed_as_by_one(made, source, folder):
    [receipt] = commit(made.uri).receipts
    return same_tensors(receipt, source, folder)


def set_variables(rows):
    """Set environment variables of a worker."""
    os.environ.update(rows)
