"""The lease: two runs on one target exclude each other, and an owner that has ended or hangs does not block forever.

`.wherry-<name>.lease` beside the target names its owner. The owner keeps the file open, and holds the lease as long as
the path still refers to that file; every few seconds it writes a counter through the open file, so that it can never
change the lease of another owner. A lease whose owner has ended or does not renew it (see `lease_watch`) is replaced by
a rename. Takeover and commit exclude each other by `flock` on the lease file; on a file system without `flock`, only
the names of the staging areas keep a former owner from committing (see `wherry.staging.staging`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shlex
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from wherry.core.progress import logger
from wherry.errors import StorageError, TargetInUseError, storage_error
from wherry.staging import lease_watch
from wherry.staging.lease_watch import Judgement, Owner, Verdict, judge, see, this_process
from wherry.storage.folders import DRAFT
from wherry.storage.renames import NO_LINKS

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path
    from types import TracebackType

_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
_HEARTBEAT_SECONDS = 5.0
_LOCK_SECONDS = 5.0  # a takeover holds the lock for a few system calls
_ATTEMPTS = 5
_SCHEMA = 1
_BEAT = b"%012d"
_log = logger(__name__)


class Lease:
    """Holds a lease on a target while its `with` block runs.

    Attributes:
        token: eight hex digits of this owner.
        dead: the token of the former owner, if that was a process of this machine that has ended.

    Raises on entering:
        TargetInUseError: a running process holds it; the error names the process.
        StorageError: the storage failed.
    """

    def __init__(self, path: Path, target: str, judgement: Judgement | None = None) -> None:
        """Choose the lease.

        Args:
            path: the path of the lease.
            target: the target that it protects.
            judgement: the verdict on the present lease, if it was watched already.
        """
        self.token = secrets.token_hex(4)
        self.dead: str | None = None
        self._path = path
        self._target = target
        self._judgement = judgement
        self._descriptor = -1
        self._identity = (0, 0)
        self._text = json.dumps(
            {"schema": _SCHEMA, **this_process(self.token).to_json(), "beat": (_BEAT % 0).decode()}
        ).encode()
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="wherry-lease", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._take()
        except OSError as error:
            raise storage_error(error, self._target) from error
        try:
            self._heart.start()
        except BaseException:  # for example when no thread can be started
            with suppress(OSError):
                self._release()
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._heart.join()
        try:
            released = self._release()
        except OSError as failure:
            released, reason = False, str(failure)
        else:
            reason = "another run is checking it"
        if not released:
            # The result of the work stands. As long as this process runs, others treat the lease as held.
            _log.warning(
                "the lease %s was not released; trying again in the background: %s", self._path, reason
            )
            threading.Thread(target=self._release_later, name="wherry-lease-release", daemon=True).start()

    @property
    def uid(self) -> int:
        """The user that owns files which this process creates, according to the storage."""
        return os.fstat(self._descriptor).st_uid

    def holds(self) -> bool:
        """Whether this lease is still held: a run that was stopped for too long may have lost it.

        Raises:
            OSError: the storage failed.
        """
        try:
            found = self._path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (found.st_dev, found.st_ino) == self._identity

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Prevent other runs from taking the lease over while the block runs.

        Raises:
            TargetInUseError: another run has taken it over.
            OSError: the storage failed.
        """
        with _lock(self._descriptor, _LOCK_SECONDS) as locked:
            if not locked or not self.holds():
                raise self.lost()
            yield

    def lost(self) -> TargetInUseError:
        """The error of an owner whose lease was taken over."""
        return lease_watch.taken_over(self._target, lease_watch.EXPIRY_SECONDS)

    def _take(self) -> None:
        for _attempt in range(_ATTEMPTS):
            draft = self._path.with_name(f"{self._path.stem}.{secrets.token_hex(4)}{DRAFT}")
            self._open(draft)
            try:
                if self._create(draft) or self._replace(draft):
                    return
            except FileNotFoundError:  # the holder removed the draft, or the folder no longer exists
                if not self._path.parent.is_dir():
                    self._close()
                    raise
            except BaseException:
                self._close()
                raise
            finally:
                draft.unlink(missing_ok=True)
            self._close()
        raise self._in_use(None)

    def _open(self, path: Path) -> None:
        """Create the lease file, which is complete before it gets its final name."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        found = os.fstat(self._descriptor)
        self._identity = (found.st_dev, found.st_ino)
        try:
            os.write(self._descriptor, self._text)
            os.fsync(self._descriptor)
        except BaseException:
            self._close()
            path.unlink(missing_ok=True)
            raise

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _create(self, draft: Path) -> bool:
        """Take the lease if it is free; whether it was."""
        try:
            os.link(draft, self._path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return self._created_without_links()
        return True

    def _created_without_links(self) -> bool:
        draft = self._descriptor
        try:
            self._open(self._path)
        except FileExistsError:
            return False
        finally:
            if self._descriptor != draft:
                os.close(draft)
        return True

    def _replace(self, draft: Path) -> bool:
        """Take over a lease whose owner has ended or does not renew it; False if the lease changed meanwhile.

        Raises:
            TargetInUseError: its owner is alive, or another run is taking it over.
        """
        judged, self._judgement = self._judgement or judge([self._path])[self._path], None
        if judged.sighting is None:
            return False
        owner = judged.sighting.owner
        if judged.verdict is Verdict.ALIVE:
            raise self._in_use(owner)
        with _locked_path(self._path) as locked:
            if not locked:
                raise self._in_use(owner)
            if see(self._path) != judged.sighting:
                return False
            try:
                draft.replace(self._path)
            except PermissionError as error:
                raise StorageError(
                    "the expired lease of another user cannot be replaced",
                    uri=str(self._path),
                    cure=f"ask its owner to remove it: rm {shlex.quote(str(self._path))}",
                ) from error
        self.dead = owner.token if owner and judged.verdict is Verdict.DEAD else None
        return True

    def _in_use(self, owner: Owner | None) -> TargetInUseError:
        return lease_watch.held_by(owner, self._target, lease_watch.EXPIRY_SECONDS)

    def _release(self) -> bool:
        """Remove the lease if it is still held; False if another run holds its lock."""
        with _lock(self._descriptor, _LOCK_SECONDS) as locked:
            if not locked:
                return False
            if self.holds():
                self._path.unlink(missing_ok=True)
        self._close()
        return True

    def _release_later(self) -> None:
        while True:
            time.sleep(_HEARTBEAT_SECONDS)
            try:
                if self._release():
                    return
            except OSError as error:
                _log.debug("the lease %s was still not released: %s", self._path, error)

    def _beat(self) -> None:
        place, count, warned = self._text.rindex(_BEAT % 0), 0, False
        while not self._over.wait(_HEARTBEAT_SECONDS):
            count += 1
            try:
                if not self.holds():
                    return
                os.pwrite(self._descriptor, _BEAT % count, place)
                os.fdatasync(self._descriptor)
            except OSError as error:  # harmless if the storage recovers in time
                if not warned:
                    _log.warning(
                        "the lease %s was not renewed; the next attempt is in %.0f s: %s",
                        self._path,
                        _HEARTBEAT_SECONDS,
                        error,
                    )
                warned = True


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
