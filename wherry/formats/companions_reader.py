"""CompanionsReader: another reader with new companion files, which exist in memory only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.formats.companions import MemoryFiles
from wherry.formats.reader import ReaderOver
from wherry.storage.location import Location

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.reader import Absent, Reader
    from wherry.storage.location import Entry


class CompanionsReader(ReaderOver):
    """Reads tensors through another reader, and new companion files from memory."""

    def __init__(self, reader: Reader, files: Mapping[str, bytes]) -> None:
        """Nothing is read yet.

        Args:
            reader: the reader below; it is closed together with this one.
            files: companion files that differ from those below, by name.
        """
        self._reader, self._files = reader, files

    def inner(self, spec: TensorSpec) -> tuple[Reader, TensorSpec]:
        """The reader below has every tensor under its own spec."""
        return self._reader, spec

    def companion(self, name: str) -> Location:
        """The location of a companion: in memory, or where the reader below has it."""
        if name in self._files:
            return Location(MemoryFiles(files=self._files), name)
        return self._reader.companion(name)

    def members(self) -> Iterable[Entry]:
        """The files of the reader below."""
        return self._reader.members()

    def absent(self) -> Iterable[Absent]:
        """The missing chunks of the reader below."""
        return self._reader.absent()

    def shortfall(self) -> str | None:
        """What the reader below is missing."""
        return self._reader.shortfall()

    def close(self) -> None:
        """Close the reader below."""
        self._reader.close()
