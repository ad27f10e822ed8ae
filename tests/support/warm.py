"""Processes that have imported what they need before they are started: each is a fork of one that waits.

    python -m tests.support.warm SOCKET MODULE...

A fork starts in 50 ms where a new interpreter imports torch, JAX or MLflow for seconds. What a test sees is a process
of its own all the same: with its own folder, environment, command line, standard files, exit code and end. It is the
wrong tool where the start itself is tested: what is imported, from where, and when.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

_PR_SET_PDEATHSIG = 1
_MESSAGE = 100  # bytes of a message, at most
_GRACE = 10  # seconds in which the waiting process ends by itself

_PLACES = frozenset(
    {"WHERRY_HOME", "WHERRY_LEDGER", "WHERRY_CONFIG", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"}
)


class Warm:
    """Starts processes by forking one that has imported modules; close it in the end.

    A run that is interrupted, or does not end in time, is killed with its process group, and so is the process that
    forked it; the next run starts both anew.

    Args:
        line: how to start the waiting process; the number of a socket and the modules are appended.
        env: its environment, less the places of the test that starts it; what modules read when they are imported is
            read there.
        modules: what it imports.
        folder: where it stands.
    """

    def __init__(
        self, line: Sequence[str], env: Mapping[str, str], modules: Sequence[str], folder: str | None = None
    ) -> None:
        self._line, self._modules, self._folder = line, modules, folder
        self._env = {name: value for name, value in env.items() if name not in _PLACES}
        self._env["OPENBLAS_NUM_THREADS"] = "1"  # a process with threads cannot be forked safely
        self._serial = 0
        self._start()

    def _start(self) -> None:
        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            self._process = subprocess.Popen(
                [*self._line, str(child_end.fileno()), *self._modules],
                env=self._env,
                cwd=self._folder,
                pass_fds=[child_end.fileno()],
            )

    def run(
        self,
        module: str,
        words: Sequence[str | bytes],
        *,
        cwd: str,
        env: Mapping[str, str],
        text: str = "",
        seconds: float = 300,
    ) -> tuple[int, bytes, bytes]:
        """Run a module as `python -m` does; its exit code, standard output and standard error.

        Raises:
            subprocess.TimeoutExpired: it did not end within so many seconds, and was killed.
        """
        request = {"module": module, "words": [*map(_sent, words)], "cwd": _sent(cwd)}
        request["env"] = {_sent(name): _sent(value) for name, value in env.items()}
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)]
            for file, data in zip(files, (json.dumps(request), text), strict=False):
                file.write(data.encode())
                file.seek(0)
            code = self._answer([file.fileno() for file in files], module, seconds)
            for file in files:
                file.seek(0)
            return code, files[2].read(), files[3].read()

    def _answer(self, files: list[int], module: str, seconds: float) -> int:
        """The exit code of the process that a request describes."""
        if self._process.poll() is not None:
            self.close()
            self._start()
        self._serial += 1
        try:
            self._socket.settimeout(seconds)
            socket.send_fds(self._socket, [str(self._serial).encode()], files)
            answer = self._socket.recv(_MESSAGE)
            assert answer, "the waiting process has ended"
            serial, code = map(int, answer.split())
            assert serial == self._serial, "the answer is that of another run"
        except TimeoutError:
            self.close()
            raise subprocess.TimeoutExpired(module, seconds) from None
        except BaseException:
            self.close()
            raise
        return code

    def close(self) -> None:
        """End the waiting process, which kills what it has forked and is still waiting for."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _sent(word: str | bytes) -> str:
    """Bytes as text that does not depend on the locale of either side."""
    return os.fsencode(word).decode("latin-1")


def _received(word: str) -> str:
    return os.fsdecode(word.encode("latin-1"))


def serve(number: int, modules: Sequence[str]) -> None:
    """Import modules, and fork for each request until the other side closes."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=number) as requests:
        while True:
            serial, files, _flags, _address = socket.recv_fds(requests, _MESSAGE, 4)
            if not serial:
                return
            parent, child = os.getpid(), os.fork()
            if child == 0:
                _be(files, requests, parent)
            for file in files:
                os.close(file)
            code = _wait(child, requests)
            requests.send(b"%s %d" % (serial, code))


def _wait(child: int, requests: socket.socket) -> int:
    """The exit code of a child, which is killed with its process group once the other side has closed."""
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, requests], [], [])
    os.close(ended)
    if requests in ready:
        with suppress(ProcessLookupError):  # it has no group of its own yet
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _be(files: list[int], requests: socket.socket, parent: int) -> None:
    """Be the process that a request describes; does not return."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    requests.close()
    with os.fdopen(files[0], "rb") as file:
        request = json.load(file)
    for number, file in enumerate(files[1:]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(_received(request["cwd"]))
    os.environ.clear()
    os.environ.update({_received(name): _received(value) for name, value in request["env"].items()})
    sys.argv[1:] = map(_received, request["words"])
    code = _code(request["module"])
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code(module: str) -> int:
    """Run a module; the exit code that the interpreter would end with."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
