"""What `threading` and the pools of wherry are in a simulation: threads of a simulated process that take turns.

The modules whose threads and locks matter get this in place of `threading`; everything blocks by giving the turn away,
and a dead process blocks nowhere.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

from greenlet import getcurrent

from tests.support.simulation.schedule import FOREVER, KilledError, current


class Lock:
    """`threading.Lock`."""

    def __init__(self):
        self._owner = None

    def acquire(self, blocking=True, timeout=-1):
        if self._owner is not None:
            if not blocking:
                return False
            simulation().wait(lambda: self._owner is None, FOREVER if timeout < 0 else timeout)
        self._owner = getcurrent()
        return True

    def release(self):
        self._owner = None

    def locked(self):
        return self._owner is not None

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()


class RLock(Lock):
    """`threading.RLock`."""

    def __init__(self):
        super().__init__()
        self._count = 0

    def acquire(self, blocking=True, timeout=-1):
        if self._owner is not getcurrent() and not super().acquire(blocking, timeout):
            return False
        self._count += 1
        return True

    def release(self):
        self._count -= 1
        if self._count <= 0:
            self._owner, self._count = None, 0

    @contextmanager
    def let_go(self):
        """Another thread may have the lock while the block runs."""
        count, self._count, self._owner = self._count, 0, None
        try:
            yield
        finally:
            if self._owner is not None:
                simulation().wait(lambda: self._owner is None)
            self._owner, self._count = getcurrent(), count


class Condition(RLock):
    """`threading.Condition` with a reentrant lock."""

    def __init__(self):
        super().__init__()
        self._rings = 0

    def wait(self, timeout=None):
        rings = self._rings
        with self.let_go():
            return simulation().wait(lambda: self._rings != rings, FOREVER if timeout is None else timeout)

    def wait_for(self, predicate, timeout=None):
        while not (found := predicate()):
            self.wait(timeout)
        return found

    def notify_all(self):
        self._rings += 1


class Event:
    """`threading.Event`."""

    def __init__(self):
        self._set = False

    def set(self):
        self._set = True

    def is_set(self):
        return self._set

    def wait(self, timeout=None):
        return self._set or simulation().wait(lambda: self._set, FOREVER if timeout is None else timeout)


class SimulatedThread:
    """`threading.Thread`, in the process that starts it."""

    def __init__(self, target, name="", daemon=None):
        self._target, self._thread = target, None

    def start(self):
        thread = getcurrent()
        self._thread = simulation().spawn(thread.process, self._target)

    def join(self):
        if self._thread is not None and not self._thread.ended:
            simulation().wait(lambda: self._thread.ended)


class Pool:
    """The pool of `wherry.core.threads`: each task that is submitted is a thread; `map` does one after the other."""

    def __init__(self, count, name="", *, numbers=False):
        self._count, self._running, self._closed = count, [], False

    def submit(self, act, *arguments):
        future = Future()

        def run():
            try:
                future.set_result(act(*arguments))
            except KilledError:
                raise
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._running.remove(ticket)

        ticket = object()
        self._running.append(ticket)
        simulation().spawn(getcurrent().process, run)
        return future

    def map(self, act, *rows):
        return [act(*row) for row in zip(*rows, strict=False)]

    def shutdown(self, wait=True, *, cancel_futures=False):
        if wait and self._running:
            simulation().wait(lambda: not self._running)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.shutdown()


def simulation():
    """The simulation of the running thread."""
    thread = current()
    assert thread is not None, "only threads of a simulation wait here"
    return thread.simulation


THREADING = SimpleNamespace(
    Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Thread=SimulatedThread,
    current_thread=getcurrent,
)  # fmt: skip
