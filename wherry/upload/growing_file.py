"""GrowingFile: a file to which bytes are appended, whose size is known when it is complete.

Compressed chunks are packed in such files: the size of one is known when it is compressed. Parts are sent as they
become full, the last one when the file ends. An interrupted run may have sent parts with gaps between them, and the
bytes after the last one are lost; so a later run does not append to such a file. It keeps the parts up to the first
gap, which become the object, and appends to the next file.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from wherry.upload.uploaded_file import SentBefore, UploadedFile

if TYPE_CHECKING:
    from wherry.upload.uploaded_file import UploadContext


class GrowingFile(UploadedFile):
    """One file; safe from several threads.

    Attributes:
        room: bytes that it can have.
        size: the same, until it has ended; then its bytes.
    """

    def __init__(self, path: str, room: int, using: UploadContext) -> None:
        """Begin the object; nothing is sent yet.

        Args:
            path: of the object.
            room: bytes that it can have.
            using: what the files of a run share.
        """
        super().__init__(path, room, using)
        self.room = room
        self._end = 0
        self._ended = False

    def reserve(self, nbytes: int) -> int | None:
        """The offset at which the caller will write so many bytes; None if there is no room for them."""
        with self._lock:
            if self._ended or self._end + nbytes > self.room:
                return None
            self._end += nbytes
            return self._end - nbytes

    def holds(self, start: int, stop: int) -> bool:
        """Whether the store has all bytes up to the end of a range: a later run keeps no byte after a gap."""
        return super().holds(0, stop) if start < stop else True

    def end(self) -> None:
        """Nothing more will be reserved; the object is complete when the bytes that were reserved are written."""
        with self._lock:
            if self._ended:
                return
            self._ended, self.size = True, self._end
            self._count = max(-(-self.size // self._part), 1)
            last = self._count - 1
            part = self._open.get(last)
            if part is not None:
                part.nbytes = self._length(last)
            whole = len(self._parts) == self._count and self.stored is None
            full = self._take_full(last)
        if full is not None:
            self._send(last, full)
        if whole:
            self._using.sender.send(0, self.assemble)

    def complete(self) -> None:
        """End the file, and send what is left."""
        self.end()
        super().complete()


def without_gaps(before: SentBefore) -> tuple[int, SentBefore]:
    """What earlier runs have sent of a growing file up to the first gap: number of bytes, and the object or parts."""
    if before.found is not None:
        return before.found.nbytes, before
    gap = next(number for number in count() if number not in before.parts)
    kept = {number: before.parts[number] for number in range(gap)}
    return sum(part.nbytes for part in kept.values()), SentBefore(before.upload, kept)
