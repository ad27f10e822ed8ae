"""Faults: calls of the operating system that fail, fall short or kill the process at a chosen moment.

`Faults` replaces functions while its `with` block runs, counts their calls and lets a `Fault` act at one of them.
`Children` runs conversions in processes that may die of it. They are forked from one server that has imported
everything and has started no thread, so that a kill costs 50 ms instead of a second and hundreds can be tried.
Only what goes through Python is caught: what a library writes by itself is reached by `Order.file_size`, a limit
that the kernel enforces.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from wherry.errors import WherryError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from types import TracebackType

# `module:function` of everything that changes the file system.
PLACES: tuple[str, ...] = (
    *(f"os:{name}" for name in ("pwrite", "write", "fsync", "fdatasync", "posix_fallocate", "ftruncate")),
    *(f"os:{name}" for name in ("mkdir", "rename", "replace", "link", "unlink", "rmdir")),
    "wherry.staging:rename_without_replacing",
)
WRITES = ("os:pwrite", "os:write")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        act: called instead of the function, with the function and its arguments.
        number: at which call, counted from 1.
        place: of which function; None counts the calls of all of them together.
        lasting: whether every later call goes wrong too, as on a disk that stays full.
    """

    act: Callable[..., Any]
    number: int
    place: str | None = None
    lasting: bool = False

    def strikes(self, place: str, counts: Counter[str]) -> bool:
        """Whether it acts at the call that was just counted."""
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


def tearing(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """An act that ends the process in the middle of a write; of any other call, before it."""
    if function in (os.write, os.pwrite) or getattr(function, "__name__", "") in ("write", "pwrite"):
        falling_short(function, *arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)


_ACTS = {"kill": killing, "tear": tearing}


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
                replaced(place, self._watched(place, getattr(importlib.import_module(module), name)))
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _watched(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.calls[place] += 1
                fault = self._fault
                strikes = fault is not None and fault.strikes(place, self.calls)
                self.struck += strikes
            return fault.act(function, *arguments, **options) if fault and strikes else function(
                *arguments, **options
            )  # fmt: skip

        return watched


@contextmanager
def replaced(place: str, value: object) -> Generator[None]:
    """Put something else at `module:name` while the block runs."""
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
    """While the block runs each move is synced and journalled by itself, so that small checkpoints have many steps.

    Args:
        workers: threads of the mover; with one the order of all calls is the same in each run. None leaves them.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced("wherry.output:_GROUP_BYTES", 1))
        if workers is not None:
            stack.enter_context(replaced("wherry.mover:worker_count", lambda: workers))
        yield


@dataclass(frozen=True, slots=True)
class Order:
    """A conversion that a child is to do.

    Attributes:
        source, target, to, options: as `wherry.convert` takes them.
        number: the child dies at this call of a function of `places`; 0 for none.
        place: of which function; None for all together.
        act: `kill` before the call, or `tear` in the middle of it.
        after: the child is killed after so many seconds; None lets it end.
        file_size: most bytes of any file that it writes; the kernel refuses more with EFBIG.
        places: the functions whose calls count.
        workers: threads of the mover; None for as many as it takes by itself.
    """

    source: str
    target: str
    to: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    number: int = 0
    place: str | None = None
    act: str = "kill"
    after: float | None = None
    file_size: int | None = None
    places: Sequence[str] = PLACES
    workers: int | None = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a child.

    Attributes:
        killed: whether it died.
        calls: place → calls, where it lived.
        receipt: JSON of the receipt, where the conversion succeeded.
        error: JSON of the error, where it failed.
    """

    killed: bool
    calls: dict[str, int] = field(default_factory=dict[str, int])
    receipt: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class Children:
    """Runs conversions in processes that may die; use it in a `with` statement."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """Choose what is imported before the children are forked.

        Args:
            preload: modules that the conversions need; none of them may start threads.
        """
        self._preload = preload

    def __enter__(self) -> Self:
        code = f"from wherry.testing.faults import serve; serve({json.dumps(list(self._preload))})"
        self._server = subprocess.Popen(  # noqa: S603  this interpreter, and code from the line above
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.communicate()

    def run(self, order: Order) -> Outcome:
        """Do one order; returns when the child has ended."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asdict(order)) + "\n")
        self._server.stdin.flush()
        return Outcome(**json.loads(self._server.stdout.readline()))


def serve(preload: Sequence[str]) -> None:
    """Be the server of `Children`: an order a line comes in, an outcome a line goes out."""
    for name in ("wherry.convert", "wherry.registry", *preload):
        importlib.import_module(name)
    from wherry.registry import formats

    formats()
    for line in sys.stdin:
        outcome = _supervise(Order(**json.loads(line)))
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()


def _supervise(order: Order) -> Outcome:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_child(order, writing)
    os.close(writing)
    if order.after is not None and not select.select([reading], [], [], order.after)[0]:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading, "rb") as file:
        text = file.read()
    _pid, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Outcome(killed=True)
    return Outcome(killed=False, **json.loads(text))


def _be_child(order: Order, writing: int) -> None:
    """Do the order, report, and end without running anything of the server's."""
    code = 1
    try:
        report = json.dumps(_obey(order)).encode()
        with os.fdopen(writing, "wb") as file:
            file.write(report)
        code = 0
    finally:
        os._exit(code)


def _obey(order: Order) -> dict[str, Any]:
    from wherry.convert import convert

    if order.file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order.file_size, resource.RLIM_INFINITY))
    fault = Fault(_ACTS[order.act], order.number, order.place) if order.number else None
    with small_steps(order.workers), Faults(fault, order.places) as faults:
        try:
            receipt = convert(
                order.source, order.target, to=order.to, options=order.options, lineage=False
            ).to_json()
        except WherryError as error:
            return {"calls": dict(faults.calls), "error": error.to_json()}
    return {"calls": dict(faults.calls), "receipt": receipt}
