"""What surrounds the product in a simulation: clocks, process table, random names, threads and files of the simulation.

Only threads of a simulation see them; the process that runs the tests keeps its own.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import time
import uuid
from contextlib import ExitStack, contextmanager
from datetime import datetime
from unittest.mock import patch

from tests.support.simulation import threads
from tests.support.simulation.files import simulated_files
from tests.support.simulation.schedule import current

KEY = "the key of every process of a simulation"
# The modules whose threads and locks are held over calls of a store.
_THREADED = (
    "target.lease",
    "target.journal",
    "target.parts",
    "target.uploaded_file",
    "target.upload_run",
    "target.staged_objects",
)


@contextmanager
def simulated():
    """Let the product run in simulations while the block runs."""
    lease_watch = importlib.import_module("wherry.target.lease")
    with ExitStack() as stack:
        replace = stack.enter_context
        for name in _THREADED:
            module = importlib.import_module(f"wherry.{name}")
            replace(patch.object(module, "threading", threads.THREADING))
        replace(patch("wherry.core.threads.executor", threads.Pool))
        for name, real in (
            ("monotonic", time.monotonic), ("time", time.time), ("time_ns", time.time_ns), ("sleep", time.sleep),
        ):  # fmt: skip
            replace(patch.object(time, name, _clock(name, real)))
        replace(patch("wherry.target.clean.datetime", _Datetime))
        replace(patch.object(os, "getpid", _getpid(os.getpid)))
        replace(patch.object(os, "kill", _kill(os.kill)))
        replace(patch.object(socket, "gethostname", _gethostname(socket.gethostname)))
        replace(patch.object(lease_watch, "_process", _process_in_table(lease_watch)))
        replace(patch.object(lease_watch, "_pid_namespace", _namespace))
        replace(patch.object(secrets, "token_hex", _token_hex(secrets.token_hex)))
        for module in ("google", "azure"):
            replace(patch(f"wherry.store.{module}.uuid4", _uuid4(uuid.uuid4)))
        replace(patch.dict(os.environ, {"WHERRY_KEY": KEY}))
        replace(simulated_files())
        log = logging.getLogger("wherry")
        replace(patch.object(log, "disabled", True))
        replace(_quiet())
        yield


def forget():
    """Forget what one process of the product knows, before the processes of the next simulation."""
    importlib.import_module("wherry.target.lease")._ended_owners.clear()


@contextmanager
def _quiet():
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _clock(name, real):
    def call(*seconds):
        thread = current()
        if thread is None:
            return real(*seconds)
        found = thread.simulation
        if name == "sleep":
            return found.sleep(*seconds)
        if name == "monotonic":
            return found.monotonic()
        return found.wall() if name == "time" else int(found.wall() * 1e9)

    return call


class _Datetime(datetime):
    """`datetime`, whose present moment is that of `time.time`."""

    @classmethod
    def now(cls, tz=None):
        return datetime.fromtimestamp(time.time(), tz)


def _getpid(real):
    def call():
        thread = current()
        return real() if thread is None else thread.process.pid

    return call


def _kill(real):
    def call(pid, number):
        thread = current()
        if thread is None:
            return real(pid, number)
        assert number == 0, "nobody is killed this way"
        if _neighbour(pid) is None:
            raise ProcessLookupError(pid)
        return None

    return call


def _gethostname(real):
    def call():
        thread = current()
        return real() if thread is None else thread.process.machine

    return call


def _neighbour(pid):
    """The process with a number on the machine of this thread."""
    thread = current()
    machine = thread.process.machine
    return next(
        (
            one
            for one in thread.simulation.processes
            if one.alive and one.machine == machine and one.pid == pid
        ),
        None,
    )


def _process_in_table(lease_watch):
    def call(pid):
        found = _neighbour(pid)
        if found is None:
            return None
        stopped = found.stopped_until > current().simulation.now
        return lease_watch._Process("T" if stopped else "S", found.started, 1)

    return call


def _namespace():
    process = current().process
    return f"{process.boot} pid:{process.machine}"


def _token_hex(real):
    def call(nbytes=8):
        thread = current()
        return real(nbytes) if thread is None else thread.simulation.random.randbytes(nbytes).hex()

    return call


def _uuid4(real):
    def call():
        thread = current()
        return (
            real() if thread is None else uuid.UUID(bytes=thread.simulation.random.randbytes(16), version=4)
        )

    return call
