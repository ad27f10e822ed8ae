"""Threads: how many, and pools of them that find the number libraries whole.

A crew: threads that do tasks in the order in which these are given, until all are done or one fails.

No garbage collection while a large acyclic tree grows: walking it again and again takes a third of the time.
"""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from wherry.core import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    Task: TypeAlias = Callable[[], None]
    from collections.abc import Generator


def worker_count() -> int:
    """Threads that read: two per core, so that one hashes while the other waits for storage; eight at most."""
    return min(2 * (os.cpu_count() or 2), 8)


def carrier_count() -> int:
    """Threads that also write bytes as they are: one per core hashes, one writes, one holds what comes next."""
    return worker_count() * 3 // 2


def executor(count: int, name: str = "wherry", *, numbers: bool = True) -> ThreadPoolExecutor:
    """A pool of threads.

    Args:
        count: how many.
        name: what their names begin with.
        numbers: whether they may look at numbers: numpy is imported before they start then, since threads that
            import it at one time see it half made.
    """
    if numbers:
        dtypes.ready()
    return ThreadPoolExecutor(count, thread_name_prefix=name)


_LOOK_SECONDS = 0.2  # short waits, so that a signal reaches the main thread at once


class StoppedError(Exception):
    """The pass was stopped meanwhile; nothing is wrong."""


class Crew:
    """Threads for one pass.

    Attributes:
        stopped: set once a task failed or the pass was ended from outside; who works for long looks at it.
    """

    def __init__(self, stopped: threading.Event | None = None) -> None:
        self.stopped = stopped or threading.Event()
        self._lock = threading.Lock()

    def work(self, tasks: Iterator[Task], count: int, *, numbers: bool = True) -> None:
        """Do all tasks. They are asked for one at a time, by the thread that is free.

        Args:
            tasks: what is to be done.
            count: how many threads.
            numbers: see `executor`.

        Raises:
            BaseException: the first error of a task, or what ended the pass from outside; the others have stopped.
        """
        with executor(count, numbers=numbers) as pool:
            try:
                _await({pool.submit(self._work, tasks) for _ in range(count)})
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


def _await(running: set[Future[None]]) -> None:
    while running:
        done, running = wait(running, timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()


@contextmanager
def uncollected() -> Generator[None]:
    """Leave the collector off while the block runs, if it was on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
