"""Spill: temporary files of decoded canonical bytes, each created once, by all workers that wait for it together.

A file is created when it is first needed: each waiting worker takes a cell that no other has begun, and decodes it. It
is removed once all of it was read, or when it is dropped, or when space is needed and no worker reads it. Files that
remain after a pass that ends early are removed with the folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from wherry.errors import storage_error
from wherry.runtime.threads import StoppedError
from wherry.storage.direct import writing
from wherry.storage.folders import PREFIX
from wherry.target.janitor import forget, note

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, Span
    from wherry.mover.boxes import StoredBox

    Key: TypeAlias = tuple[KeyPath, int]
    # Takes bytes and their offset.
    Write: TypeAlias = Callable[[memoryview, int], None]

FOLDER_VARIABLE = "WHERRY_SPILL"
_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class SharedWork:
    """Work that several workers share.

    Attributes:
        cells: parts that no worker has begun.
        running: number of parts in progress.
        error: why it failed; None if it did not.
    """

    cells: Iterator[Region]
    running: int = 0
    error: BaseException | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def complete(self, make: Callable[[Region], None], stopped: threading.Event) -> None:
        """Make parts that no other worker makes, and wait for the rest.

        Raises:
            StoppedError: `stopped` was set meanwhile.
            BaseException: the error of a part, in this or another worker.
        """
        while (cell := self._take()) is not None:
            try:
                make(cell)
            except BaseException as error:
                self._finish_task(error)
                raise
            self._finish_task(None)
        with self.changed:
            while self.running and not self.error:
                self.changed.wait(_LOOK_SECONDS)
                if stopped.is_set():
                    raise StoppedError
        if self.error:
            raise self.error

    def _take(self) -> Region | None:
        with self.changed:
            cell = None if self.error else next(self.cells, None)
            self.running += cell is not None
            return cell

    def _finish_task(self, error: BaseException | None) -> None:
        with self.changed:
            self.running -= 1
            self.error = self.error or error
            self.changed.notify_all()


@dataclass(slots=True, kw_only=True)
class SpillFile(SharedWork):
    """One file.

    Attributes:
        path: its path.
        span: canonical bytes of the tensor that it holds.
        left: number of bytes that are not read yet.
        users: number of workers that read it now.
        boxes: the boxes that it stores as they were decoded; None if the bytes are ordered as in the tensor.
    """

    path: Path
    span: Span
    left: int
    users: int = 0
    boxes: tuple[StoredBox, ...] | None = None


class Spill:
    """The files of one source; used from several threads.

    Attributes:
        stopped: ends all writing once it is set.
    """

    def __init__(
        self, folder: Path | None = None, stopped: threading.Event | None = None, most: int | None = None
    ) -> None:
        """Create an empty spill; the folder is created with the first file.

        Args:
            folder: for the files; a temporary folder (below `WHERRY_SPILL`, if that is set) by default.
            stopped: ends all writing.
            most: limit of their total size, beyond which unused files are removed, least recently used first.
        """
        self.stopped = stopped or threading.Event()
        self._folder = folder
        self._made = False
        self._most = most
        self._numbers = count()
        self._files: OrderedDict[Key, SpillFile] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def using(
        self,
        key: Key,
        span: Span,
        cells: Callable[[], Iterator[Region]],
        decode: Callable[[SpillFile, Region], None],
    ) -> Generator[SpillFile]:
        """A complete file, which is kept while the block runs.

        Args:
            key: the tensor, and the offset in it at which the file begins.
            span: canonical bytes of the tensor that it holds.
            cells: the parts of the file.
            decode: writes one part.

        Raises:
            StoppedError: the spill was stopped.
            WherryError: what `decode` raises.
        """
        with self._lock:
            file = self._files.get(key)
            if file is None:
                self._make_room(span.nbytes)
                path = self._place() / str(next(self._numbers))
                file = self._files[key] = SpillFile(cells(), path=path, span=span, left=span.nbytes)
            self._files.move_to_end(key)
            file.users += 1
        try:
            self._complete(key, file, decode)
            yield file
        finally:
            with self._lock:
                file.users -= 1

    @contextmanager
    def writing(self, file: SpillFile) -> Generator[Write]:
        """A function that writes bytes at an offset of a file, until the spill is stopped."""
        with writing(file.path) as write:
            yield self.until_stopped(write)

    def until_stopped(self, write: Write) -> Write:
        """Wrap a write function, so that it raises StoppedError once the spill is stopped."""

        def act(data: memoryview, offset: int) -> None:
            self.check()
            write(data, offset)

        return act

    def check(self) -> None:
        """Raise StoppedError if the spill was stopped."""
        if self.stopped.is_set():
            raise StoppedError

    def read(self, key: Key, nbytes: int) -> None:
        """Count bytes of a file that were read for the last time; a file that was read completely is removed."""
        with self._lock:
            self._files[key].left -= nbytes
            if self._files[key].left == 0:
                self._remove(key)

    def drop(self, keys: Collection[Key]) -> None:
        """Remove files that are not needed any more; their memory pages are reused."""
        with self._lock:
            for key in keys:
                if key in self._files and not self._files[key].users:
                    self._remove(key)

    def close(self) -> None:
        """Remove all files."""
        with self._lock:
            if self._made and self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                forget(self._folder)
            self._made = False
            self._files.clear()

    def _complete(self, key: Key, file: SpillFile, decode: Callable[[SpillFile, Region], None]) -> None:
        try:
            file.complete(lambda cell: decode(file, cell), self.stopped)
        except BaseException:
            with self._lock:  # so that a later request tries again
                if self._files.get(key) is file:
                    del self._files[key]
            raise

    def _make_room(self, nbytes: int) -> None:
        if self._most is None:
            return
        held = nbytes + sum(file.span.nbytes for file in self._files.values())
        for key in [key for key, file in self._files.items() if not file.users]:
            if held <= self._most:
                return
            held -= self._files[key].span.nbytes
            self._remove(key)

    def _remove(self, key: Key) -> None:
        self._files.pop(key).path.unlink(missing_ok=True)

    def _place(self) -> Path:
        if not self._made:
            try:
                self._folder = self._folder or Path(
                    tempfile.mkdtemp(prefix=f"{PREFIX}spill-", dir=os.environ.get(FOLDER_VARIABLE))
                )
                note(self._folder)
                self._folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise storage_error(error, str(self._folder or os.environ.get(FOLDER_VARIABLE))) from error
            self._made = True
        assert self._folder is not None
        return self._folder
