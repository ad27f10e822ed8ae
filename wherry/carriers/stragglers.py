"""stragglers: which units take so much longer than the others that a second attempt is worth it. A pure rule."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FEWEST_STARTED = 10
LEAST_DONE = 0.5  # of those that were started
TIMES_MEDIAN = 3.0
LEAST_SECONDS = 1.0  # no unit that takes less is worth a second attempt


def stragglers(running: Mapping[int, float], finished: Iterable[float]) -> list[int]:
    """The units that get a second attempt, the slowest first.

    Args:
        running: number of each unit that is being made → seconds since it was started.
        finished: how many seconds each finished unit took.
    """
    taken = list(finished)
    started = len(taken) + len(running)
    if started < FEWEST_STARTED or len(taken) < LEAST_DONE * started:
        return []
    limit = max(TIMES_MEDIAN * median(taken), LEAST_SECONDS)
    return sorted(
        (unit for unit, seconds in running.items() if seconds > limit), key=lambda unit: -running[unit]
    )
