"""CompanionsReader: other contents with new companion files, which exist in memory only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.formats.companions import MemoryFiles
from wherry.formats.contents import ContentsOver
from wherry.storage.location import Location

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.formats.contents import Contents


class CompanionsReader(ContentsOver):
    """Reads tensors through another reader, and new companion files from memory."""

    def __init__(self, reader: Contents, files: Mapping[str, bytes]) -> None:
        """Nothing is read yet.

        Args:
            reader: the reader below; it is closed together with this one.
            files: companion files that differ from those below, by name.
        """
        self.base, self._files = reader, files

    def companion(self, name: str) -> Location:
        """The location of a companion: in memory, or where the reader below has it."""
        if name in self._files:
            return Location(MemoryFiles(files=self._files), name)
        return super().companion(name)
