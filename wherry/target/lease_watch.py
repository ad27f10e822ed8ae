"""Judges a lease that another run holds: whether its owner has ended, is alive, or has not renewed it for too long.

Clocks of different processes are never compared with each other, nor with the times of files. An owner in this PID
namespace is looked up in the process table. For any other owner only changes count: it writes a counter into its lease
every few seconds, and a lease that does not change for `EXPIRY_SECONDS` of watching has expired. A lease that cannot be
read, or that names no owner, is judged by watching alone. Several leases are watched at the same time.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from wherry.core.progress import logger
from wherry.errors import StorageError
from wherry.text.json_values import json_value

EXPIRY_SECONDS = 30.0
LOOK_SECONDS = 1.0  # between two looks at a lease
NOTICE_SECONDS = 2.0  # a longer wait is logged
MOST_BYTES = 4096  # bytes of a lease that are read
_MOST_PID = 1 << 31
_MOST_TEXT = 255
_UNREADABLE = (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO)
_BOOT = "/proc/sys/kernel/random/boot_id"
_MACHINE = "/etc/machine-id"
_PID_NAMESPACE = "/proc/self/ns/pid"
_STOPPED, _ENDED = "Tt", "ZX"
_ended_owners: set[str] = set()  # tokens of this process
_log = logger(__name__)


class Verdict(Enum):
    """The state of a lease.

    FREE: it does not exist. DEAD: its owner was a process of this machine that has ended. ALIVE: its owner is running.
    EXPIRED: it has not changed for long enough. UNDECIDED: it must be watched longer.
    """

    FREE = "free"
    DEAD = "dead"
    ALIVE = "alive"
    EXPIRED = "expired"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner that a lease names.

    Attributes:
        host: name of the machine.
        pid: of the process.
        pid_namespace: the namespace of `pid`; empty if it is unknown.
        process_start: clock ticks from the machine's boot to the start of the process, which distinguishes two
            processes with the same `pid`; None if it is unknown.
        token: random; it is also part of the names of this owner's files.
    """

    host: str
    pid: int
    pid_namespace: str
    process_start: int | None
    token: str

    def to_json(self) -> dict[str, Any]:
        """Every field by its name."""
        return asdict(self)


class Sighting(NamedTuple):
    """The observed state of a lease; two equal sightings mean that it was not renewed between them.

    Attributes:
        state: what changes with each renewal: numbers of the file and its time, the mark of an object, or a counter.
        text: the lease.
    """

    state: object
    text: bytes

    @property
    def owner(self) -> Owner | None:
        """The owner; None if the text is not a valid lease."""
        return owner_in(self.text)


def end_ownership(token: str) -> None:
    """Note that an owner in this process has ended, whose lease may have stayed because its storage failed."""
    _ended_owners.add(token)


def this_process(token: str) -> Owner:
    """The running process as the owner of a lease."""
    process = _process(os.getpid())
    start = process.start if process else None
    return Owner(socket.gethostname(), os.getpid(), _pid_namespace(), start, token)


def see(path: Path) -> Sighting | None:
    """Look at a lease once; None if it does not exist.

    Raises:
        StorageError: it is a folder.
        OSError: the storage failed.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise StorageError(
            "the lease is a folder; expected a file", uri=str(path), cure=f"rm -r {shlex.quote(str(path))}"
        )
    text = _text(path) if stat.S_ISREG(status.st_mode) else b""
    state = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return Sighting(state, text)


class Watch:
    """Observes one lease repeatedly."""

    def __init__(
        self, path: Path | str, look: Callable[[], Sighting | None] | None = None, expiry: float | None = None
    ) -> None:
        """Choose the lease.

        Args:
            path: the lease.
            look: looks at it once; by default as `see` does.
            expiry: seconds after which an unchanged lease has expired; `EXPIRY_SECONDS` by default.
        """
        self.path = path
        self.sighting: Sighting | None = None
        self.expiry = EXPIRY_SECONDS if expiry is None else expiry
        self._see = look or (lambda: see(Path(path)))
        self._unchanged = 0.0
        self._looked = 0.0

    def look(self) -> Verdict:
        """Look once more.

        Raises:
            OSError: the storage failed.
        """
        before, self.sighting = self.sighting, self._see()
        elapsed, self._looked = time.monotonic() - self._looked, time.monotonic()
        if self.sighting is None:
            return Verdict.FREE
        verdict = verdict_of_process(self.sighting.owner)
        if verdict is not None:
            return verdict
        if before is None:
            self._unchanged = 0.0
            return Verdict.UNDECIDED
        if before != self.sighting:
            self._unchanged = 0.0
            return Verdict.ALIVE
        # Time in which the watcher itself was stopped does not count: the owner may have been stopped too.
        self._unchanged += min(elapsed, 2 * pause())
        return Verdict.EXPIRED if self._unchanged >= self.expiry else Verdict.UNDECIDED


class Judgement(NamedTuple):
    """The verdict on a lease, and its observed state at that time."""

    verdict: Verdict
    sighting: Sighting | None


def judge(paths: Iterable[Path]) -> dict[Path, Judgement]:
    """Watch leases, all at the same time, until each is judged; none is UNDECIDED in the end.

    Raises:
        StorageError: a lease is a folder.
        OSError: the storage failed.
    """
    found = judge_all([Watch(path) for path in paths])
    return {Path(path): judgement for path, judgement in found.items()}


def judge_all(watches: list[Watch]) -> dict[Path | str, Judgement]:
    """The same for leases that are watched in their own ways; the result is by path."""
    found = dict[Path | str, Judgement]()
    begin, noticed = time.monotonic(), False
    while True:
        for watch in watches:
            found[watch.path] = Judgement(watch.look(), watch.sighting)
        watches = [watch for watch in watches if found[watch.path].verdict is Verdict.UNDECIDED]
        if not watches:
            return found
        if not noticed and time.monotonic() - begin >= NOTICE_SECONDS:
            noticed = True
            _log.warning(
                "%s: waiting up to %.0f s for the owner to renew the lease",
                watches[0].path,
                watches[0].expiry,
            )
        time.sleep(pause())


def pause() -> float:
    """Seconds between two looks."""
    return min(LOOK_SECONDS, EXPIRY_SECONDS / 10)


def _text(path: Path) -> bytes:
    """The beginning of a regular file; empty if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _UNREADABLE:
            return b""
        raise
    try:
        return os.pread(descriptor, MOST_BYTES, 0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)


def owner_in(text: bytes) -> Owner | None:
    """The owner that a text names; None if a field is missing or invalid."""
    try:
        return owner_from(json_value(text))
    except ValueError:
        return None


def owner_from(found: Any) -> Owner | None:
    """The owner that a JSON table names; None if a field is missing or invalid."""
    try:
        host, pid, namespace, start, token = (found[name] for name in Owner.__slots__)
    except (KeyError, TypeError):
        return None
    words = all(
        type(word) is str and word.isprintable() and len(word) <= _MOST_TEXT
        for word in (host, namespace, token)
    )
    numbers = type(pid) is int and 0 < pid < _MOST_PID and (start is None or type(start) is int)
    return Owner(host, pid, namespace, start, token) if words and numbers else None


def this_machine() -> str:
    """An identifier of this installation of an operating system and of its host name; empty if it is unknown."""
    try:
        return f"{Path(_MACHINE).read_text().strip()} {socket.gethostname()}"
    except OSError:
        return ""


def this_boot() -> str:
    """An identifier of the present run of this machine; empty if it is unknown."""
    try:
        return Path(_BOOT).read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    """An identifier of this PID namespace; empty if it is unknown.

    Containers that share the network of their host have its host name, but their own process numbers. The boot id is
    included: the initial namespace has the same number on every machine, and two machines may have the same name.
    """
    try:
        space = Path(_PID_NAMESPACE).readlink()
    except OSError:
        return ""  # not Linux, or hidden from us
    boot = this_boot()
    return f"{boot} {space}" if boot else ""


class _Process(NamedTuple):
    state: str
    start: int
    threads: int


def _process(pid: int) -> _Process | None:
    """A process of this namespace; None if it is not visible."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return _Process(fields[0].decode(), int(fields[19]), int(fields[17]))
    except (OSError, ValueError, IndexError):
        return None


def verdict_of_process(owner: Owner | None) -> Verdict | None:
    """The verdict of the process table on an owner; None if it gives none, or if the process is stopped."""
    here = _pid_namespace()
    if owner is None or not here or owner.pid_namespace != here or owner.host != socket.gethostname():
        return None
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return Verdict.DEAD
    except PermissionError:
        pass  # it exists and belongs to another user
    if owner.pid == os.getpid() and owner.token in _ended_owners:
        return Verdict.DEAD
    process = _process(owner.pid)
    if process is None or owner.process_start is None:
        return None
    if process.start != owner.process_start or (process.state in _ENDED and process.threads <= 1):
        return Verdict.DEAD
    return None if process.state in _STOPPED else Verdict.ALIVE
