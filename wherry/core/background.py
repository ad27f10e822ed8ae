"""background: work of threads that the process waits for when it ends.

When the main thread of a program ends, Python refuses new tasks to executors, joins the threads that are no daemons,
and stops daemon threads wherever they are, also in the middle of a C function. So a call of wherry in such a thread,
and an export, is waited for before any of that:

1. `waited_for` notes the work that begins, and that it has ended.
2. At the end of the main thread a hook waits for all of it: without end for threads that Python would join anyway, for
   a limited time for others.

A fork has none of the threads of its parent. So a child begins without work and does not wait at its own end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

EXIT_SECONDS = 600.0  # for which a process that ends waits for work in daemon threads


class BackgroundWork:
    """Work that runs in a thread.

    Attributes:
        what: the words for it in the log.
        exit_wait: seconds for which the end of the process waits for it; None for no limit.
        on_timeout: called when the process has waited for so long.
        on_fork: called in a child of a fork, where the work does not go on.
        ended: set when it has ended.
    """

    def __init__(
        self,
        what: str,
        exit_wait: float | None,
        *,
        on_timeout: Callable[[], None] = lambda: None,
        on_fork: Callable[[], None] = lambda: None,
    ) -> None:
        self.what = what
        self.exit_wait = exit_wait
        self.on_timeout = on_timeout
        self.on_fork = on_fork
        self.ended = threading.Event()


_running = set[BackgroundWork]()


def begin(work: BackgroundWork) -> None:
    """Note that work begins."""
    _running.add(work)


def end(work: BackgroundWork) -> None:
    """Note that work has ended, and wake everyone who waits for it."""
    _running.discard(work)
    work.ended.set()


@contextmanager
def waited_for(what: str) -> Generator[None]:
    """Around a call: if it runs in another thread than the main one, the end of the process waits for it."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        yield
        return
    work = BackgroundWork(what, EXIT_SECONDS if thread.daemon else None)
    begin(work)
    try:
        yield
    finally:
        end(work)


def wait_at_exit() -> None:
    """Register the wait for the end of the main thread; Python runs the last registered hook first.

    It is done twice: when wherry is imported, and after Python's executors have registered their hooks, which would
    refuse the tasks of the work that is waited for.
    """
    with suppress(RuntimeError):  # the end has begun: this is a thread that Python joins
        threading._register_atexit(_wait)  # type: ignore[attr-defined]  # noqa: SLF001  `atexit` runs too late


def _wait() -> None:
    begun = time.monotonic()
    while _running:
        from wherry.core.progress import logger

        log = logger(__name__)
        for work in sorted(
            _running, key=lambda one: float("inf") if one.exit_wait is None else one.exit_wait
        ):
            log.info("waiting for %s before the process exits", work.what)
            left = None if work.exit_wait is None else max(work.exit_wait - (time.monotonic() - begun), 0)
            if not work.ended.wait(left):
                _running.discard(work)
                work.on_timeout()


def _begin_anew() -> None:
    """Forget the threads in a forked child, where they do not exist."""
    global _running
    lost, _running = _running, set()
    for work in lost:
        work.ended = threading.Event()  # a thread of the parent may have held the lock of the old one
        work.on_fork()


os.register_at_fork(after_in_child=_begin_anew)
wait_at_exit()
