"""Threads: their numbers, pools that import numpy before they start, crews, and turns; memory between two passes.

A crew carries out tasks in order with several threads, until all are done or one fails.

Threads that wait for memory get it in the order in which they began to wait (`Turns`). `Condition.wait_for` alone lets
whoever wakes first go on. Of six threads that shared four buffers, two waited for three seconds, until the pass had
ended for the others: their bytes were the first of parts that all the rest waited for.

`without_collection` pauses garbage collection while large acyclic data is made, such as the metadata of a checkpoint of
very many tensors: collecting takes a third of that time.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeAlias, TypeVar

from wherry.core import dtypes

Task: TypeAlias = Callable[[], None]


P = ParamSpec("P")
T = TypeVar("T")


def worker_count() -> int:
    """Number of threads that read: two per core, so that one hashes while the other waits for storage; at most 8."""
    return min(2 * (os.cpu_count() or 2), 8)


def carrier_count() -> int:
    """Number of threads that also write raw bytes: three per core (to hash, to write, to read ahead); at most 12."""
    return worker_count() * 3 // 2


class ThreadPool(Executor):
    """An executor of threads which takes tasks also while the process ends, for as long as some thread submits them.

    That of the standard library refuses tasks once the main thread has ended, and with them the work of every other
    thread, for which Python waits nevertheless. The threads are daemons: whoever opens a pool waits for its tasks.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread call a function.

        Raises:
            RuntimeError: the pool is closed, or no thread can be started.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool of threads is closed")
            if len(self._threads) < self._count and not self._idle.acquire(blocking=False):
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further tasks.

        Args:
            wait: whether to wait until all tasks have ended.
            cancel_futures: whether tasks that have not begun are cancelled.
        """
        with self._lock:
            self._closed = True
            with suppress(Empty):
                while cancel_futures:
                    task = self._tasks.get_nowait()
                    if task is not None:
                        task[0].cancel()
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            _carry_out(*task)
            del task  # and what it refers to, while the thread waits
            self._idle.release()
        self._tasks.put(None)  # for the next one, also one that an interrupt kept out of the list


_Task: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  the future raises it
        future.set_exception(error)
        del future  # which refers to the error, whose traceback refers to this frame
    else:
        future.set_result(result)


def executor(count: int, name: str = "wherry", *, numbers: bool = True) -> ThreadPool:
    """A pool of threads.

    Args:
        count: number of threads.
        name: prefix of their names.
        numbers: whether they may use numpy: then it is imported before they start, because threads that import it
            concurrently see it half initialised.
    """
    if numbers:
        dtypes.ready()
    return ThreadPool(count, name)


_LOOK_SECONDS = 0.2  # short waits, so that a signal reaches the main thread at once


class StoppedError(Exception):
    """The pass was stopped; this is not a failure."""


class Crew:
    """Threads for one pass.

    Attributes:
        stopped: set once a task failed or the pass was ended from outside; long tasks check it.
    """

    def __init__(self, stopped: threading.Event | None = None) -> None:
        self.stopped = stopped or threading.Event()
        self._lock = threading.Lock()

    def work(self, tasks: Iterator[Task], count: int, *, numbers: bool = True) -> None:
        """Do all tasks; each free thread takes the next one.

        Args:
            tasks: the tasks.
            count: number of threads.
            numbers: see `executor`.

        Raises:
            BaseException: the first error of a task, or the exception that ended the pass; all threads have stopped.
        """
        with executor(count, numbers=numbers) as pool:
            try:
                running = {pool.submit(self._work, tasks) for _ in range(count)}
                while running:
                    done, running = wait(running, timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
            except BaseException:
                self.stopped.set()
                pool.shutdown()
                raise

    def _work(self, tasks: Iterator[Task]) -> None:
        while not self.stopped.is_set():
            with self._lock:
                task = next(tasks, None)
            if task is None:
                return
            try:
                task()
            except StoppedError:
                return
            except BaseException:
                self.stopped.set()
                raise


@contextmanager
def without_collection() -> Generator[None]:
    """Disable garbage collection while the block runs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def return_freed_memory() -> None:
    """Return freed blocks to the system that malloc keeps for reuse; only glibc can do so.

    See `wherry.core.interpreter`. It is for the end of a pass: the next one needs blocks of other sizes, and those of
    both would be in memory.
    """
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Turns:
    """The order of those who wait for a condition; safe from several threads."""

    def __init__(self, changed: threading.Condition) -> None:
        """Nobody waits yet.

        Args:
            changed: what they wait for; its lock is reentrant.
        """
        self._changed = changed
        self._waiting: deque[object] = deque()

    @contextmanager
    def turn(self) -> Generator[Callable[[], bool]]:
        """A place at the end of the line; yields whether all who came before have gone on."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
        try:
            yield lambda: self._waiting[0] is ticket
        finally:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()
