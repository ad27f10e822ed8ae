"""Slice: what one of several processes writes of a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.core.tensorspec import Span


def _no_guard() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Slice:
    """Some files of a target, or a region of one.

    Attributes:
        files: their names, relative to the target; `.` for a target that is one file.
        region: the bytes of the only file that are written; None if files are written whole.
        guard: called before bytes of a region are written; raises if somebody else has written them. Where a store
            keeps equal parts apart by itself, it does nothing.
    """

    files: frozenset[str]
    region: Span | None = None
    guard: Callable[[], None] = _no_guard

    def within(self, folder: str) -> Slice:
        """The files in a folder of the target, with their names relative to it."""
        prefix = f"{folder}/" if folder else ""
        names = (name.removeprefix(prefix) for name in self.files if name.startswith(prefix))
        return replace(self, files=frozenset(names))


class Files(Protocol):
    """Files that are written at offsets: FlatFiles, or UploadedFiles."""

    def write(self, name: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """Write bytes at an offset of a file."""
        ...

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Read bytes [start, stop) of a file."""
        ...

    def sync(self) -> None:
        """Make every `write` durable that has returned."""
        ...

    def finish(self) -> None:
        """Make the files and their names durable."""
        ...

    def close(self) -> None:
        """Release the resources."""
        ...


class SlicedFiles:
    """The files of a slice; what is written to others, or outside its region, is left out."""

    def __init__(self, files: Files | None, part: Slice) -> None:
        """Begin.

        Args:
            files: those of the slice; None if it has none in this folder.
            part: the slice, with names relative to the folder.
        """
        self._files, self._part = files, part

    def write(self, name: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """Write what the slice has of some bytes.

        Raises:
            WherryError: the storage failed, or somebody else has written them meanwhile.
        """
        if self._files is None or not self.keeps(name):
            return
        if self._part.region is not None:
            first, last = self._part.region
            start = max(first - offset, 0)
            data, offset = memoryview(data).cast("B")[start : max(last - offset, start)], offset + start
            if not data:
                return
            self._part.guard()
        self._files.write(name, offset, data)

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Read bytes [start, stop) of a file of the slice.

        Raises:
            StorageError: the storage failed.
        """
        assert self._files is not None, "no file is written"
        return self._files.read(name, start, stop)

    def keeps(self, name: str) -> bool:
        """Whether the slice has a file."""
        return name in self._part.files

    def holds(self, path: str, start: int, stop: int) -> bool:  # noqa: ARG002  as UploadedFiles
        """Whether bytes that were written need no other record: they do not, as a unit is made whole or again."""
        return True

    def sync(self) -> None:
        """Make every `write` durable that has returned.

        Raises:
            WherryError: the storage failed.
        """
        if self._files is not None:
            self._files.sync()

    def finish(self) -> None:
        """Make the files and their names durable.

        Raises:
            WherryError: the storage failed.
        """
        if self._files is not None:
            self._files.finish()

    def close(self) -> None:
        """Close every descriptor."""
        if self._files is not None:
            self._files.close()
