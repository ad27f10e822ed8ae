"""parts: the bytes of the parts of objects, from when they are written until they are sent, within a bound of memory.

- `PartPieces`: the bytes of one part, in the pieces in which they came. No buffer of the size of the part is needed, so
  that a part of which only a few bytes are known (the frame of an archive, a header) costs only these.
- `Sender`: the threads that send parts, and the memory of all parts that wait to be complete or to be sent.
- `StoredBytes`: pieces of incomplete parts that wait in the store, because memory may hold no more of them.

Whoever writes bytes waits while too much is held, as long as some part is being sent; writers go on in the order in
which they came. If no part is being sent, waiting would not end: a pass that fills many parts at once, as one through
another system's layout does, would hold an edge of each tensor until its neighbour comes. Then pieces of the fullest
incomplete parts are put as one object among the staging objects (`Sender.relieve`), and each part reads its own when it
is complete: beyond the budget, but one part at a time. Writers whose parts come in order never get there. Such an
object belongs to one run: a later run removes it, and sends its bytes again.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.core import threads
from wherry.core.lazy_dataclass import dataclass
from wherry.core.threads import Turns
from wherry.errors import StorageError
from wherry.store.content import Body, PartBytes

if TYPE_CHECKING:
    from wherry.store.store import Store, StoredObject

OVERFLOW = "overflow-"
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
        """Count the memory in which a writer encodes chunks as held; up to half of the limit."""
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


class StoredBytes:
    """Bytes of several parts that are held until their object is put, and are read from it afterwards.

    Attributes:
        nbytes: number of them.
    """

    def __init__(self, path: str, store: Store, run: str) -> None:
        """No bytes yet.

        Args:
            path: of the object.
            store: the store.
            run: id of the run.
        """
        self.nbytes = 0
        self._path, self._store, self._run = path, store, run
        self._pieces: list[memoryview] | None = []
        self._found: StoredObject | None = None
        self._users = 0
        self._lock = threading.Lock()

    def append(self, pieces: list[memoryview]) -> int:
        """Add the pieces of one part, before the object is put; returns where they begin."""
        assert self._pieces is not None
        start = self.nbytes
        self._pieces += pieces
        self.nbytes += sum(map(len, pieces))
        self._users += 1
        return start

    def put(self) -> None:
        """Put the object, if a part still needs it; from now on the bytes are in the store only.

        Raises:
            StorageError: the storage failed.
        """
        with self._lock:
            if self._users and self._pieces is not None:
                self._found = self._store.put_object(self._path, PartBytes(self._pieces), self._run)
            self._pieces = None

    def bytes_of(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop).

        Raises:
            StorageError: the storage failed.
        """
        pieces = self._pieces
        if pieces is None:
            data = self._store.read(self._path, start, stop)
        else:
            body = Body(pieces)
            body.seek(start)
            data = body.read(stop - start)
        if len(data) != stop - start:
            raise StorageError(
                "an object of this run was altered or removed",
                uri=self._path,
                cure="run the conversion again",
            )
        return memoryview(data)

    def leave(self) -> None:
        """One part no longer needs its bytes; the last one removes the object.

        Raises:
            StorageError: the storage failed.
        """
        with self._lock:
            self._users -= 1
            if not self._users:
                self._remove()

    def drop(self) -> None:
        """Remove the object; no part can be completed any more.

        Raises:
            StorageError: the storage failed.
        """
        with self._lock:
            self._users = 0
            self._remove()

    def _remove(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            self._store.remove_object(self._path, found.mark)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece of a part whose bytes are [start, stop) of stored bytes; it is cut as a memoryview is."""

    whole: StoredBytes
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, cut: slice) -> StoredPiece:
        start, stop, _step = cut.indices(len(self))
        return StoredPiece(self.whole, self.start + start, self.start + stop)


class PartPieces:
    """The pieces of one part; where bytes come twice, the later ones count.

    Attributes:
        nbytes: size of the part.
        held: bytes that are known.
        in_memory: those of them that take memory; others wait in the store.
    """

    __slots__ = ("_objects", "_pieces", "_starts", "held", "in_memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.held = self.in_memory = 0
        self._starts: list[int] = []
        self._pieces: list[memoryview | StoredPiece] = []
        self._objects: set[StoredBytes] = set()

    @property
    def complete(self) -> bool:
        """Whether all bytes are known."""
        return self.held == self.nbytes

    @property
    def views(self) -> list[memoryview]:
        """The pieces, in order; those that wait in the store are read.

        Raises:
            StorageError: the storage failed.
        """
        by_object: dict[StoredBytes, list[StoredPiece]] = {}
        for one in self._pieces:
            if isinstance(one, StoredPiece):
                by_object.setdefault(one.whole, []).append(one)
        found: dict[StoredBytes, tuple[int, memoryview]] = {}
        for whole, pieces in by_object.items():
            start, stop = min(one.start for one in pieces), max(one.stop for one in pieces)
            found[whole] = start, whole.bytes_of(start, stop)

        def load(one: StoredPiece) -> memoryview:
            start, data = found[one.whole]
            return data[one.start - start : one.stop - start]

        return [load(one) if isinstance(one, StoredPiece) else one for one in self._pieces]

    def move_out(self, whole: StoredBytes) -> None:
        """Move the pieces that are in memory into an object that is not put yet."""
        at = whole.append([one for one in self._pieces if not isinstance(one, StoredPiece)])
        for number, one in enumerate(self._pieces):
            if not isinstance(one, StoredPiece):
                self._pieces[number] = StoredPiece(whole, at, at + len(one))
                at += len(one)
        self._objects.add(whole)
        self.in_memory = 0

    def leave(self) -> None:
        """The part is sent: its bytes and its objects are no longer needed.

        Raises:
            StorageError: the storage failed.
        """
        self._starts.clear()
        self._pieces.clear()  # before others hold as much: the task that has sent them may end later
        for whole in self._objects:
            whole.leave()

    def add(self, start: int, piece: memoryview) -> int:
        """Add bytes, which are kept without a copy.

        Args:
            start: offset in the part.
            piece: the bytes.

        Returns:
            Number of bytes in memory that were known already, and are dropped.
        """
        stop, before = start + len(piece), self.in_memory
        low = bisect_right(self._starts, start)
        if low and self._stop(low - 1) > start:
            low -= 1
        high = bisect_left(self._starts, stop)
        rows: list[tuple[int, memoryview | StoredPiece]] = [(start, piece)]
        for at in range(low, high):
            first, known = self._starts[at], self._pieces[at]
            if first < start:
                rows.insert(0, (first, known[: start - first]))
            if self._stop(at) > stop:
                rows.append((stop, known[stop - first :]))
        self._count(self._pieces[low:high], -1)
        self._starts[low:high] = [first for first, _known in rows]
        self._pieces[low:high] = [known for _first, known in rows]
        self._count(self._pieces[low : low + len(rows)], 1)
        return before + len(piece) - self.in_memory

    def fill(self) -> int:
        """Fill the gaps with zeros, as a file system does; returns how many bytes that took."""
        before, end = self.held, 0
        for start, piece in [*zip(self._starts, self._pieces, strict=True), (self.nbytes, memoryview(b""))]:
            if end < start:
                self.add(end, memoryview(bytes(start - end)))
            end = start + len(piece)
        return self.held - before

    def _count(self, pieces: list[memoryview | StoredPiece], sign: int) -> None:
        self.held += sign * sum(map(len, pieces))
        self.in_memory += sign * sum(len(one) for one in pieces if not isinstance(one, StoredPiece))

    def _stop(self, at: int) -> int:
        return self._starts[at] + len(self._pieces[at])
