"""Coordinator: gives one unit at a time to each worker of a pool, until every unit has a receipt.

- A worker proves itself first; one that cannot is named in the log and left out.
- One unit is outstanding for each worker, so a worker that hangs holds up one unit, and nothing waits in the engine.
- The unit of a worker that is lost, or that failed in a way that can pass, goes to another; one that is lost or fails
  again and again ends the carriage, and so does an error that no retry can cure.
- When no unit waits, a straggler gets a second attempt. The first may go on: its worker gets a new unit when it has
  ended, and not before.

The coordinator keeps nothing that counts: if it dies, the receipts are there.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from wherry.carriers.challenge import challenge_of
from wherry.carriers.unit_queue import UnitQueue
from wherry.carriers.worker_wait import WorkerWait
from wherry.carriers.workload import JobWork
from wherry.core.progress import UnitCounts, logger

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from wherry.carriers.worker_pool import WorkerPool
    from wherry.carriers.workload import Call, Workload
    from wherry.units.split_job import SplitJob

LOOK_SECONDS = 0.5  # between two looks at the pool, while nothing ends
ALLOWED_STRIKES = 3  # failures of a worker, one after the other
_CLOSE_SECONDS = 5.0
_log = logger(__name__)


@dataclass(slots=True)
class Post:
    """A worker, as the coordinator sees it.

    Attributes:
        name: of the worker.
        future: what it is doing; None if it is idle.
        unit: number of the unit that it makes; None while it proves itself.
        since: monotonic time at which it began.
        is_proved: whether it may get units.
        answer: how it has proved itself.
        strikes: failures, one after the other.
    """

    name: str
    future: Future[Any] | None = None
    unit: int | None = None
    since: float = 0.0
    is_proved: bool = False
    answer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    strikes: int = 0


def carry_with_pool(made: SplitJob, pool: WorkerPool, counts: UnitCounts | None = None) -> Generator[str]:
    """Have the units of a job made by a pool; see Carry."""
    with challenge_of(made) as challenge:
        yield from run_workload(JobWork(challenge), pool, counts)


def run_workload(work: Workload, pool: WorkerPool, counts: UnitCounts | None = None) -> Generator[Any]:
    """Have a workload done by a pool; the result of each unit, as they come.

    Args:
        work: the workload.
        pool: its workers.
        counts: gets the numbers of workers and of failed attempts.

    Raises:
        StorageError: units are left; `retryable` if another try may help.
    """
    coordinator = Coordinator(work, pool, counts)
    try:
        yield from coordinator.results()
    finally:
        coordinator.close()


class Coordinator:
    """Shares the units of a workload out to a pool."""

    def __init__(self, work: Workload, pool: WorkerPool, counts: UnitCounts | None = None) -> None:
        """Begin.

        Args:
            work: the units, and what workers have to prove.
            pool: the workers.
            counts: gets the numbers of workers and of failed attempts.
        """
        self._work, self._pool, self._counts = work, pool, counts or UnitCounts()
        self._queue = UnitQueue(work.uri, tuple(work.names))
        self._posts: dict[str, Post] = {}
        self._wait = WorkerWait(work.uri, work.again)
        self.left_out: dict[str, str] = {}  # name of each worker that gets no unit → why

    def results(self) -> Iterator[Any]:
        """Have every unit done; the result of each, as they come.

        Raises:
            StorageError: units are left; `retryable` if another try may help.
        """
        finished = self._work.finished()
        yield from finished.values()
        self._queue.fill(finished)
        while self._queue.left:
            self._meet()
            self._assign()
            if self._suits_none():
                return
            self._counts.workers = sum(post.is_proved for post in self._posts.values())
            self._counts.failed = self._queue.losses.total() + self._queue.failures.total()
            yield from self._collect_results()
            self._require_workers()

    def close(self) -> None:
        """Forget what is running, and have idle workers close the job."""
        self._wait.end()
        idle = [post for post in self._posts.values() if post.future is None]
        for post in self._posts.values():
            if post.future is not None:
                post.future.cancel()
        with suppress(Exception):  # the engine may be gone
            for post in idle:
                self._start(post, f"close-{post.name}", self._work.end())
        wait([post.future for post in idle if post.future is not None], timeout=_CLOSE_SECONDS)

    def _meet(self) -> None:
        """Challenge new workers, and take back the units of those that are lost."""
        present = set(self._pool.present())
        for name in self._posts.keys() - present:
            post = self._posts.pop(name)
            if post.future is not None:
                post.future.cancel()
            if post.unit is not None:
                self._lose(post.unit, name)
        for name in sorted(present - self._posts.keys() - self.left_out.keys()):
            post = self._posts[name] = Post(name)
            self._start(post, f"prove-{name}", self._work.proof())

    def _assign(self) -> None:
        """Give a unit to each idle worker; stragglers when no unit waits."""
        self._queue.due()
        rest: list[Post] = []
        for post in [post for post in self._posts.values() if post.is_proved and post.future is None]:
            number = self._queue.take(partial(self._suits, post))
            if number is None:
                rest.append(post)
            else:
                self._give(post, number)
        for number in self._stragglers() if rest else ():
            post = next((one for one in rest if one.future is None and self._suits(one, number)), None)
            if post is not None:
                _log.warning("unit %s is slow; it gets a second attempt", self._queue.name(number))
                self._give(post, number)

    def _suits(self, post: Post, number: int) -> bool:
        return self._work.suits(number, post.answer)

    def _suits_none(self) -> bool:
        """Whether what is left suits none of the idle workers, and nothing else of it is done or will be tried again.

        A unit that a worker does counts as long as it is no straggler.
        """
        posts = list(self._posts.values())
        idle = [post for post in posts if post.is_proved and post.future is None]
        proving = any(post.future is not None and post.unit is None for post in posts)
        if not idle or proving or self._queue.later:
            return False
        slow = {unit for unit in self._stragglers() if not any(self._suits(post, unit) for post in idle)}
        return {post.unit for post in posts if post.unit in self._queue.left} <= slow

    def _give(self, post: Post, number: int) -> None:
        self._queue.attempts[number] += 1
        title = f"unit-{self._queue.name(number)}-{self._queue.attempts[number]}"
        self._start(post, title, self._work.unit(number))
        post.unit = number

    def _start(self, post: Post, title: str, call: Call) -> None:
        post.future = self._pool.submit(post.name, title, call.function, *call.arguments)
        post.since = time.monotonic()

    def _stragglers(self) -> list[int]:
        now, making = time.monotonic(), [post for post in self._posts.values() if post.unit is not None]
        attempts = Counter(post.unit for post in making)
        seconds = {post.unit: now - post.since for post in making if post.unit is not None}
        return [number for number in self._queue.stragglers(seconds) if attempts[number] == 1]

    def _collect_results(self) -> Iterator[Any]:
        """The results of what has ended; waits for it a short time."""
        futures = {post.future: post for post in self._posts.values() if post.future is not None}
        if not futures:
            time.sleep(LOOK_SECONDS)
            return
        for future in wait(futures, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED).done:
            post = futures[future]
            number, post.future, post.unit = post.unit, None, None
            if number is None:
                self._admit(post, future)
            elif (result := self._result(post, number, future)) is not None:
                yield result

    def _admit(self, post: Post, future: Future[Any]) -> None:
        """Judge the answer of a worker to the challenge."""
        error = future.exception()
        problem = f"{type(error).__name__}: {error}" if error else self._work.problem(future.result())
        if problem:
            self._leave_out(post, problem)
        post.is_proved = not problem
        post.answer = {} if problem else future.result()

    def _result(self, post: Post, number: int, future: Future[Any]) -> Any:
        """The result of a unit, if the worker has done it, and is the first; else None."""
        if future.exception() is not None:
            self._lose(number, post.name)
            return None
        answer = future.result()
        if error := answer.get("error"):
            self._queue.fail(number, post.name, error)
            post.strikes += 1
            if post.strikes >= ALLOWED_STRIKES:
                self._leave_out(post, str(error["what"]))
        elif not answer.get("busy"):
            post.strikes = 0
            first = self._queue.finish(number, answer["seconds"])
            return self._work.result(number, answer) if first else None
        self._queue.try_again(number, self._running())
        return None

    def _lose(self, number: int, worker: str) -> None:
        self._queue.lose(number, worker)
        self._queue.try_again(number, self._running(), at_once=True)

    def _running(self) -> list[int | None]:
        return [post.unit for post in self._posts.values()]

    def _leave_out(self, post: Post, problem: str) -> None:
        _log.warning("worker %s is left out: %s", post.name, problem)
        self.left_out[post.name] = problem
        del self._posts[post.name]

    def _require_workers(self) -> None:
        """Refuse to wait for ever for a worker that can make units."""
        if not self._queue.left or any(post.is_proved for post in self._posts.values()):
            self._wait.end()
        else:
            self._wait.go_on(self.left_out, list(self._posts))
