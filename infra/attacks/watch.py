"""The audit hook of a child: which events mean that data was run, or that something outside its scratch was changed.

Python reports imports, calls of the system and openings of files to the hook before they happen. The hook only notes
them: what a verb does next shows what an attack would have come to.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

MARKER = "EVIL_MARKER"  # what a payload leaves where it runs
REPORT = "executed"  # where a watched child tells of what ran, in its folder for temporary files
_ALWAYS = frozenset((
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg",
    "urllib.Request", "http.client.connect", "ftplib.connect", "smtplib.connect", "webbrowser.open",
    "code.__new__", "pickle.find_class", "sys.setprofile",
))  # fmt: skip
_CHANGES = frozenset((
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.chown", "os.truncate",
    "os.utime", "os.setxattr",
))  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_DEVICES = ("/dev/null", "/dev/shm/wherry", "/dev/tty")
_MOST = 3


class Watch:
    """Notes what happens while it is on.

    Args:
        scratch: folders that may be changed.
        hostile: the folder whose code must not run.
        port: of the attack's own server, to which a connection is no event; 0 if there is none.
    """

    def __init__(self, scratch: Sequence[str], hostile: str, port: int = 0) -> None:
        self._served = ("127.0.0.1", port) if port else None
        self._scratch = tuple(os.path.realpath(folder) for folder in scratch)
        self._hostile = os.path.realpath(hostile)
        self.on = False
        self.seen: list[str] = []
        # Whether a thread does what belongs to the attack. Not `on`: other threads are watched meanwhile, and who
        # switches the watch off must not find it on again.
        self._exempt = threading.local()

    def install(self) -> None:
        """From now on, events are reported; they cannot be switched off, hence `on`."""
        sys.addaudithook(self._hook)

    def unwatched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose own acts are no events: it belongs to the attack."""

        def run(*values: Any, **named: Any) -> Any:
            self._exempt.now = True
            try:
                return function(*values, **named)
            finally:
                self._exempt.now = False

        return run

    def _hook(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.on or getattr(self._exempt, "now", False):
            return
        self._exempt.now = True  # what the hook does itself is no event
        try:
            reason = self._judge(event, values)
            if reason and len(self.seen) < _MOST:
                self.seen.append(reason[:300])
        finally:
            self._exempt.now = False

    def _judge(self, event: str, values: tuple[Any, ...]) -> str | None:
        if event in _ALWAYS:
            served = event == "socket.connect" and values[1] == self._served
            return None if served else f"{event} {values!r}"
        if event in _CHANGES:
            return self._judge_change(event, values)
        check = _JUDGES.get(event)
        return check(self, event, values) if check else None

    def _judge_open(self, event: str, values: tuple[Any, ...]) -> str | None:
        path, mode, flags = values
        if not isinstance(path, str | bytes):
            return None
        name = os.fsdecode(path)
        if os.path.basename(name) == MARKER:
            return f"{event} {name}"
        writing = bool(flags & _WRITING) if isinstance(flags, int) else bool(set(mode or "r") & set("wax+"))
        return f"{event} {name} for writing" if writing and self._outside(name, -1) else None

    def _judge_change(self, event: str, values: tuple[Any, ...]) -> str | None:
        links = event in ("os.symlink", "os.link")
        paths = [value for value in values if isinstance(value, str | bytes)][links:]
        folders = [value for value in values if isinstance(value, int) and value > 2] or [-1]
        outside = [name for name in map(os.fsdecode, paths) if self._outside(name, folders[-1])]
        return f"{event} {outside}" if outside else None

    def _outside(self, name: str, folder: int) -> bool:
        """Whether a path lies outside the scratch; one of a folder's descriptor, by where that folder is."""
        if not os.path.isabs(name) and folder >= 0:
            with suppress(OSError):  # a mode, not a descriptor
                name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        full = os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name))
        places = (*self._scratch, *_DEVICES)
        return not any(full == place or full.startswith(place.rstrip("/") + "/") for place in places)

    def _judge_execution(self, event: str, values: tuple[Any, ...]) -> str | None:
        code = values[0]
        file, words = getattr(code, "co_filename", ""), getattr(code, "co_consts", ())
        if self._in_hostile(file) or MARKER in repr(words):
            return f"{event} of {file}"
        return None

    def _judge_signal(self, event: str, values: tuple[Any, ...]) -> str | None:
        """Signal 0 only asks whether a process is there."""
        return f"{event} {values!r}" if values[1] else None

    def _judge_import(self, event: str, values: tuple[Any, ...]) -> str | None:
        file = values[1]
        return f"{event} of {file}" if isinstance(file, str) and self._in_hostile(file) else None

    def _judge_library(self, event: str, values: tuple[Any, ...]) -> str | None:
        """A library: those of this interpreter are fine."""
        name = values[0] if values else None
        text = os.fsdecode(name) if isinstance(name, str | bytes) else ""
        return f"{event} {text}" if self._in_hostile(text) else None

    def _in_hostile(self, file: str) -> bool:
        """Whether it is a file of the hostile folder; `<string>` and names without a folder are no files."""
        return "/" in file and os.path.realpath(file).startswith(self._hostile + "/")


_JUDGES: dict[str, Callable[[Watch, str, tuple[Any, ...]], str | None]] = {
    "open": Watch._judge_open, "exec": Watch._judge_execution, "os.kill": Watch._judge_signal,
    "import": Watch._judge_import, "ctypes.dlopen": Watch._judge_library,
}  # fmt: skip
