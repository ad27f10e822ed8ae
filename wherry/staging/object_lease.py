"""The lease of a target in a store of objects: an object beside it that names its owner.

It is created on the condition that it does not exist, renewed and removed on the condition that it is in the state that
its owner has written, and replaced by another run only in the state that this run has watched for the lease's lifetime.
So there is one owner at any time, and a former owner finds out with its next request. Owners of this machine that have
ended are found in the process table, as on disk (see `lease_watch`); clocks are never compared.
"""

from __future__ import annotations

import json
import secrets
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from wherry.core.progress import logger
from wherry.errors import NotFoundError, TargetInUseError, WherryError
from wherry.staging.lease_watch import (
    MOST_BYTES,
    Sighting,
    Verdict,
    Watch,
    end_ownership,
    held_by,
    judge_all,
    taken_over,
    this_process,
)

if TYPE_CHECKING:
    from types import TracebackType

    from wherry.objects.uploads import ObjectStore
    from wherry.staging.lease_watch import Owner
    from wherry.storage.location import Location

EXPIRY_SECONDS = 90.0  # a request may take a minute while the storage does not answer
_HEARTBEAT_SECONDS = 15.0
_ATTEMPTS = 5
_SCHEMA = 1
_log = logger(__name__)


class ObjectLease:
    """Holds a lease on a target while its `with` block runs.

    Attributes:
        token: eight hex digits of this owner, the id of the run.

    Raises on entering:
        TargetInUseError: a running process holds it; the error names the process.
        StorageError: the storage failed.
    """

    def __init__(self, store: ObjectStore, place: Location, target: str) -> None:
        """Choose the lease.

        Args:
            store: the store of the target.
            place: the lease.
            target: URI of what it protects.
        """
        self.token = secrets.token_hex(4)
        self._store, self._place, self._target = store, place, target
        self._mark = ""
        self._lost = False
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._heart = threading.Thread(target=self._beat, name="wherry-lease", daemon=True)

    def __enter__(self) -> Self:
        self._take()
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._heart.join()
        end_ownership(self.token)
        try:
            self._store.remove_object(self._place.path, self._mark)
        except WherryError as failure:
            _log.warning("the lease %s was not removed; it expires by itself: %s", self._place.uri, failure)

    def holds(self) -> bool:
        """Whether this lease is still held, according to the store.

        Raises:
            StorageError: the storage failed.
        """
        with self._lock:
            if not self._lost:
                found = self._store.head(self._place.path)
                self._lost = found is None or found.mark != self._mark
            return not self._lost

    def require_held(self) -> None:
        """Check that this run may still write.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        if not self.holds():
            raise self.lost()

    def lost(self) -> TargetInUseError:
        """The error of an owner whose lease was taken over."""
        return taken_over(self._target, EXPIRY_SECONDS)

    def _take(self) -> None:
        for _attempt in range(_ATTEMPTS):
            mark = self._judge()
            with suppress(FileExistsError):  # another run was faster
                self._mark = self._store.put_object(
                    self._place.path, self._text(0), self.token, replaces=mark
                ).mark
                return
        raise self._in_use(None)

    def _judge(self) -> str:
        """The mark of a lease that may be replaced; empty if there is none.

        Raises:
            TargetInUseError: its owner is alive.
        """
        mark = ""

        def look() -> Sighting | None:
            nonlocal mark
            found = self._store.head(self._place.path)
            mark = found.mark if found else ""
            if found is None:
                return None
            text = b""
            with suppress(NotFoundError):  # released meanwhile: the next look sees that
                text = self._place.read(0, MOST_BYTES)
            return Sighting(0, hash(mark), found.nbytes, 0, text)

        judged = judge_all([Watch(self._place.path, look, EXPIRY_SECONDS)])[self._place.path]
        if judged.verdict is Verdict.ALIVE:
            raise self._in_use(judged.sighting.owner if judged.sighting else None)
        return mark

    def _text(self, beat: int) -> bytes:
        return json.dumps({"schema": _SCHEMA, **this_process(self.token).to_json(), "beat": beat}).encode()

    def _in_use(self, owner: Owner | None) -> TargetInUseError:
        return held_by(owner, self._target, EXPIRY_SECONDS)

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(_HEARTBEAT_SECONDS):
            count += 1
            with self._lock:
                if self._lost:
                    return
                try:
                    self._mark = self._store.put_object(
                        self._place.path, self._text(count), self.token, replaces=self._mark
                    ).mark
                except FileExistsError:
                    self._lost = True
                except WherryError as error:  # harmless if the storage recovers in time
                    _log.warning("the lease %s was not renewed: %s", self._place.uri, error)
