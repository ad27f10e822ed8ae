"""Tally: the requests of each worker to the double, and when units began and ended; the gate before the first unit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_GATE_SECONDS = 120.0  # a worker that never comes holds up the others no longer


@dataclass(slots=True)
class Tally:
    """Counts of one double.

    Attributes:
        workers: number of workers that the gate waits for: the first claim of each is answered once all have sent one,
            so that the time in which interpreters start on shared cores is apart from the time in which units are made.
    """

    workers: int = 0
    _requests: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    _bytes: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    _arrived: set[str] = field(default_factory=set[str])
    _units: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    _moments: dict[str, float] = field(default_factory=dict[str, float])
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, worker: str, operation: str) -> None:
        """Count a request."""
        with self._changed:
            self._requests.setdefault(worker, Counter())[operation] += 1

    def moved(self, worker: str, *, sent: int = 0, received: int = 0) -> None:
        """Count bytes of bodies, also of those that were cut short."""
        with self._changed:
            self._bytes.setdefault(worker, Counter()).update(sent=sent, received=received)

    def claim(self, worker: str) -> None:
        """A worker asks for a unit: it waits until all have done so."""
        with self._changed:
            self._arrived.add(worker)
            if len(self._arrived) >= self.workers:
                self._moments.setdefault("first_claim", time.time())
                self._changed.notify_all()
            self._changed.wait_for(lambda: "first_claim" in self._moments, _GATE_SECONDS)

    def receipt(self, worker: str, seconds: float) -> None:
        """A worker has made a unit, in so many seconds."""
        with self._changed:
            self._moments["last_receipt"] = time.time()
            self._units.append((worker, seconds))

    def to_json(self) -> dict[str, Any]:
        """Requests and bytes by worker, the moments in seconds since 1970, and worker and seconds of each unit."""
        with self._changed:
            return {
                "requests": {worker: dict(count) for worker, count in self._requests.items()},
                "bytes": {worker: dict(count) for worker, count in self._bytes.items()},
                "moments": dict(self._moments),
                "units": list(self._units),
            }
