"""Children: conversions in child processes that may be killed, or stopped and continued while others resume them.

They are forked from one server that has started no thread and that imports the modules of the first successful child,
so that a kill costs 50 ms instead of a second and hundreds of them can be tested.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, field
from types import TracebackType
from typing import Any, Self

from wherry.core.child import command
from wherry.core.json_document import json_value
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import WherryError
from wherry.testing.faults import ACTS, PLACES, Fault, Faults, failing, replace_value, small_steps


@dataclass(frozen=True, slots=True)
class Order:
    """A conversion for a child process.

    Attributes:
        source, target, to, options: arguments of `wherry.convert`.
        number: the child is killed or stopped at this call of a function of `places`; 0 for never.
        place: the function whose calls are counted; None for all together.
        act: `kill` or `stop` before the call, or `tear` in the middle of it.
        after: seconds after which the child is killed; None to let it end.
        file_size: maximum bytes of any file that it writes; the kernel refuses more with EFBIG.
        places: the functions whose calls count.
        workers: threads of the mover; None for its default.
        verify: argument of `wherry.convert`.
        expiry: seconds after which a lease without a heartbeat expires; None for the default. The heartbeat keeps its
            interval: its calls would count too, and a living owner is found in the process table.
        locks: whether the file system supports `flock`.
        ahead: seconds by which the clock of the child is ahead.
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
    verify: str = "digest"
    expiry: float | None = None
    locks: bool = True
    ahead: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a child process.

    Attributes:
        killed: whether it was killed.
        stopped: its process ID if it was stopped; `Children.resume` continues it.
        calls: place → number of calls, if it was not killed.
        receipt: JSON of the receipt, if the conversion succeeded.
        error: JSON of the error, if it failed.
        modules: the modules that it imported, if it was not killed.
    """

    killed: bool
    stopped: int = 0
    calls: dict[str, int] = field(default_factory=dict[str, int])
    receipt: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    modules: tuple[str, ...] = ()


class Children:
    """Runs conversions in processes that may be killed; use it in a `with` statement."""

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
        """Run one order; returns when the child has ended or stopped."""
        return self._send(asdict(order))

    def resume(self, stopped: Outcome) -> Outcome:
        """Continue a child that has stopped; returns when it has ended."""
        return self._send({"resume": stopped.stopped})

    def _send(self, request: dict[str, Any]) -> Outcome:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Outcome(**json_value(self._server.stdout.readline()))


def serve() -> None:
    """Run the server of `Children`: read one order per line, write one outcome per line."""
    from wherry.formats.registry import formats

    importlib.import_module("wherry.converter.convert")
    list(formats().values())  # their modules
    stopped: dict[int, int] = {}
    for line in sys.stdin:
        outcome = _supervise(json_value(line), stopped)
        for name in outcome.modules:
            importlib.import_module(name)
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()


def _supervise(request: dict[str, Any], stopped: dict[int, int]) -> Outcome:
    """Start a child, or continue a stopped one; `stopped` maps process IDs to the pipes of their reports."""
    if "resume" in request:
        child, after = request["resume"], None
        reading = stopped.pop(child)
        os.kill(child, signal.SIGCONT)
    else:
        order = Order(**request)
        after = order.after
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _be_child(order, writing)
        os.close(writing)
    outcome = _await_child(child, reading, after)
    if outcome.stopped:
        stopped[child] = reading
    else:
        os.close(reading)
    return outcome


def _await_child(child: int, reading: int, after: float | None) -> Outcome:
    """Wait for a child; its report is read while it is written."""
    deadline, report = time.monotonic() + (after or 0), b""
    while True:
        pause = 0.01 if after is None else min(0.01, max(deadline - time.monotonic(), 0))
        if select.select([reading], [], [], pause)[0]:
            data = os.read(reading, 1 << 16)
            report += data
            if not data:
                _pid, status = os.waitpid(child, 0)
                break
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            return Outcome(killed=False, stopped=child)
        if pid:
            while data := os.read(reading, 1 << 16):
                report += data
            break
        if after is not None and time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            after = None
    return Outcome(killed=True) if os.WIFSIGNALED(status) else Outcome(killed=False, **json_value(report))


def _be_child(order: Order, writing: int) -> None:
    """Run the order, report, and exit without running any exit handler of the server."""
    code = 1
    try:
        report = json.dumps(_obey(order)).encode()
        with os.fdopen(writing, "wb") as file:
            file.write(report)
        code = 0
    finally:
        os._exit(code)


def _obey(order: Order) -> dict[str, Any]:
    from wherry.converter.convert import convert

    if order.file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order.file_size, resource.RLIM_INFINITY))
    fault = Fault(ACTS[order.act], order.number, order.place) if order.number else None
    before = set(sys.modules)
    with ExitStack() as stack:
        stack.enter_context(small_steps(order.workers))
        if order.expiry is not None:
            stack.enter_context(replace_value("wherry.target.lease:EXPIRY_SECONDS", order.expiry))
        if not order.locks:
            stack.enter_context(replace_value("fcntl:flock", failing(errno.ENOLCK)))
        if order.ahead:
            now = time.time
            stack.enter_context(replace_value("time:time", lambda: now() + order.ahead))
        faults = stack.enter_context(Faults(fault, order.places))
        try:
            receipt = convert(
                order.source,
                order.target,
                to=order.to,
                options=order.options,
                verify=order.verify,
                lineage=False,
            ).to_json()
        except WherryError as error:
            return {"calls": dict(faults.calls), "error": error.to_json()}
        except Exception:  # noqa: BLE001  the test gets the traceback
            return {"calls": dict(faults.calls), "error": {"what": traceback.format_exc(), "exit_code": 70}}
    modules = tuple(name for name in sys.modules if name not in before)
    return {"calls": dict(faults.calls), "receipt": receipt, "modules": modules}


if __name__ == "__main__":
    serve()
