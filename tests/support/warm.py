"""Processes that have imported what they need before they are started: each is a fork of one that waits.

    python -m tests.support.warm SOCKET MODULE...

A fork starts in 50 ms where a new interpreter imports torch, JAX or MLflow for seconds. What a test sees is a process
of its own all the same: with its own folder, environment, command line, standard files, exit code and end. It is the
wrong tool where the start itself is tested: what is imported, from where, and when.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_REQUEST = 1 << 20  # bytes of a request, at most


class Warm:
    """Starts processes by forking one that has imported modules; close it in the end.

    Args:
        line: how to start the waiting process; the number of a socket and the modules are appended.
        env: its environment; what modules read when they are imported is read there.
        modules: what it imports.
        folder: where it stands.
    """

    def __init__(
        self, line: Sequence[str], env: Mapping[str, str], modules: Sequence[str], folder: str | None = None
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*line, str(theirs.fileno()), *modules],
                env={**env, "OPENBLAS_NUM_THREADS": "1"},  # a process with threads cannot be forked safely
                cwd=folder,
                pass_fds=[theirs.fileno()],
            )

    def run(
        self, module: str, words: Sequence[str | bytes], *, cwd: str, env: Mapping[str, str], text: str = ""
    ) -> tuple[int, bytes, bytes]:
        """Run a module as `python -m` does; its exit code, standard output and standard error."""
        request = {"module": module, "words": [*map(_sent, words)], "cwd": _sent(cwd)}
        request["env"] = {_sent(name): _sent(value) for name, value in env.items()}
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(text.encode())
            files[0].seek(0)
            socket.send_fds(self._socket, [json.dumps(request).encode()], [file.fileno() for file in files])
            answer = self._socket.recv(100)
            assert answer, "the waiting process has ended"
            for file in files:
                file.seek(0)
            return int(answer), files[1].read(), files[2].read()

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)


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
            data, files, _flags, _address = socket.recv_fds(requests, _REQUEST, 3)
            if not data:
                return
            child = os.fork()
            if child == 0:
                _be(json.loads(data), files, requests)
            for file in files:
                os.close(file)
            _pid, status = os.waitpid(child, 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())


def _be(request: dict, files: list[int], requests: socket.socket) -> None:
    """Be the process that a request describes; does not return."""
    os.setsid()
    requests.close()
    for number, file in enumerate(files):
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
