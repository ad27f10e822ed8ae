"""Sender: the threads that send parts, and the memory of all parts that wait to be complete or to be sent.

Whoever writes bytes waits here while too much is held, as long as some part is being sent; writers go on in the order
in which they came. If no part is being sent, waiting would not end: pieces of incomplete parts are put aside
(`relieve`). Writers whose parts come in order never get there. What was put aside comes back beyond the budget, but for
one part at a time.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.runtime import threads
from wherry.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

HELD_BYTES = 56 << 20  # of parts, for one run
# Of blocks of the connections, in both directions, and of what encoders hold in addition to parts.
_BLOCKS_BYTES = 40 << 20
SENDERS = 4


def parts_share(memory: int) -> int:
    """Bytes of a memory budget that parts may hold."""
    return min(HELD_BYTES, memory // 2)


def reading_share(memory: int) -> int:
    """Bytes of a memory budget in which a pass reads and decodes what becomes parts."""
    return memory - parts_share(memory) - min(_BLOCKS_BYTES, memory * 5 // 16)


class Sender:
    """Sends parts in the background; safe from several threads.

    Attributes:
        peak: largest number of bytes that were held at a time.
        relieve: begins to put bytes aside that are held; False if it cannot, and more is held than the budget.
    """

    def __init__(self, most: int | None = None, count: int = SENDERS) -> None:
        """Start no thread yet.

        Args:
            most: bytes that are held at a time; `HELD_BYTES` by default.
            count: number of threads.
        """
        self.peak = 0
        self.relieve: Callable[[], bool] = lambda: False
        self._most = HELD_BYTES if most is None else most
        self._held = 0
        self._sending = 0
        self._loading = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._turns = Turns(self._changed)
        self._pool = threads.executor(count, "wherry-upload", numbers=False)

    def reserve(self, nbytes: int) -> None:
        """Wait until bytes may be held.

        Raises:
            WherryError: sending a part has failed.
        """
        with self._turns.turn() as has_turn:
            while not self._reserve(nbytes, has_turn):
                if not self.relieve() and self._reserve(nbytes, has_turn, beyond=True):
                    return

    @contextmanager
    def loaded(self, nbytes: int) -> Generator[None]:
        """Hold bytes that a part needs to be complete, while the block runs in a thread that sends.

        Beyond the budget only one part has them at a time. It ends without the others, which wait for it.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._loading or self._fits(nbytes))
            self._loading += 1
            self._hold(nbytes)
        try:
            yield
        finally:
            with self._changed:
                self._loading -= 1
                self.release(nbytes)

    def set_aside(self, nbytes: int) -> None:
        """Count memory of a writer's own, which encodes what is sent, as held; up to half of what may be held."""
        self.reserve(min(nbytes, self._most // 2))

    def release(self, nbytes: int) -> None:
        """Give reserved bytes back."""
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()

    def send(self, nbytes: int, act: Callable[[], None]) -> None:
        """Do something in the background, which ends the use of reserved bytes.

        Args:
            nbytes: number of these bytes.
            act: sends them.
        """
        with self._changed:
            self._require_sound()
            self._sending += 1
            self._pool.submit(self._do, nbytes, act)

    def require_sound(self) -> None:
        """Raise the first error of sending, if there was one."""
        with self._changed:
            self._require_sound()

    def drain(self) -> None:
        """Wait until everything is sent.

        Raises:
            WherryError: sending a part has failed.
        """
        with self._changed:
            while self._sending and not self._error:
                self._changed.wait(0.2)  # short, so that a signal reaches the main thread
            self._require_sound()

    def stop(self) -> None:
        """Send nothing more, and wait for what is being sent."""
        with self._changed:
            self._stopped = True
        self._pool.shutdown(wait=True)

    def _reserve(self, nbytes: int, has_turn: Callable[[], bool], *, beyond: bool = False) -> bool:
        """Hold bytes as soon as they fit; False, or beyond the budget, if nothing is sent for which to wait."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or (has_turn() and (not self._sending or self._fits(nbytes)))
            )
            self._require_sound()
            granted = beyond or self._fits(nbytes)
            if granted:
                self._hold(nbytes)
            return granted

    def _hold(self, nbytes: int) -> None:
        self._held += nbytes
        self.peak = max(self.peak, self._held)

    def _fits(self, nbytes: int) -> bool:
        return self._held + nbytes <= self._most

    def _require_sound(self) -> None:
        if self._error is not None:
            raise self._error

    def _do(self, nbytes: int, act: Callable[[], None]) -> None:
        try:
            if not self._stopped and self._error is None:
                act()
        except BaseException as error:  # noqa: BLE001  raised by the next call of a writer
            self._error = self._error or error
        with self._changed:
            self._sending -= 1
            self._held -= nbytes
            self._changed.notify_all()
