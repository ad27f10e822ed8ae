"""Claims: which worker has a task. A claim is a record that its owner renews, and that expires when it does not.

Clocks are never compared: a claim expires when it has not changed while another worker watched it for `expiry` seconds;
the owner of a claim on the same machine is looked up in the process table. The next attempt at the task is a new claim,
create-only, so one worker gets it. A worker whose claim has expired may still finish: an attempt has files of its own,
or objects that carry its id, so it changes nothing of a later attempt.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wherry.core.progress import logger
from wherry.errors import WherryError
from wherry.target.lease_watch import Sighting, Verdict, Watch, this_process
from wherry.target.leftovers import CLAIM_SECONDS
from wherry.workers.record import ClaimRecord

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from wherry.workers.record import Task
    from wherry.workers.records import Records


TOKEN_DIGITS = 8  # hex digits of the id of an attempt
_BEATS = 4  # renewals in the time after which a claim expires
_CLAIM = re.compile(r"claim-((?:receipt|proof)-\d+)-(\d+)")
_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's right to a task.

    Attributes:
        key: of the task.
        attempt: number of the attempt, from 0.
        token: id of the attempt; names its files and objects.
        before: ids of earlier attempts.
    """

    key: str
    attempt: int
    token: str
    before: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Name of the record."""
        return f"claim-{self.key}-{self.attempt}"


@dataclass(slots=True)
class Claims:
    """The claims of a job, as one worker sees them.

    Attributes:
        records: of the job.
        expiry: seconds after which a claim that is not renewed expires.
        coordinator: id of the coordinator for which the worker makes units; it knows when an attempt is lost or slow,
            so a claim that was made for it holds off no other worker of it.
    """

    records: Records
    expiry: float = CLAIM_SECONDS
    coordinator: str = ""
    _watches: dict[str, Watch] = field(default_factory=dict[str, Watch])
    _held: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # name of each claim that is not over → token

    def take(self, task: Task, names: Iterable[str]) -> Claim | None:
        """Claim a task; None if another worker has it.

        Args:
            task: one that is not done.
            names: of the records of the job.

        Raises:
            HostileError: a claim was signed with another key.
            StorageError: the storage failed.
        """
        attempts = sorted(attempt for key, attempt in claims_among(names) if key == task.key)
        earlier = [Claim(task.key, attempt, "").name for attempt in attempts]
        rows = [self.records.read(name, ClaimRecord) for name in earlier]
        if earlier and not (self._is_ours(rows[-1]) or self._has_ended(earlier[-1])):
            return None
        before = frozenset(row.token for row in rows if row)
        token = secrets.token_hex(TOKEN_DIGITS // 2)
        claim = Claim(task.key, attempts[-1] + 1 if attempts else 0, token, before)
        self._held[claim.name] = token
        if self.records.create(claim.name, self._record(claim, 0), token):
            return claim
        del self._held[claim.name]
        return None

    @contextmanager
    def renewed(self, claim: Claim) -> Generator[None]:
        """Renew a claim while the block runs; it is removed if the block fails, so that another takes over."""
        over = threading.Event()

        def beat() -> None:
            count = 0
            while not over.wait(self.expiry / _BEATS):
                count += 1
                try:
                    self.records.replace(claim.name, self._record(claim, count), claim.token)
                except WherryError as error:  # harmless if the storage recovers in time
                    _log.warning("%s was not renewed: %s", claim.name, error)

        heart = threading.Thread(target=beat, name="wherry-claim", daemon=True)
        heart.start()
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit):
            self.records.remove(claim.name)
            raise
        finally:
            over.set()
            heart.join()
            self._held.pop(claim.name, None)

    def release(self) -> None:
        """Remove the claims that are not over, as their worker was interrupted before it began or renewed them.

        Raises:
            StorageError: the storage failed.
        """
        for name, token in self._held.items():
            row = self.records.read(name, ClaimRecord)
            if row is not None and row.token == token:
                self.records.remove(name)
        self._held.clear()

    def _has_ended(self, name: str) -> bool:
        """Whether the owner of a claim has ended, or has not renewed it for long enough; looks once."""
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = Watch(name, lambda: self._see(name), self.expiry)
        return watch.look() in (Verdict.DEAD, Verdict.EXPIRED)

    def _is_ours(self, row: ClaimRecord | None) -> bool:
        return bool(self.coordinator) and row is not None and row.coordinator == self.coordinator

    def _record(self, claim: Claim, beat: int) -> ClaimRecord:
        owner = json.dumps(this_process(claim.token).to_json())
        return ClaimRecord(claim.token, claim.token, owner, beat, self.coordinator)

    def _see(self, name: str) -> Sighting | None:
        row = self.records.read(name, ClaimRecord)
        return None if row is None else Sighting(row.beat, row.owner.encode())


def claims_among(names: Iterable[str]) -> list[tuple[str, int]]:
    """Task and attempt of every claim among the names of records."""
    found = (_CLAIM.fullmatch(name) for name in names)
    return [(one[1], int(one[2])) for one in found if one]


def claims_of(task: Task, names: Iterable[str]) -> list[str]:
    """The names of the claims on a task among the names of records."""
    return [Claim(key, attempt, "").name for key, attempt in claims_among(names) if key == task.key]
