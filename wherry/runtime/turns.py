"""Turns: threads that wait for memory get it in the order in which they began to wait.

`Condition.wait_for` alone lets whoever wakes first go on. Of six threads that shared four buffers, two waited for three
seconds, until the pass had ended for the others: their bytes were the first of parts that all the rest waited for.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Generator


class Turns:
    """The order of those who wait for a condition; safe from several threads."""

    def __init__(self, changed: threading.Condition) -> None:
        """Nobody waits yet.

        Args:
            changed: what they wait for; its lock is reentrant.
        """
        self._changed = changed
        self._waiting: deque[object] = deque()

    @contextmanager
    def turn(self) -> Generator[Callable[[], bool]]:
        """A place at the end of the line; yields whether all who came before have gone on."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
        try:
            yield lambda: self._waiting[0] is ticket
        finally:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()
