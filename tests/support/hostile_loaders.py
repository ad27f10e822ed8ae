"""A loader of the native level that does what no loader may do, and says how each attempt ended.

A thread that was there before the checkpoint makes the attempts too: no thread may have more rights than another. The
attempts are those of a library that a checkpoint has taken over.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IO_URING_SETUP = 425
_PTRACE_TRACEME = 0
_CALLER = os.getppid()
_jobs: queue.Queue[Any] = queue.Queue()
_answers: queue.Queue[Any] = queue.Queue()


def _work() -> None:
    while True:
        _answers.put(_outcomes(*_jobs.get()))


def prepare() -> None:
    """Start a thread before calls are limited, as libraries do."""
    threading.Thread(target=_work, daemon=True).start()


def load(path: Path, _specs: Any) -> None:
    """Attempt everything, by this thread, by one that was there before, and by a process that this one starts."""
    place = path, path.parent.parent / "outside"
    found = {"thread": _outcomes(*place)}
    _jobs.put(place)
    found["earlier thread"] = _answers.get()
    found["process"] = _forked(place)
    raise RuntimeError(json.dumps({who: [*outcomes.values()] for who, outcomes in found.items()}))


def _outcomes(path: Path, outside: Path) -> dict[str, int]:
    """Attempt → the number of its error; 0 where it succeeded."""
    return {name: _errno(attempt, path, outside) for name, attempt in ATTEMPTS.items()}


def _errno(attempt: Any, path: Path, outside: Path) -> int:
    try:
        attempt(path, outside)
    except OSError as error:
        return error.errno or -1
    return 0


def _forked(place: tuple[Path, Path]) -> dict[str, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(_outcomes(*place)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text)


def _connect(family: int, address: Any) -> None:
    with socket.socket(family) as one:
        one.connect(address)


def _open_ring() -> None:
    """Ask for io_uring, which opens, connects and sends without the calls of these names."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_long(1), ctypes.create_string_buffer(120))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    os.close(result)


def _in_a_copy(attempt: Callable[[], None]) -> None:
    """Make an attempt in a process that is a copy of this one, and ends with the number of its error."""
    child = os.fork()
    if child == 0:
        try:
            attempt()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(code, "refused")


def _be_traced() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(ctypes.c_long(_PTRACE_TRACEME), 0, None, None) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def _link(path: Path, link: Path) -> None:
    link.symlink_to(path)
    link.unlink()


def _move(outside: Path) -> None:
    (outside / "secret").rename(outside / "moved")
    (outside / "moved").rename(outside / "secret")


ALLOWED = {
    "read the checkpoint": lambda path, _: path.read_bytes(),
    "write to its own folder": lambda *_: Path("own").write_text("x"),
    "make a folder of its own": lambda *_: Path("folder").mkdir(exist_ok=True),
    "a pair of sockets": lambda *_: [one.close() for one in socket.socketpair()],
    "read random numbers": lambda *_: Path("/dev/urandom").open("rb").close(),
    "throw away": lambda *_: Path(os.devnull).write_text("x"),
}
REFUSED = {
    "read another file": lambda _, outside: (outside / "secret").read_bytes(),
    "list another folder": lambda _, outside: os.listdir(outside),
    "write to another file": lambda _, outside: (outside / "secret").open("r+").close(),
    "truncate another file": lambda _, outside: os.truncate(outside / "secret", 6),
    "make a file": lambda _, outside: (outside / "made").write_text("x"),
    "make a folder": lambda _, outside: (outside / "folder").mkdir(exist_ok=True),
    "make a link": lambda path, outside: _link(path, outside / "link"),
    "move a file": lambda _, outside: _move(outside),
    "write to the checkpoint": lambda path, _: path.open("r+").close(),
    "change the mode of the checkpoint": lambda path, _: path.chmod(0o644),
    "change the owner of the checkpoint": lambda path, _: os.chown(path, os.getuid(), os.getgid()),
    "change the time of the checkpoint": lambda path, _: os.utime(path),
    "write next to the checkpoint": lambda path, _: path.with_name("neighbour").write_text("x"),
    "read the environment of the caller": lambda *_: Path(f"/proc/{_CALLER}/environ").read_bytes(),
    "connect by TCP": lambda path, _: _connect(socket.AF_INET, ("127.0.0.1", int(path.parent.name))),
    "connect by a socket in a folder": lambda _, outside: _connect(socket.AF_UNIX, str(outside / "socket")),
    "open a UDP socket": lambda *_: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
    "execute a program": lambda *_: subprocess.run(["/bin/true"], check=True),
    "execute by a shell": lambda *_: subprocess.run("true", shell=True, check=True),
    "execute in place": lambda *_: _in_a_copy(lambda: os.execv("/bin/true", ["true"])),
    "rings of calls": lambda *_: _open_ring(),
    "be traced": lambda *_: _in_a_copy(_be_traced),
    "signal the caller": lambda *_: os.kill(_CALLER, 0),
}
ATTEMPTS = {**ALLOWED, **REFUSED}
