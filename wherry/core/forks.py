"""forks: what a fork of this process must not interrupt.

A child of a fork has the locks of all threads as they were at that moment, and only the thread that forked: a lock that
another thread held is never given back there. SQLite has such locks for the whole process, so a child that writes into
the ledger would wait for ever. A fork therefore waits for what runs in `without_forks`, but not without end.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

_PATIENCE = 2.0  # seconds that a fork waits; what takes longer holds its locks for moments of it only


class _ForkGate:
    """The blocks that run now, of all threads."""

    def __init__(self, own: int = 0) -> None:
        self.changed = threading.Condition()
        self.running = own


_state = _ForkGate()
_own = threading.local()


@contextmanager
def without_forks() -> Generator[None]:
    """Keep other threads of this process from forking while the block runs."""
    with _state.changed:
        _state.running += 1
    _own.count = getattr(_own, "count", 0) + 1
    try:
        yield
    finally:
        _own.count -= 1
        with _state.changed:
            _state.running -= 1
            _state.changed.notify_all()


def _before_fork() -> None:
    """Wait for the blocks of other threads; nothing begins until the fork is done."""
    _state.changed.acquire()
    _state.changed.wait_for(lambda: _state.running <= getattr(_own, "count", 0), _PATIENCE)


def _in_parent() -> None:
    _state.changed.release()


def _in_child() -> None:
    global _state  # noqa: PLW0603  state of the process
    _state = _ForkGate(getattr(_own, "count", 0))


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
