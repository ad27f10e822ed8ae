"""Children: conversions in processes that may die of it, to be taken up by the next.

They are forked from one server that has started no thread, and that imports what the first child to succeed needed,
so that a kill costs 50 ms instead of a second and hundreds can be tried.
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
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from wherry.child import command
from wherry.errors import WherryError
from wherry.testing.faults import ACTS, PLACES, Fault, Faults, small_steps

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType


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
        modules: what was imported in the end, where it lived.
    """

    killed: bool
    calls: dict[str, int] = field(default_factory=dict[str, int])
    receipt: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    modules: tuple[str, ...] = ()


class Children:
    """Runs conversions in processes that may die; use it in a `with` statement."""

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(  # noqa: S603  this interpreter and this module
            command("wherry.testing.children"),
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


def serve() -> None:
    """Be the server of `Children`: an order a line comes in, an outcome a line goes out."""
    from wherry.registry import formats

    importlib.import_module("wherry.convert")
    formats()
    for line in sys.stdin:
        outcome = _supervise(Order(**json.loads(line)))
        for name in outcome.modules:
            importlib.import_module(name)
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
    fault = Fault(ACTS[order.act], order.number, order.place) if order.number else None
    before = set(sys.modules)
    with small_steps(order.workers), Faults(fault, order.places) as faults:
        try:
            receipt = convert(
                order.source, order.target, to=order.to, options=order.options, lineage=False
            ).to_json()
        except WherryError as error:
            return {"calls": dict(faults.calls), "error": error.to_json()}
    modules = tuple(name for name in sys.modules if name not in before)
    return {"calls": dict(faults.calls), "receipt": receipt, "modules": modules}


if __name__ == "__main__":
    serve()
