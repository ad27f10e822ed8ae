"""tally: sums what was counted of the values that one thread computes while a block of code runs.

Whoever makes a move opens a tally around it; what computes values adds to the open one (`wherry.layout.losses`). So the
readers between them need not know of it. Without an open tally nothing is counted.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from wherry.core.account import NO_LOSSES, Losses


@dataclass(slots=True)
class Tally:
    """What was counted so far."""

    losses: Losses = NO_LOSSES


_OPEN: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextmanager
def counting() -> Generator[Tally]:
    """Around the making of one move: the tally of the values that this thread computes meanwhile."""
    tally = Tally()
    token = _OPEN.set(tally)
    try:
        yield tally
    finally:
        _OPEN.reset(token)


def open_tally() -> Tally | None:
    """The tally of the innermost block that runs; None if there is none."""
    return _OPEN.get()
