"""Faults: system calls that fail, write less than requested, stop or kill the process at a chosen moment.

`Faults` replaces functions while its `with` block runs, counts their calls and lets a `Fault` act at one of them.
Only calls from Python are intercepted; for the writes of libraries use a limit that the kernel enforces,
`wherry.testing.children.Order.file_size`. That module also runs the conversions that are killed.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from wherry.core.digest import LEAF
from wherry.core.lazy_dataclass import dataclass

# `module:function` of everything that changes the file system.
PLACES: tuple[str, ...] = (
    *(f"os:{name}" for name in ("pwrite", "write", "fsync", "fdatasync", "posix_fallocate", "ftruncate")),
    *(f"os:{name}" for name in ("mkdir", "rename", "replace", "link", "unlink", "rmdir")),
    "wherry.target.staging:rename_without_replacing",
)
WRITES = ("os:pwrite", "os:write")


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault and the call at which it occurs.

    Attributes:
        act: called instead of the function, with the function and its arguments.
        number: the call, counted from 1.
        place: the function whose calls are counted; None for all together.
        lasting: whether every later call fails too, as on a full disk.
    """

    act: Callable[..., Any]
    number: int
    place: str | None = None
    lasting: bool = False

    def strikes(self, place: str, counts: Counter[str]) -> bool:
        """Whether the fault occurs at the call that was just counted."""
        if self.place not in (None, place):
            return False
        count = counts.total() if self.place is None else counts[place]
        return count == self.number or (self.lasting and count > self.number)


def failing(code: int) -> Callable[..., Any]:
    """An act that raises the `OSError` of an errno."""

    def act(_function: Callable[..., Any], *_arguments: Any, **_options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return act


def falling_short(function: Callable[..., Any], descriptor: int, data: memoryview | bytes, *rest: Any) -> int:
    """An act for `write` and `pwrite`: only the first half of the bytes is written, as the kernel may do."""
    return function(descriptor, memoryview(data)[: max(len(data) // 2, 1)], *rest)


def killing(_function: Callable[..., Any], *_arguments: Any, **_options: Any) -> None:
    """An act that ends the process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def stopping(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """An act that stops the process before the call, until it is continued (SIGCONT)."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return function(*arguments, **options)


def tearing(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """An act that ends the process in the middle of a write, or before any other call."""
    if function in (os.write, os.pwrite) or getattr(function, "__name__", "") in ("write", "pwrite"):
        falling_short(function, *arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)


ACTS: dict[str, Any] = {"kill": killing, "tear": tearing, "stop": stopping}


class Faults:
    """Counts the calls of functions while its `with` block runs, and lets a fault act on them.

    Attributes:
        calls: how often each place was called.
        struck: how often the fault has acted.
    """

    def __init__(self, fault: Fault | None = None, places: Sequence[str] = PLACES) -> None:
        """Choose the fault; without one the calls are only counted."""
        self.calls: Counter[str] = Counter()
        self.struck = 0
        self._fault = fault
        self._places = places
        self._stack = ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        for place in self._places:
            module, name = place.split(":")
            self._stack.enter_context(
                replace_value(place, self._watch(place, getattr(importlib.import_module(module), name)))
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _watch(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.calls[place] += 1
                fault = self._fault
                strikes = fault is not None and fault.strikes(place, self.calls)
                self.struck += strikes
            return fault.act(function, *arguments, **options) if fault and strikes else function(
                *arguments, **options
            )  # fmt: skip

        return watch


@contextmanager
def replace_value(place: str, value: object) -> Generator[None]:
    """Replace `module:name` by another value while the block runs."""
    module_name, name = place.split(":")
    module = importlib.import_module(module_name)
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def small_steps(workers: int | None = 1) -> Generator[None]:
    """Sync and journal each move separately, of one leaf at most, so that small checkpoints have many steps.

    Args:
        workers: threads of the mover; with one, the order of all calls is the same in each run. None for the default.
    """
    with ExitStack() as stack:
        stack.enter_context(replace_value("wherry.mover.output:_GROUP_BYTES", 1))
        stack.enter_context(replace_value("wherry.mover.move:RAW_BYTES", LEAF))
        if workers is not None:
            stack.enter_context(replace_value("wherry.core.threads:worker_count", lambda: workers))
        yield
