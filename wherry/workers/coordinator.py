"""Coordinator: gives one unit at a time to each worker of a pool, until every unit of a workload is done.

- A worker proves itself first; one that cannot is named in the log and left out.
- One unit is outstanding for each worker, so a worker that hangs holds up one unit, and nothing waits in the engine.
- The unit of a worker that is lost, or that failed in a way that can pass, goes to another; one that is lost or fails
  again and again ends the run, and so does an error that no retry can cure.
- When no unit waits, a straggler gets a second attempt. The first may go on: its worker gets a new unit when it has
  ended, and not before.
- It waits ten minutes for a worker that can make units (`worker_wait`), as spot machines that are lost together take
  minutes to be replaced; one where every worker that is there has failed its proof and none has ever passed it.

The coordinator keeps nothing that counts: if it dies, the receipts are there.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, suppress
from statistics import median
from typing import Any, NamedTuple, Protocol

from wherry.config.settings import configured_value
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import UnitCounts, logger
from wherry.core.units import duration, plural, show_seconds
from wherry.cures import Argument, Cure
from wherry.errors import StorageError
from wherry.store.waits import waiting
from wherry.version import __version__

# ---- what is done, and by whom ---------------------------------------------------------------------------------------


class Workload(ABC):
    """Units that any worker can do; see Coordinator.

    Attributes:
        uri: what errors name.
        again: what the same command does when it is run again.
        names: of the units.
        prove: what a worker runs first: its answer shows whether it can do units.
        do: does a unit; the answer has `seconds` and what `result` reads, or `busy`, or `error`.
        close: what an idle worker runs last; None for nothing.
        arguments: what these functions get, as JSON values.
    """

    uri: str
    again: str
    names: Sequence[str]
    prove: WorkerFunction
    do: WorkerFunction
    close: WorkerFunction | None = None
    arguments: tuple[Any, ...]

    def finished(self) -> Mapping[int, Any]:
        """Number of each unit that is done already → its result; by default none is."""
        return {}

    def problem(self, answer: Mapping[str, Any]) -> str:
        """Why a worker that proved itself with this answer cannot do units; empty if it can."""
        if answer.get("problem"):
            return str(answer["problem"])
        if answer.get("version") != __version__:
            return f"it has wherry {answer.get('version')}; this process has wherry {__version__}"
        return self.difference(answer)

    @abstractmethod
    def difference(self, answer: Mapping[str, Any]) -> str:
        """The difference between what a worker of the same wherry and this process see; empty if there is none."""

    def suits(self, number: int, answer: Mapping[str, Any]) -> bool:  # noqa: ARG002  of the interface
        """Whether a worker that has passed the challenge with this answer can do a unit now; by default any can.

        Units that suit no worker are left over once all workers are idle.
        """
        return True

    def unit(self, number: int) -> tuple[Any, ...]:
        """The arguments of `do` that describe a unit, as JSON values; by default the number of the unit."""
        return (number,)

    @abstractmethod
    def result(self, number: int, answer: Mapping[str, Any]) -> Any:
        """The result of a unit, from an answer."""


# What runs on a worker: a function of `work` or `hash_on`, which takes and returns JSON values.
WorkerFunction = Callable[..., Mapping[str, Any]]


class Workplace(NamedTuple):
    """Where the workers of an engine are.

    Attributes:
        address: of an engine that is running; empty to start one on this machine.
        workers: number of workers to start.
    """

    address: str = ""
    workers: int = 1


class WorkerPool(Protocol):
    """Workers, each a process that makes one unit at a time; the `pool` of an engine's adapter opens it.

    Only names of functions, small arguments and answers of a few hundred bytes pass through the engine: bytes of
    checkpoints go between the workers and the stores.
    """

    def present(self) -> Collection[str]:
        """The names of the workers that are there now; a worker that was restarted has another name.

        Raises:
            StorageError: the engine is not reachable.
        """
        ...

    def submit(self, worker: str, title: str, function: WorkerFunction, *arguments: Any) -> Future[Any]:
        """Run a function on one worker.

        Args:
            worker: its name.
            title: what the engine's dashboard shows.
            function: what is run.
            arguments: JSON values.

        Returns:
            Its answer. The future does not end while the worker hangs, and also not always if it is lost; one that is
            cancelled is forgotten by the engine, whether or not it ran.
        """
        ...


# ---- the coordinator -------------------------------------------------------------------------------------------------


LOOK_SECONDS = 0.5  # between two looks at the pool, while nothing ends
AGAIN_SECONDS = 1.0  # before a unit that failed, or that another process makes, is tried again
ALLOWED_STRIKES = 3  # failures of a worker, one after the other
ALLOWED_FAILURES = 5  # of the same unit
# Of workers that were making the same unit: spot machines die without a fault of the unit.
ALLOWED_LOSSES = 10
_CLOSE_SECONDS = 5.0
_log = logger(__name__)


@dataclass(slots=True)
class _Post:
    """A worker, as the coordinator sees it."""

    name: str
    future: Future[Any] | None = None  # what it is doing; None if it is idle
    unit: int | None = None  # number of the unit that it makes; None while it proves itself
    since: float = 0.0  # monotonic time at which it began
    answer: Mapping[str, Any] | None = None  # how it has proved itself; None until then
    strikes: int = 0  # failures, one after the other


@dataclass(slots=True)
class _UnitState:
    """A unit that is not done, as its coordinator sees it."""

    ready: float = 0.0  # monotonic time from which on it can be given to a worker; units go in this order
    attempts: int = 0  # how often it was given to a worker
    losses: int = 0  # how often its worker was lost
    failures: int = 0  # how often it was not made


class Coordinator:
    """Shares the units of a workload out to a pool.

    Attributes:
        left_out: name of each worker that gets no unit → why.
    """

    def __init__(self, work: Workload, pool: WorkerPool, counts: UnitCounts | None = None) -> None:
        """Begin.

        Args:
            work: the units, and what workers have to prove.
            pool: the workers.
            counts: gets the numbers of workers and of failed attempts.
        """
        self._work, self._pool, self._counts = work, pool, counts or UnitCounts()
        self._left: dict[int, _UnitState] = {}
        self._taken: list[float] = []  # seconds of each unit that was done
        self._posts: dict[str, _Post] = {}
        self._wait = _WorkerWait(work)
        self.left_out: dict[str, str] = {}

    def results(self) -> Generator[Any]:
        """Have every unit done; the result of each, as they come.

        Raises:
            StorageError: units are left; `retryable` if another try may help.
        """
        try:
            yield from self._results()
        finally:
            self._close()

    def _results(self) -> Iterator[Any]:
        finished = self._work.finished()
        yield from finished.values()
        numbers = range(len(self._work.names))
        self._left = {number: _UnitState() for number in numbers if number not in finished}
        while self._left:
            self._meet()
            now = time.monotonic()
            self._assign(now)
            if self._suits_none(now):
                return
            self._counts.workers = len(self._posts) - len(self._unproved())
            yield from self._collect_results()
            if not self._left or len(self._unproved()) < len(self._posts):
                self._wait.end()
            else:  # not for ever
                self._wait.go_on(self.left_out, self._unproved())

    def _unproved(self) -> list[str]:
        return [name for name, post in self._posts.items() if post.answer is None]

    def _close(self) -> None:
        """Forget what is running, and have idle workers close the job."""
        self._wait.end()
        last, idle = self._work.close, [post for post in self._posts.values() if post.future is None]
        for post in self._posts.values():
            if post.future is not None:
                post.future.cancel()
        with suppress(Exception):  # the engine may be gone
            for post in idle:
                if last is not None:
                    self._start(post, f"close-{post.name}", last)
        wait([post.future for post in idle if post.future is not None], timeout=_CLOSE_SECONDS)

    def _meet(self) -> None:
        """Challenge new workers, and take back the units of those that are lost."""
        present = set(self._pool.present())
        for name in self._posts.keys() - present:
            post = self._posts.pop(name)
            if post.future is not None:
                post.future.cancel()
            self._lose(post)
        for name in sorted(present - self._posts.keys() - self.left_out.keys()):
            post = self._posts[name] = _Post(name)
            self._start(post, f"prove-{name}", self._work.prove)

    def _assign(self, now: float) -> None:
        """Give a unit to each idle worker; stragglers when no unit waits."""
        running = {post.unit for post in self._posts.values()}
        waiting = [
            number for number, unit in self._left.items() if number not in running and unit.ready <= now
        ]
        waiting.sort(key=lambda number: self._left[number].ready)
        for post in self._idle():
            number = next((number for number in waiting if self._suits(post, number)), None)
            if number is not None:
                waiting.remove(number)
                self._give(post, number)
        for number in self._stragglers():
            post = next((idle for idle in self._idle() if self._suits(idle, number)), None)
            if post is not None:
                _log.warning("unit %s is slow; it gets a second attempt", self._work.names[number])
                self._give(post, number)

    def _idle(self) -> list[_Post]:
        return [post for post in self._posts.values() if post.answer is not None and post.future is None]

    def _suits(self, post: _Post, number: int) -> bool:
        return self._work.suits(number, post.answer or {})

    def _suits_none(self, now: float) -> bool:
        """Whether the units that are left suit no idle worker, and no unit is running or will be tried again.

        A unit that a worker does counts as long as it is no straggler.
        """
        posts, idle = list(self._posts.values()), self._idle()
        proving = any(post.future is not None and post.unit is None for post in posts)
        if not idle or proving or any(unit.ready > now for unit in self._left.values()):
            return False
        slow = {unit for unit in self._stragglers() if not any(self._suits(post, unit) for post in idle)}
        return {post.unit for post in posts if post.unit in self._left} <= slow

    def _give(self, post: _Post, number: int) -> None:
        left = self._left[number]
        left.attempts, post.unit = left.attempts + 1, number
        title = f"unit-{self._work.names[number]}-{left.attempts}"
        self._start(post, title, self._work.do, self._work.unit(number))

    def _start(self, post: _Post, title: str, run: WorkerFunction, more: tuple[Any, ...] = ()) -> None:
        post.future = self._pool.submit(post.name, title, run, *self._work.arguments, *more)
        post.since = time.monotonic()

    def _stragglers(self) -> list[int]:
        """The units that one worker makes and that get a second attempt."""
        now, attempts = time.monotonic(), Counter(post.unit for post in self._posts.values())
        making = ((post.unit, post.since) for post in self._posts.values() if post.unit is not None)
        seconds = {unit: now - since for unit, since in making if unit in self._left}
        return [unit for unit in stragglers(seconds, self._taken) if attempts[unit] == 1]

    def _collect_results(self) -> Iterator[Any]:
        """The results of what has ended; waits for it a short time."""
        futures = {post.future: post for post in self._posts.values() if post.future is not None}
        if not futures:
            time.sleep(LOOK_SECONDS)
            return
        for future in wait(futures, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED).done:
            post = futures[future]
            post.future = None
            if post.unit is None:
                # Its answer to the challenge is judged.
                error = future.exception()
                problem = f"{type(error).__name__}: {error}" if error else self._work.problem(future.result())
                if problem:
                    self._leave_out(post, problem)
                else:
                    post.answer = future.result()
            elif (result := self._result(post, post.unit, future)) is not None:
                yield result
            post.unit = None

    def _result(self, post: _Post, number: int, future: Future[Any]) -> Any:
        """The result of a unit, if the worker has done it, and is the first; else None."""
        if future.exception() is not None:
            self._lose(post)
            return None
        answer, left = future.result(), self._left.get(number)
        if error := answer.get("error"):
            if left is not None:
                self._fail(post, number, left, error)
            post.strikes += 1
            if post.strikes >= ALLOWED_STRIKES:
                self._leave_out(post, str(error["what"]))
        elif not answer.get("busy"):
            post.strikes = 0
            if left is None:
                return None
            del self._left[number]
            if answer["seconds"] is not None:
                self._taken.append(answer["seconds"])
            return self._work.result(number, answer)
        if left is not None:
            left.ready = time.monotonic() + AGAIN_SECONDS
        return None

    def _lose(self, post: _Post) -> None:
        """Let the unit of a worker that is lost be the next."""
        if post.unit is None or post.unit not in self._left:
            return
        left, name = self._left[post.unit], self._work.names[post.unit]
        left.losses, left.ready = left.losses + 1, -1.0
        self._counts.failed += 1
        _log.warning("worker %s was lost while it wrote unit %s", post.name, name)
        if left.losses > ALLOWED_LOSSES:
            raise StorageError(
                f"{plural(left.losses, 'worker', 'was/were')} lost while making unit {name}",
                uri=self._work.uri,
                cure=Cure(
                    "give the workers more memory, or make smaller units: {}", Argument("unit", "256MiB")
                ),
            )

    def _fail(self, post: _Post, number: int, left: _UnitState, error: Mapping[str, Any]) -> None:
        """Note that a unit was not made; it ends the run if no retry can cure it, or it was one failure too many."""
        name = self._work.names[number]
        left.failures += 1
        self._counts.failed += 1
        _log.warning("unit %s was not written by %s: %s", name, post.name, error["what"])
        if not error["retryable"] or left.failures > ALLOWED_FAILURES:
            raise StorageError(
                f"unit {name} cannot be made; worker {post.name}: {error['what']}",
                uri=error.get("uri") or self._work.uri,
                cure=error.get("cure"),
                retryable=bool(error["retryable"]),
            )

    def _leave_out(self, post: _Post, problem: str) -> None:
        _log.warning("worker %s is left out: %s", post.name, problem)
        self.left_out[post.name] = problem
        del self._posts[post.name]


FEWEST_STARTED = 10
LEAST_DONE = 0.5  # of those that were started
TIMES_MEDIAN = 3.0
LEAST_SECONDS = 1.0  # no unit that takes less is worth a second attempt


def stragglers(running: Mapping[int, float], finished: Iterable[float]) -> list[int]:
    """The units that get a second attempt, the slowest first.

    Args:
        running: number of each unit that is being made → seconds since it was started.
        finished: how many seconds each finished unit took.
    """
    taken = list(finished)
    started = len(taken) + len(running)
    if started < FEWEST_STARTED or len(taken) < LEAST_DONE * started:
        return []
    limit = max(TIMES_MEDIAN * median(taken), LEAST_SECONDS)
    return sorted(
        (unit for unit, seconds in running.items() if seconds > limit), key=lambda unit: -running[unit]
    )


# ---- its waits -------------------------------------------------------------------------------------------------------


WAIT_SECONDS = 600.0
REFUSED_SECONDS = 60.0
_VARIABLE = "WHERRY_WORKER_WAIT"
_NAMED = 3  # workers that a line names


def worker_wait() -> float:
    """Seconds without a usable worker after which a coordinator gives up: `WHERRY_WORKER_WAIT`, or the setting.

    Raises:
        UsageError: it is not a duration, or the configuration is invalid.
    """
    stated = os.environ.get(_VARIABLE) or configured_value("worker_wait")
    return WAIT_SECONDS if stated is None else duration(stated)


class _WorkerWait:
    """Waits of one coordinator; begins with the first."""

    def __init__(self, work: Workload) -> None:
        self._work, self._seconds, self._since = work, worker_wait(), time.monotonic()
        self._had_worker = False
        self._line = ExitStack()
        self._text = ""

    def end(self) -> None:
        """Note that a worker is there that can make units, or that none is needed."""
        self._line.close()
        self._since, self._had_worker, self._text = time.monotonic(), True, ""

    def go_on(self, left_out: Mapping[str, str], silent: Collection[str]) -> None:
        """Wait on, as there is no worker that can make units; some were left out, and some have not answered."""
        refused = left_out and not silent and not self._had_worker
        limit = min(self._seconds, REFUSED_SECONDS) if refused else self._seconds
        rows = [f"{name}: {problem}" for name, problem in sorted(left_out.items())]
        rows += [f"{name} has not answered" for name in sorted(silent)]
        more = [f"{plural(len(rows) - _NAMED, 'other')}"] if len(rows) > _NAMED else []
        why = "; ".join([*rows[:_NAMED], *more]) or "there is none"
        if time.monotonic() - self._since > limit:
            raise StorageError(
                f"no worker can make units; {why}",
                uri=self._work.uri,
                cure="start workers that see source and target, with the same wherry and WHERRY_KEY, and run the same "
                f"command again; it {self._work.again}. To wait longer for workers, set {_VARIABLE}, for example 1h",
                retryable=True,
            )
        if why != self._text:
            self._line.close()
            what = f"a worker that can make units ({why}; gives up after {show_seconds(limit)})"
            self._line.enter_context(waiting(self._work.uri, what=what)).since = self._since
            self._text = why
