"""UnitQueue: which units of a job are left, which of them wait, and what went wrong with them."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.carriers.stragglers import stragglers
from wherry.core.progress import logger
from wherry.core.units import plural
from wherry.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ALLOWED_LOSSES = (
    10  # of workers that were making the same unit: spot machines die without a fault of the unit
)
ALLOWED_FAILURES = 5  # of the same unit
AGAIN_SECONDS = 1.0  # before a unit that failed, or that another process makes, is tried again
_log = logger(__name__)


@dataclass(slots=True)
class UnitQueue:
    """The units of a workload, as its coordinator sees them. A unit waits, or is being made, or has a receipt.

    Attributes:
        uri: of the workload.
        names: of its units.
        left: the numbers of units without a receipt.
        waiting: the numbers of units that no worker makes.
        later: number of each unit that is tried again → monotonic time from which on it waits.
        taken: how many seconds each unit took.
        attempts, losses, failures: number of a unit → how often it was given to a worker, its worker was lost, and it
            was not made.
    """

    uri: str
    names: tuple[str, ...]
    left: set[int] = field(default_factory=set[int])
    waiting: deque[int] = field(default_factory=deque[int])
    later: dict[int, float] = field(default_factory=dict[int, float])
    taken: list[float] = field(default_factory=list[float])
    attempts: Counter[int] = field(default_factory=Counter[int])
    losses: Counter[int] = field(default_factory=Counter[int])
    failures: Counter[int] = field(default_factory=Counter[int])

    def fill(self, finished: Iterable[int]) -> None:
        """Begin with every unit but those that are finished."""
        self.left = set(range(len(self.names))).difference(finished)
        self.waiting.extend(sorted(self.left))

    def due(self) -> int:
        """How many units wait now."""
        now = time.monotonic()
        for number in [number for number, moment in self.later.items() if moment <= now]:
            del self.later[number]
            self.waiting.append(number)
        return len(self.waiting)

    def take(self, suits: Callable[[int], bool]) -> int | None:
        """Take the first unit that waits and suits; None if there is none."""
        number = next(filter(suits, self.waiting), None)
        if number is not None:
            self.waiting.remove(number)
        return number

    def name(self, number: int) -> str:
        """The name of a unit."""
        return self.names[number]

    def finish(self, number: int, seconds: float | None) -> bool:
        """Note a receipt; False if the unit has one already."""
        if number not in self.left:
            return False
        self.left.remove(number)
        if seconds is not None:
            self.taken.append(seconds)
        return True

    def try_again(self, number: int, running: Iterable[int | None], *, at_once: bool = False) -> None:
        """Put a unit back, unless it is made by now.

        Args:
            number: of the unit.
            running: the units that workers make.
            at_once: it is the next; by default it waits a little.
        """
        if number not in self.left or number in set(running):
            return
        if at_once:
            self.waiting.appendleft(number)
        else:
            self.later[number] = time.monotonic() + AGAIN_SECONDS

    def lose(self, number: int, worker: str) -> None:
        """Note that a worker was lost which was making a unit.

        Raises:
            StorageError: it was one too many.
        """
        if number not in self.left:
            return
        self.losses[number] += 1
        _log.warning("worker %s was lost while it wrote unit %s", worker, self.name(number))
        if self.losses[number] > ALLOWED_LOSSES:
            raise StorageError(
                f"{plural(self.losses[number], 'worker', 'was/were')} lost while making unit {self.name(number)}",
                uri=self.uri,
                cure="give the workers more memory, or make smaller units: --unit 256MiB",
            )

    def fail(self, number: int, worker: str, error: Mapping[str, Any]) -> None:
        """Note that a unit was not made.

        Args:
            number: of the unit.
            worker: its name.
            error: as the JSON of a WherryError.

        Raises:
            StorageError: no retry can cure it, or it was one failure too many.
        """
        if number not in self.left:
            return
        self.failures[number] += 1
        _log.warning("unit %s was not written by %s: %s", self.name(number), worker, error["what"])
        if not error["retryable"] or self.failures[number] > ALLOWED_FAILURES:
            raise StorageError(
                f"unit {self.name(number)} cannot be made; worker {worker}: {error['what']}",
                uri=error.get("uri") or self.uri,
                cure=error.get("cure"),
                retryable=bool(error["retryable"]),
            )

    def stragglers(self, seconds: Mapping[int, float]) -> list[int]:
        """The units that get a second attempt.

        Args:
            seconds: number of each unit that one worker makes → since when.
        """
        return stragglers({unit: one for unit, one in seconds.items() if unit in self.left}, self.taken)
