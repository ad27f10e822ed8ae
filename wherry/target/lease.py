"""The lease: two runs on one target exclude each other, and an owner that has ended or hangs does not block forever.

`.wherry-<name>.lease` next to the target names its owner, who renews it with a counter every few seconds. It is changed
by compare-and-set only:

1. A run looks at the lease, and judges its owner if there is one (see `Watch`); clocks are never compared.
2. It takes the lease in the state that it has judged: none, or that of an owner which has ended or does not renew it.
3. The owner renews and removes the lease only in the state that it has written itself.

So there is one owner at any time, and a former owner finds out with its next look. A lease is kept in a register:

- `LeaseFile`, on a file system: a complete draft gets the name of the lease by a link, or by a rename over a lease that
  is replaced. The owner keeps the file open, holds the lease as long as the path refers to that file, and writes its
  counter through the open file, so that it can never change the lease of another owner. Takeover and commit exclude
  each other by `flock`; where there is none, only the names of the staging areas keep a former owner from committing.
- `LeaseObject`, in a store: an object that is put and removed on the condition that it is in a known state.

A `Watch` judges a lease that another run holds: whether its owner has ended, is alive, or has not renewed it for too
long. Clocks of different processes are never compared with each other, nor with the times of files. An owner in this
PID namespace is looked up in the process table. For any other owner only changes count: it writes a counter into its
lease every few seconds, and a lease that does not change for `EXPIRY_SECONDS` of watching has expired. A lease that
cannot be read, or that names no owner, is judged by watching alone. Several leases are watched at the same time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shlex
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from wherry.core.json_document import json_value
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.errors import NotFoundError, StorageError, TargetInUseError, WherryError, storage_errors
from wherry.store.folders import DRAFT, NO_LINKS, PREFIX, staging_stem

if TYPE_CHECKING:
    from wherry.store.location import Location
    from wherry.store.store import Store


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
    """Watch all leases at the same time until each is judged; no verdict of the result is UNDECIDED.

    Raises:
        StorageError: a lease is a folder.
        OSError: the storage failed.
    """
    found = judge_all([Watch(path) for path in paths])
    return {Path(path): judgement for path, judgement in found.items()}


def judge_all(watches: list[Watch]) -> dict[Path | str, Judgement]:
    """Judge leases as `judge` does, with a different `Watch` for each; the result is by path."""
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


_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
_LOCK_SECONDS = 5.0  # a takeover holds the lock for a few system calls
_ATTEMPTS = 5
_SCHEMA = 1
_log = logger(__name__)


class Register(Protocol):
    """Where a lease is kept; each call can raise OSError or StorageError.

    Attributes:
        uri: of the place.
        expiry: seconds after which a lease that does not change has expired.
        heartbeat: seconds between two renewals.
        fresh: seconds after a renewal in which an act can begin that ends before the lease can expire.
    """

    uri: str
    heartbeat: float
    fresh: float

    @property
    def expiry(self) -> float:
        """See above; tests change it."""
        ...

    def look(self) -> Sighting | None:
        """The lease as it is; None if there is none."""
        ...

    def swap(self, seen: Sighting | None, owner: Owner) -> bool:
        """Write the lease of an owner in place of one in a state; False if it is in another state.

        Raises:
            BlockingIOError: another run is replacing it.
        """
        ...

    def renew(self, beat: int) -> bool:
        """Write the counter of the owner; False if the lease is not held any more."""
        ...

    def holds(self) -> bool:
        """Whether the lease is in the state that its owner has written."""
        ...

    def locked(self) -> AbstractContextManager[bool]:
        """Keep others from replacing the lease while the block runs; False if another run does so and does not end."""
        ...

    def remove(self) -> bool:
        """Remove the lease if it is held; False if another run is just checking it."""
        ...


class Lease:
    """Holds a lease on a target while its `with` block runs.

    Attributes:
        token: eight hex digits of this owner, the id of the run.
        former: the token of the owner from which it was taken over, if there was one.
        dead: the same, if that was a process of this machine that has ended.
        register: where it is kept.

    Raises on entering:
        TargetInUseError: a running process holds it; the error names the process.
        StorageError: the storage failed.
    """

    def __init__(self, register: Register, target: str, judgement: Judgement | None = None) -> None:
        """Choose the lease.

        Args:
            register: where it is kept.
            target: what it protects, for errors.
            judgement: the verdict on the present lease, if it was watched already.
        """
        self.token = secrets.token_hex(4)
        self.former: str | None = None
        self.dead: str | None = None
        self.register = register
        self._target = target
        self._judgement = judgement
        self._renewed = float("-inf")
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="wherry-lease", daemon=True)

    def __enter__(self) -> Self:
        try:
            with storage_errors(self._target):
                self._take()
            self._heart.start()
        except BaseException:  # for example when no thread can be started
            end_ownership(self.token)  # what was written may stay
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._heart.join()
        end_ownership(self.token)
        if reason := self._release():
            # The result of the work stands. As long as this process runs, other processes treat the lease as held.
            _log.warning(
                "the lease %s was not released; trying again in the background: %s", self.register.uri, reason
            )
            threading.Thread(target=self._release_later, name="wherry-lease-release", daemon=True).start()

    def holds(self) -> bool:
        """Whether this lease is still held: a run that was stopped for too long may have lost it.

        Raises:
            StorageError: the storage failed.
        """
        with storage_errors(self._target):
            return self.register.holds()

    def require_held(self) -> None:
        """Check that this run may still write.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        if not self.holds():
            raise self.lost()

    def require_fresh(self) -> None:
        """Check the same before frequent acts: the storage is queried only if the lease was not renewed for a while.

        A run that was stopped finds out before its next act, and not only with its next group of the journal.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        if time.monotonic() - self._renewed > self.register.fresh:
            self.require_held()

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Prevent other runs from taking the lease over while the block runs, where the storage has locks.

        Raises:
            TargetInUseError: another run has taken it over, or is checking it and does not go on.
            OSError: the storage failed.
        """
        with self.register.locked() as locked:
            self.require_held()
            if not locked:
                raise TargetInUseError(
                    "another run is checking the lease of this target, and does not go on",
                    uri=self._target,
                    cure="end that run if it hangs, then run the conversion again; it goes on where it stopped",
                    retryable=True,
                )
            yield

    def lost(self) -> TargetInUseError:
        """The error of an owner whose lease was taken over."""
        return TargetInUseError(
            "another run took over this target",
            uri=self._target,
            cure="wait for that run to end; this run did not renew its lease for more than "
            f"{self.register.expiry:.0f} s",
            retryable=True,
        )

    def _take(self) -> None:
        register, judged = self.register, self._judgement
        for _attempt in range(_ATTEMPTS):
            if judged is None:
                watch = Watch(register.uri, register.look, register.expiry)
                judged = judge_all([watch])[register.uri]
            owner = judged.sighting.owner if judged.sighting else None
            if judged.verdict is Verdict.ALIVE:
                raise self._in_use(owner)
            begun = time.monotonic()  # the seconds in which it is fresh begin before the request
            try:
                taken = register.swap(judged.sighting, this_process(self.token))
            except BlockingIOError:
                raise self._in_use(owner) from None
            if taken:
                self._renewed = begun
                self.former = owner.token if owner else None
                self.dead = self.former if judged.verdict is Verdict.DEAD else None
                return
            judged = None
        raise self._in_use(None)

    def _in_use(self, owner: Owner | None) -> TargetInUseError:
        who = f"process {owner.pid} on {owner.host}" if owner else "another run"
        return TargetInUseError(
            f"{who} is writing this target",
            uri=self._target,
            cure="wait for that run to end; a lease that is not renewed expires after "
            f"{self.register.expiry:.0f} s",
            retryable=True,
        )

    def _beat(self) -> None:
        # The first renewal is due from when the lease was taken: that can have lasted as long as a lease does.
        count, warned, begun = 0, False, self._renewed
        while not self._over.wait(max(0.0, begun + self.register.heartbeat - time.monotonic())):
            count += 1
            begun = time.monotonic()
            try:
                held = self.register.renew(count)
            except (WherryError, OSError) as error:  # harmless if the storage recovers in time
                if not warned:
                    _log.warning(
                        "the lease %s was not renewed; the next attempt is in %.0f s: %s",
                        self.register.uri,
                        self.register.heartbeat,
                        error,
                    )
                warned = True
            else:
                self._renewed = begun if held else float("-inf")
                if not held:
                    return

    def _release(self) -> str:
        """Remove the lease; the reason if that was not possible, else empty."""
        try:
            return "" if self.register.remove() else "another run is checking it"
        except (WherryError, OSError) as error:
            return str(error)

    def _release_later(self) -> None:
        while True:
            time.sleep(self.register.heartbeat)
            reason = self._release()
            if not reason:
                return
            _log.debug("the lease %s was still not released: %s", self.register.uri, reason)


class LeaseFile:
    """A lease in a file of its own; see Register.

    Attributes:
        path: of the lease.
    """

    heartbeat = 5.0
    fresh = 0.0  # a look costs a system call

    def __init__(self, path: Path) -> None:
        """Choose the path of the lease."""
        self.path, self.uri = path, str(path)
        self._descriptor, self._identity = -1, (0, 0)
        self._owner: Owner

    @property
    def expiry(self) -> float:
        """See Register."""
        return EXPIRY_SECONDS

    @property
    def uid(self) -> int:
        """The user that owns files which this process creates, according to the storage."""
        return os.fstat(self._descriptor).st_uid

    def look(self) -> Sighting | None:
        """See Register."""
        return see(self.path)

    def swap(self, seen: Sighting | None, owner: Owner) -> bool:
        """See Register."""
        self._owner, taken = owner, False
        draft = self.path.with_name(f"{self.path.stem}.{secrets.token_hex(4)}{DRAFT}")
        self._open(draft)
        try:
            taken = self._create(draft) if seen is None else self._replace(draft, seen)
        except FileNotFoundError:  # the holder removed the draft, or the folder no longer exists
            if not self.path.parent.is_dir():
                raise
        finally:
            if not taken:
                self._close()
            draft.unlink(missing_ok=True)
        return taken

    def renew(self, beat: int) -> bool:
        """See Register."""
        if not self.holds():
            return False
        os.pwrite(self._descriptor, lease_text(self._owner, beat), 0)
        os.fdatasync(self._descriptor)
        return True

    def holds(self) -> bool:
        """See Register."""
        try:
            found = self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def locked(self) -> AbstractContextManager[bool]:
        """See Register."""
        return _lock(self._descriptor, _LOCK_SECONDS)

    def remove(self) -> bool:
        """See Register."""
        if self._descriptor < 0:
            return True  # it was not taken
        with self.locked() as locked:
            if locked and self.holds():
                self.path.unlink(missing_ok=True)
        if locked:
            self._close()
        return locked

    def _open(self, path: Path) -> None:
        """Create the lease file, which is complete before it gets its final name."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        found = os.fstat(self._descriptor)
        self._identity = (found.st_dev, found.st_ino)
        try:
            os.write(self._descriptor, lease_text(self._owner, 0))
            os.fsync(self._descriptor)
        except BaseException:
            self._close()
            path.unlink(missing_ok=True)
            raise

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._identity = -1, (0, 0)  # an inode identifies a file only while it is open

    def _create(self, draft: Path) -> bool:
        """Take the lease if it is free; whether it was."""
        try:
            os.link(draft, self.path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self._close()  # the draft
            try:
                self._open(self.path)
            except FileExistsError:
                return False
        return True

    def _replace(self, draft: Path, seen: Sighting) -> bool:
        """Replace the lease of another owner; False if it has changed."""
        with _locked_path(self.path) as locked:
            if not locked:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), self.uri)
            if see(self.path) != seen:
                return False
            try:
                draft.replace(self.path)
            except PermissionError as error:
                raise StorageError(
                    "the expired lease of another user cannot be replaced",
                    uri=self.uri,
                    cure=f"ask its owner to remove it: rm {shlex.quote(self.uri)}",
                ) from error
        return True


class LeaseObject:
    """A lease in an object; see Register. It carries the owner's token as the id of its run."""

    expiry = 90.0  # a request may take a minute while the storage does not answer
    heartbeat = 15.0
    fresh = 30.0

    def __init__(self, store: Store, place: Location) -> None:
        """Choose the lease.

        Args:
            store: the store of the target.
            place: the lease.
        """
        self.uri = place.uri
        self._store, self._place = store, place
        self._mark, self._lost = "", False
        self._lock = threading.Lock()
        self._owner: Owner

    def look(self) -> Sighting | None:
        """See Register."""
        found = self._store.head(self._place.path)
        if found is None:
            return None
        text = b""
        with suppress(NotFoundError):  # released meanwhile: the next look sees that
            text = self._place.read(0, MOST_BYTES)
        return Sighting(found.mark, text)

    def swap(self, seen: Sighting | None, owner: Owner) -> bool:
        """See Register."""
        self._owner = owner
        return self._put(0, "" if seen is None else str(seen.state))

    def renew(self, beat: int) -> bool:
        """See Register."""
        with self._lock:
            self._lost = self._lost or not self._put(beat, self._mark)
            return not self._lost

    def holds(self) -> bool:
        """See Register."""
        with self._lock:
            if not self._lost:
                found = self._store.head(self._place.path)
                self._lost = found is None or found.mark != self._mark
            return not self._lost

    @contextmanager
    def locked(self) -> Generator[bool]:
        """See Register; there are no locks: each act on an object names the state that it expects."""
        yield True

    def remove(self) -> bool:
        """See Register."""
        if self._mark:
            self._store.remove_object(self._place.path, self._mark)
        return True

    def _put(self, beat: int, mark: str) -> bool:
        text = lease_text(self._owner, beat)
        try:
            self._mark = self._store.put_object(self._place.path, text, self._owner.token, replaces=mark).mark
        except FileExistsError:
            return False
        return True


def lease_of(target: Location, judgement: Judgement | None = None) -> Lease:
    """The lease of a target, not taken yet.

    Args:
        target: in a local folder, or in a store that takes parts.
        judgement: see Lease.
    """
    return Lease(register_of(target), target.uri, judgement)


def register_of(target: Location) -> Register:
    """Where the lease of a target is kept; see `lease_of`."""
    if not target.store.capabilities.parts:
        return LeaseFile(Path(target.path).with_name(f"{staging_stem(target.name)}.lease"))
    return LeaseObject(target.store, target.parent.join(f"{PREFIX}{target.name}.lease"))


def lease_text(owner: Owner, beat: int) -> bytes:
    """A lease: its owner and the counter; all texts of one owner are of one length."""
    return json.dumps({"schema": _SCHEMA, **owner.to_json(), "beat": f"{beat:012d}"}).encode()


@contextmanager
def _locked_path(path: Path) -> Generator[bool]:
    """Lock the lease file of another owner; if it cannot be opened or locked here, the lock counts as held."""
    for access in (
        os.O_RDWR,
        os.O_RDONLY,
    ):  # NFS grants exclusive locks only for files that are open for writing
        try:
            descriptor = os.open(path, access | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            break  # released by its owner
        except OSError:
            continue  # another user's, a link, or a socket
        try:
            with _lock(descriptor, 0) as locked:
                yield locked
        finally:
            os.close(descriptor)
        return
    yield True


@contextmanager
def _lock(descriptor: int, patience: float) -> Generator[bool]:
    """Whether an exclusive lock was acquired within some seconds; True if the storage does not support locks."""
    deadline, supported = time.monotonic() + patience, True
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                yield False
                return
            time.sleep(0.01)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            supported = False
            break
    try:
        yield True
    finally:
        if supported:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
