"""Files of which only some are written, or a region of one, as a worker does that makes a part of a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wherry.upload.selection import Selection


class _Files(Protocol):
    """What writes them: FlatFiles or UploadedFiles."""

    def write(self, name: str, offset: int, data: memoryview | bytes | bytearray) -> None: ...

    def read(self, name: str, start: int, stop: int) -> memoryview: ...

    def sync(self) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class SelectedFiles:
    """Files of a folder of which only some are written, as one worker does that makes a part of a target."""

    def __init__(self, files: _Files | None, kept: Iterable[str], chosen: Selection) -> None:
        """Begin.

        Args:
            files: the files that are written; None if there are none.
            kept: their names.
            chosen: the store, which selects them; of one file perhaps only a region.
        """
        self._kept = frozenset(kept)
        self._region, self._guard = chosen.region, chosen.guard
        self._files = files

    def write(self, name: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """Write bytes at an offset of a file; those that are not written here are left out.

        Raises:
            WherryError: the storage failed, or somebody else has written them meanwhile.
        """
        if self._files is None or name not in self._kept:
            return
        if self._region is not None:
            first, last = self._region
            start = max(first - offset, 0)
            data, offset = memoryview(data).cast("B")[start : max(last - offset, start)], offset + start
            if not data:
                return
            self._guard()
        self._files.write(name, offset, data)

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Read bytes [start, stop) of a file that is written here.

        Raises:
            StorageError: the storage failed.
        """
        assert self._files is not None, "no file is written"
        return self._files.read(name, start, stop)

    def keeps(self, name: str) -> bool:
        """Whether a file is written here."""
        return name in self._kept

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
