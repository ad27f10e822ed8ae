"""Threads: their numbers, pools that import numpy before they start, and crews.

A crew carries out tasks in order with several threads, until all are done or one fails.

`without_collection` pauses garbage collection while large acyclic data is made, such as the metadata of a checkpoint of
very many tensors: collecting takes a third of that time.
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
    """Number of threads that read: two per core, so that one hashes while the other waits for storage; at most 8."""
    return min(2 * (os.cpu_count() or 2), 8)


def carrier_count() -> int:
    """Number of threads that also write raw bytes: three per core (to hash, to write, to read ahead); at most 12."""
    return worker_count() * 3 // 2


def executor(count: int, name: str = "wherry", *, numbers: bool = True) -> ThreadPoolExecutor:
    """A pool of threads.

    Args:
        count: number of threads.
        name: prefix of their names.
        numbers: whether they may use numpy: then it is imported before they start, because threads that import it
            concurrently see it half initialised.
    """
    if numbers:
        dtypes.ready()
    return ThreadPoolExecutor(count, thread_name_prefix=name)


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
def without_collection() -> Generator[None]:
    """Disable garbage collection while the block runs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
