"""Caps: how many bytes a second each worker reads from the double and sends to it, as by a network card of its own."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

_BURST = 0.05  # seconds that a cap that was idle may make up for


@dataclass(slots=True)
class Cap:
    """The bytes a second of one worker in one direction; 0 for no limit."""

    rate: float
    _free: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int) -> None:
        """Wait until these bytes have passed."""
        if not self.rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now - _BURST) + nbytes / self.rate
            wait = self._free - now
        if wait > 0:
            time.sleep(wait)


@dataclass(slots=True)
class Caps:
    """The caps of all workers; each has two, of the same rate.

    Attributes:
        rate: bytes a second.
        prefix: workers whose access key begins so are limited.
    """

    rate: float
    prefix: str = "worker"
    _caps: dict[tuple[str, str], Cap] = field(default_factory=dict[tuple[str, str], Cap])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, worker: str, direction: str) -> Cap:
        """The cap of a worker in one direction."""
        with self._lock:
            rate = self.rate if worker.startswith(self.prefix) else 0
            return self._caps.setdefault((worker, direction), Cap(rate))
