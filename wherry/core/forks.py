"""forks: what a fork of this process must not interrupt.

A child of a fork has the locks of all threads as they were at that moment, and only the thread that forked: a lock that
another thread held is never given back there. SQLite has such locks for the whole process, so a child that writes into
the ledger would wait for ever. It also has a list of the file locks of the process, which a child does not have though
the list says so: parent and child would write at once, and spoil the file. And a module that another thread imports is
half made in the child, which must import it anew (`wherry.core.import_locks`).

A fork therefore waits for what runs in `without_forks`, but not without end. After that the child knows what was open.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple

from wherry.core.import_locks import imports_elsewhere

_LOCK = type(threading.Lock())
_LOOK = 0.01  # seconds between two looks at the imports of other threads
_PATIENCE = 2.0  # seconds that a fork waits; a longer block holds the locks of SQLite only briefly


class _UnforkedBlock(NamedTuple):
    """A block that runs in a thread, and the file that it has open, if any."""

    thread: int
    file: str


class _ForkGate:
    """The blocks that run now, of all threads, by number."""

    def __init__(self, blocks: dict[int, _UnforkedBlock]) -> None:
        self.changed = threading.Condition()
        self.blocks = blocks
        self.forks = 0  # that wait

    def only_own(self) -> bool:
        """Whether no other thread than this one has a block."""
        return all(block.thread == threading.get_ident() for block in self.blocks.values())


_state = _ForkGate({})
_numbers = itertools.count()
_inherited = set[str]()  # files that were open when this process was forked


@contextmanager
def without_forks(file: str = "") -> Generator[None]:
    """Keep other threads of this process from forking while the block runs.

    Args:
        file: what the block has open; see `was_open_at_fork`.
    """
    number, thread = next(_numbers), threading.get_ident()
    with _state.changed:
        if all(block.thread != thread for block in _state.blocks.values()):
            _state.changed.wait_for(lambda: not _state.forks, _PATIENCE)
        _state.blocks[number] = _UnforkedBlock(thread, file)
    try:
        yield
    finally:
        with _state.changed:
            _state.blocks.pop(number, None)
            _state.changed.notify_all()


def was_open_at_fork(file: str) -> bool:
    """Whether a file was open in the parent when this process was forked."""
    return file in _inherited


def _before_fork() -> None:
    """Wait for the blocks of other threads; none begins until the fork is done."""
    _state.changed.acquire()
    _state.forks += 1
    deadline = time.monotonic() + _PATIENCE
    while (not _state.only_own() or imports_elsewhere()) and time.monotonic() < deadline:
        _state.changed.wait(_LOOK)


def _in_parent() -> None:
    _state.forks -= 1
    _state.changed.notify_all()
    _state.changed.release()


def _in_child() -> None:
    global _state  # noqa: PLW0603  state of the process
    _inherited.update(block.file for block in _state.blocks.values() if block.file)
    own = {number: block for number, block in _state.blocks.items() if block.thread == threading.get_ident()}
    _state = _ForkGate(own)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "wherry":
            _renew_locks(module)


def _renew_locks(owner: Any) -> None:
    """Give a module, and its classes, locks that no thread of the parent holds."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, _LOCK):
            setattr(owner, name, threading.Lock())
        elif isinstance(value, cached_property) and hasattr(value, "lock"):  # before Python 3.12
            value.lock = threading.RLock()  # type: ignore[attr-defined]
        elif (
            isinstance(value, type)
            and id(value) != id(owner)
            and value.__module__ == getattr(owner, "__name__", "")
        ):
            _renew_locks(value)


# What is registered last comes first before a fork: those of these modules take locks that others wait for.
assert logging
with suppress(RuntimeError):  # the end of the process has begun: nothing forks any more
    importlib.import_module("concurrent.futures.thread")
os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
