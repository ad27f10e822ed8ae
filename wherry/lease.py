"""The lease: two runs on one target exclude each other, and a dead one does not block for ever.

`.wherry-<name>.lease` beside the target names its owner; a heartbeat renews it every few seconds. It may be taken
over once it has not been renewed for half a minute, or at once where its owner was a process of this machine and of
this pid namespace that is gone. Taking over moves the old lease away in one step, so of two that try only one
succeeds. Storage that fails for a moment costs its owner one beat, not the lease.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from wherry.errors import TargetInUseError, storage_error

if TYPE_CHECKING:
    from types import TracebackType

EXPIRY_SECONDS = 30.0
DRAFT = ".draft"  # `.wherry-<name>.<8 hex>.draft`: a lease before or after its time; a kill may leave it
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # what a file system without hard links says
_HEARTBEAT_SECONDS = 5.0
_BOOT = "/proc/sys/kernel/random/boot_id"
_PID_NAMESPACE = "/proc/self/ns/pid"
_log = logging.getLogger(__name__)


class Lease:
    """Holds a lease on a target while its `with` block runs.

    Raises on entering:
        TargetInUseError: somebody alive holds it; the error says who and since when.
        StorageError: the storage failed.
    """

    def __init__(self, path: Path, target: str) -> None:
        self._path = path
        self._target = target
        self._id = secrets.token_hex(8)
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="wherry-lease", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._take()
        except OSError as error:
            raise storage_error(error, self._target) from error
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._heart.join()
        try:
            if self._holds():
                self._path.unlink(missing_ok=True)
        except OSError as failure:
            # What came of the work counts; a lease that nobody renews harms nobody for long.
            _log.warning("%s stays, and is void in %.0f s: %s", self._path, EXPIRY_SECONDS, failure)

    def _holds(self) -> bool:
        """Whether the lease that is there is this one: a run that slept for too long may have lost it."""
        try:
            return _owner(self._path).get("id") == self._id
        except FileNotFoundError:
            return False

    def _take(self) -> None:
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_namespace": _pid_namespace(),
            "since": time.time(),
            "id": self._id,
        }
        for _attempt in range(2):
            try:
                self._create(json.dumps(owner).encode())
            except FileExistsError:
                self._evict()
            except FileNotFoundError:
                continue  # who holds it, or held it until now, has tidied the draft away
            else:
                return
        raise self._in_use({})

    def _create(self, text: bytes) -> None:
        """Make the lease appear with its owner in it: a kill in between must not leave one that nobody owns."""
        draft = self._path.with_name(f"{self._path.stem}.{secrets.token_hex(4)}{DRAFT}")
        try:
            draft.write_bytes(text)
            os.link(draft, self._path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
        finally:
            draft.unlink(missing_ok=True)

    def _evict(self) -> None:
        """Move a dead lease away; raise where it is alive."""
        try:
            age = time.time() - self._path.stat().st_mtime
            owner = _owner(self._path)
        except FileNotFoundError:
            return  # released at this moment
        if age < EXPIRY_SECONDS and not _is_dead(owner):
            raise self._in_use(owner)
        grave = self._path.with_name(f"{self._path.stem}.{secrets.token_hex(4)}{DRAFT}")
        try:
            self._path.rename(grave)
        except FileNotFoundError:
            return  # another run was quicker; the exclusive create decides
        if _owner(grave) != owner:  # the dead lease had gone; this one is another run's, made just now
            os.link(grave, self._path)
            owner = _owner(grave)
            grave.unlink(missing_ok=True)
            raise self._in_use(owner)
        grave.unlink(missing_ok=True)  # the new holder tidies up too

    def _in_use(self, owner: dict[str, Any]) -> TargetInUseError:
        who = f"process {owner['pid']} on {owner['host']}" if owner else "another run"
        return TargetInUseError(
            f"{who} is writing this target",
            uri=self._target,
            cure=f"wait for it; a dead run's lease expires after {EXPIRY_SECONDS:.0f} s",
            retryable=True,
        )

    def _beat(self) -> None:
        told = False
        while not self._over.wait(_HEARTBEAT_SECONDS):
            try:
                if not self._holds():
                    return
                os.utime(self._path)
            except FileNotFoundError:
                continue  # gone since it was looked at: the next beat sees what there is now
            except OSError as error:  # storage that comes back in time costs nothing
                if not told:
                    _log.warning(
                        "%s was not renewed, which is tried every %.0f s: %s",
                        self._path,
                        _HEARTBEAT_SECONDS,
                        error,
                    )
                told = True


def is_alive(path: Path) -> bool:
    """Whether somebody who renews it holds the lease at a path."""
    try:
        fresh = time.time() - path.stat().st_mtime < EXPIRY_SECONDS
    except FileNotFoundError:
        return False  # released at this moment
    return fresh and not holder_is_dead(path)


def holder_is_dead(path: Path) -> bool:
    """Whether the lease at a path belonged to a process of this machine that is gone."""
    try:
        return _is_dead(_owner(path))
    except FileNotFoundError:
        return True


def _owner(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError:
        return {}  # being written on a file system without links, or torn: its age alone decides


def _pid_namespace() -> str:
    """Which processes the numbers seen here belong to; empty where nobody can tell.

    Containers with the network of their host bear its name and have process numbers of their own. The boot is stated
    too: the first namespace has the same number on every machine, and two machines may bear one name.
    """
    try:
        return f"{Path(_BOOT).read_text().strip()} {Path(_PID_NAMESPACE).readlink()}"
    except OSError:
        return ""  # not Linux, or hidden from us: the age of a lease alone decides


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner is known to be gone; of one that we could not see, alive or not, only the age tells."""
    here = _pid_namespace()
    if not here or owner.get("pid_namespace") != here or owner.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
