"""UploadedFile: one file of a target that is written at offsets and becomes one object.

Its bytes are cut into parts of equal size; a part is sent as soon as all its bytes are known, and the object is
assembled, create-only, when all parts are there; or later, where that is what makes the target appear. A file that fits
one part is put at once. Bytes of a part that is sent are not sent again, whatever the number of runs: what is written
at an offset is the same in every run. Two kinds of files differ:

- `GrowingFile`: bytes are appended, and its size is known when it is complete. Compressed chunks are packed in such
  files. An interrupted run may have sent parts with gaps between them, and the bytes after the last one are lost; so a
  later run does not append to such a file. It keeps the parts up to the first gap, which become the object
  (`without_gaps`), and appends to the next file.
- A file whose bytes are all known, and may be others in each run: another release of a codec compresses differently, a
  text has a time in it. Parts of two such objects must not become one, so only those are kept that have the checksum
  of the bytes of this run (`agreeing`).
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import field, replace
from itertools import count
from typing import Protocol

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import CorruptError, StorageError, TargetExistsError
from wherry.store.content import CRC32C, PartBytes, agrees, checksum_of, is_same, joined_checksum
from wherry.store.store import Part, PartLimits, Store, StoredObject, Upload
from wherry.target.parts import PartPieces, Sender, StoredBytes

PART_BYTES = 8 << 20
_MIB = 1 << 20
_LARGE = 64 << 10  # bytes of a piece that gets pages of its own


class UploadLog(Protocol):
    """A log that records which parts are sent."""

    def part(self, upload: Upload, part: Part) -> None:
        """A part is in the store."""

    def whole(self, path: str, part: Part) -> None:
        """An object that is put at once is in the store; it counts as one part."""


@dataclass(frozen=True, slots=True)
class SentBefore:
    """What earlier runs have sent of one object.

    Attributes:
        upload: the upload that is continued; None if there is none.
        parts: its parts, by number.
        found: the object itself, if it is complete.
    """

    upload: Upload | None = None
    parts: dict[int, Part] = field(default_factory=dict[int, "Part"])
    found: StoredObject | None = None


@dataclass(frozen=True, slots=True)
class UploadContext:
    """The objects that all uploaded files of a run share.

    Attributes:
        store: the store.
        run: id of the run.
        sender: sends the parts.
        log: learns of each part.
        former: ids of runs that had the target before this one.
        owned: raises if this run has lost the target; it may send a request to the store.
        fresh: the same, called before each act; it seldom sends a request.
    """

    store: Store
    run: str
    sender: Sender
    log: UploadLog
    former: frozenset[str] = frozenset()
    owned: Callable[[], None] = lambda: None
    fresh: Callable[[], None] = lambda: None

    def drop_stale(self, path: str) -> bool:
        """Remove an object where this run creates its own, if a former run put it there after it had lost the target.

        1. A run stops for longer than its lease lasts. 2. This run takes the target over. 3. The other one goes on, and
        its next object appears. The object is looked at before the lease is queried, and removed in the state in
        which it was found.

        Returns:
            Whether it was removed.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        found = self.store.head(path) if self.former else None
        if found is None or found.run not in self.former:
            return False
        self.owned()
        return self.store.remove_object(path, found.mark)

    def uri(self, path: str) -> str:
        """The URI of an object, for errors."""
        return f"{self.store.protocol}://{path}"

    def occupied(self, path: str) -> TargetExistsError:
        """The error for an object that another run created meanwhile."""
        return TargetExistsError(
            "target already exists; it was created during the conversion",
            uri=self.uri(path),
            cure="choose another target",
        )

    def lost(self, path: str) -> StorageError:
        """The error for an upload that the store no longer has, or not as it was sent."""
        return StorageError(
            "the store no longer has the uploaded parts of an object",
            uri=self.uri(path),
            cure="run the conversion again; it sends what is missing",
            retryable=True,
        )


def _copy(piece: memoryview) -> memoryview:
    """Copy a piece into separate memory; large pieces are returned to the system as soon as they are sent.

    malloc keeps the memory of a freed block for reuse: pieces of all sizes from many threads would leave gaps that
    take as much memory as the pieces.
    """
    if len(piece) < _LARGE:
        return memoryview(bytes(piece))
    memory = memoryview(mmap.mmap(-1, len(piece), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[:] = piece
    return memory


def part_size(size: int, limits: PartLimits) -> int:
    """Bytes of the parts of an object: 8 MiB, or more where these would be too many parts, in whole MiB."""
    usual = max(PART_BYTES, limits.smallest)
    return usual if usual * limits.most >= size else -(-size // limits.most // _MIB) * _MIB


class UploadedFile:
    """One file; safe from several threads.

    Attributes:
        path: of the object.
        size: bytes of it.
        stored: the object, once it is complete.
        waits: whether the object is assembled by the caller, not as soon as all parts are sent.
    """

    def __init__(
        self,
        path: str,
        size: int,
        using: UploadContext,
        before: SentBefore | None = None,
        *,
        waits: bool = False,
    ) -> None:
        """Begin or continue the object; nothing is sent yet.

        Args:
            path: of the object.
            size: bytes of it.
            using: what the files of a run share.
            before: what earlier runs have sent.
            waits: see the class.
        """
        self.path, self.size, self.waits = path, size, waits
        self.stored = before.found if before else None
        self._using = using
        self._part = part_size(size, using.store.part_limits)
        self._count = max(-(-size // self._part), 1)
        self._upload = before.upload if before else None
        self._parts: dict[int, Part] = {
            number: part
            for number, part in (before.parts if before else {}).items()
            if number < self._count and part.nbytes == self._length(number)
        }
        self._sent = set(self._parts)
        self._open: dict[int, PartPieces] = {}
        self._lock = threading.Lock()
        self._beginning = threading.Lock()
        if not self.stored and not waits and self.is_sent:
            using.sender.send(0, self.assemble)

    def write(self, offset: int, data: memoryview) -> None:
        """Take bytes at an offset; they are copied.

        Raises:
            WherryError: sending a part has failed.
        """
        data = data[: max(self.size - offset, 0)]
        while data:
            number, inside = divmod(offset, self._part)
            piece = data[: self._part - inside]
            self._put(number, inside, piece)
            offset, data = offset + len(piece), data[len(piece) :]

    def has_bytes(self, start: int, stop: int) -> bool:
        """Whether the store has every part with a byte of [start, stop): only then may a move be recorded.

        What is recorded is never sent again, also by a run that resumes.
        """
        if self.stored is not None or start == stop:
            return True
        return all(number in self._parts for number in range(start // self._part, -(-stop // self._part)))

    def complete(self) -> None:
        """Send the remaining parts; bytes that were never written are zeros."""
        for number in range(self._count):
            with self._lock:
                wanted = self.stored is None and number not in self._sent
                part = self._open.pop(number, None) or PartPieces(self._length(number)) if wanted else None
                self._sent.add(number)
            if part is not None:
                self._using.sender.reserve(part.nbytes - part.held)
                part.fill()
                self._send(number, part)

    @property
    def is_sent(self) -> bool:
        """Whether the store has all bytes, in parts or as the object."""
        return self.stored is not None or len(self._parts) == self._count

    @property
    def proved(self) -> str:
        """The algorithm of the checksums that the store has computed, if they are those of the bytes that were sent.

        Each part was compared when it was sent, by this run or an earlier one. It is empty where one is missing.
        """
        parts = [self._parts[number] for number in sorted(self._parts)]
        algorithms = {part.checksum.partition(":")[0] for part in parts}
        stored_crc = self.stored.checksums.get(CRC32C) if self.stored else None
        same = stored_crc is None or joined_checksum(parts) == f"{CRC32C}:{stored_crc}"
        complete = len(parts) == self._count and len(algorithms) == 1
        return algorithms.pop() if complete and same else ""

    def open_parts(self) -> list[tuple[int, int]]:
        """Bytes in memory and number of each part that is not complete."""
        with self._lock:
            return [(part.in_memory, number) for number, part in self._open.items()]

    def move_out(self, number: int, whole: StoredBytes) -> None:
        """Let an object have the bytes of a part that are in memory, if the part is still incomplete."""
        with self._lock:
            part = self._open.get(number)
            if part is not None and part.in_memory:
                part.move_out(whole)

    def assemble(self) -> None:
        """Make the object of its parts, which are all sent.

        Raises:
            TargetExistsError: an object exists at the path.
            StorageError: the storage failed, or no longer has the parts.
        """
        using, upload = self._using, self._begin_upload()
        parts = [self._parts[number] for number in sorted(self._parts)]
        using.fresh()
        try:
            self.stored = using.store.assemble(upload, parts)
        except FileExistsError as error:
            if self.waits or not using.drop_stale(self.path):
                raise using.occupied(self.path) from error
            self.assemble()
        except FileNotFoundError as error:
            raise using.lost(self.path) from error

    def abort(self) -> None:
        """Remove the upload, if there is one."""
        if self._upload is not None:
            self._using.store.abort(self._upload)

    def _length(self, number: int) -> int:
        return min(self.size - number * self._part, self._part)

    def _put(self, number: int, inside: int, piece: memoryview) -> None:
        if self.stored is not None or number in self._sent:
            return
        self._using.sender.reserve(len(piece))
        with self._lock:
            full = None  # one thread alone finds the part complete
            if number in self._sent:
                freed = len(piece)
            else:
                part = self._open.setdefault(number, PartPieces(self._length(number)))
                freed = part.add(inside, _copy(piece))
                full = self._take_full(number)
        if freed:
            self._using.sender.release(freed)
        if full is not None:
            self._send(number, full)

    def _take_full(self, number: int) -> PartPieces | None:
        """A part that is complete, which the caller sends; None if it is not. The caller has the lock."""
        part = self._open.get(number)
        if part is None or not part.complete:
            return None
        self._sent.add(number)
        return self._open.pop(number)

    def _send(self, number: int, part: PartPieces) -> None:
        act = self._put_part if self._count > 1 or self.waits else self._put_whole
        self._using.sender.send(part.in_memory, lambda: self._load_part(number, part, act))

    def _load_part(self, number: int, part: PartPieces, act: Callable[[int, PartBytes], None]) -> None:
        """Act on all bytes of a part, of which some may wait in the store."""
        missing = part.nbytes - part.in_memory
        with self._using.sender.loaded(missing) if missing else nullcontext():
            act(number, PartBytes(part.views))
        part.leave()

    def _put_whole(self, number: int, views: PartBytes) -> None:
        using = self._using
        using.fresh()
        try:
            found = using.store.put_object(self.path, views, using.run)
            self.stored = found  # before its part: `GrowingFile.end` assembles what is not stored
            checksums = (f"{name}:{digest}" for name, digest in found.checksums.items())
            if checksum := next((one for one in checksums if agrees(one, views)), ""):
                self._parts[number] = Part(number, self.size, found.mark, checksum)
                using.log.whole(self.path, self._parts[number])
        except FileExistsError as error:
            if not using.drop_stale(self.path):
                raise using.occupied(self.path) from error
            self._put_whole(number, views)

    def _put_part(self, number: int, views: PartBytes) -> None:
        self._using.fresh()
        upload = self._begin_upload()
        try:
            sent = self._using.store.put_part(upload, number, views)
        except FileNotFoundError as error:
            raise self._using.lost(self.path) from error
        if sent.nbytes != self._length(number) or not agrees(sent.checksum, views):
            raise CorruptError(
                f"the store has other bytes of part {number} than were sent",
                uri=self._using.uri(self.path),
                cure="run the conversion again",
            )
        self._using.log.part(upload, sent)
        with self._lock:
            self._parts[number] = sent
            whole = len(self._parts) == self._count
        if whole and not self.waits:
            self.assemble()

    def _begin_upload(self) -> Upload:
        with self._beginning:
            if self._upload is None:
                self._upload = self._using.store.begin(self.path, self._using.run)
            return self._upload


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
        """Reserve bytes: the offset at which the caller will write them; None if there is no room."""
        with self._lock:
            if self._ended or self._end + nbytes > self.room:
                return None
            self._end += nbytes
            return self._end - nbytes

    def has_bytes(self, start: int, stop: int) -> bool:
        """Whether the store has all bytes up to the end of a range: a later run keeps no byte after a gap."""
        return super().has_bytes(0, stop) if start < stop else True

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


def agreeing(before: SentBefore, data: Sequence[memoryview], part: int) -> SentBefore:
    """What earlier runs have sent of an object whose bytes are all known, by the checksums that the store has computed.

    Args:
        before: what they have sent to the path.
        data: the bytes of the object, in pieces.
        part: size of its parts.
    """
    if before.found is not None:
        same = before.found.checksums and is_same(
            before.found, before.found.run, sum(map(len, data)), checksum_of(data)
        )
        return before if same else SentBefore()  # the parts of which it was made are gone
    total = sum(map(len, data))
    checksums = [checksum_of(_range(data, start, start + part)) for start in range(0, total, part)]
    parts = {
        number: sent
        for number, sent in before.parts.items()
        if number < len(checksums) and sent.checksum == checksums[number]
    }
    return replace(before, parts=parts)


def _range(data: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """The bytes [start, stop) of the pieces."""
    at = 0
    for piece in data:
        if inside := piece[max(start - at, 0) : max(stop - at, 0)]:
            yield inside
        at += len(piece)
