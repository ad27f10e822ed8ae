"""A crew: threads that do tasks in the order in which these are given, until all are done or one fails."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import TYPE_CHECKING, TypeAlias

from wherry.runtime import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    Task: TypeAlias = Callable[[], None]

_LOOK_SECONDS = 0.2  # short waits, so that a signal reaches the main thread at once


class StoppedError(Exception):
    """The pass was stopped meanwhile; nothing is wrong."""


class Crew:
    """Threads for one pass.

    Attributes:
        stopped: set once a task failed or the pass was ended from outside; who works for long looks at it.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def work(self, tasks: Iterator[Task], count: int, *, numbers: bool = True) -> None:
        """Do all tasks. They are asked for one at a time, by the thread that is free.

        Args:
            tasks: what is to be done.
            count: how many threads.
            numbers: see `threads.executor`.

        Raises:
            BaseException: the first error of a task, or what ended the pass from outside; the others have stopped.
        """
        with threads.executor(count, numbers=numbers) as executor:
            try:
                _await({executor.submit(self._work, tasks) for _ in range(count)})
            except BaseException:
                self.stopped.set()
                executor.shutdown()
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
