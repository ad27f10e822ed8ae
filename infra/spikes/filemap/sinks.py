"""Where the bytes of files go: a folder, or the parts of uploads. A sink knows offsets, never formats.

The engine asks for nothing else: `write` bytes at an offset as they are stored, `end` a file whose size is known now,
`sync`, whether stored bytes are `durable`, `read` them, `complete` all files, `commit` the target. A sink for the Hub
has whole files, as `PartsSink` with parts as large as files would.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from infra.spikes.filemap.nouns import Part
from wherry.storage.direct import readinto

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from wherry.storage.location import Location
    from wherry.store.store import Store, Upload


class Sink(Protocol):
    """Takes the bytes of one target's files."""

    @property
    def uploads(self) -> Mapping[int, Upload]:
        """File → the upload that it is, where storage has uploads."""
        ...

    def resume(self, parts: Sequence[Part], uploads: Mapping[int, Upload]) -> None:
        """Take up what logs say that storage has."""
        ...

    def drop_waiting(self) -> None:
        """Forget what storage has not taken: the next sweep brings all of it again."""
        ...

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Take bytes of a file as they are stored; again is harmless."""
        ...

    def end(self, file: int, size: int) -> None:
        """A file has so many bytes; nothing comes after them."""
        ...

    def sync(self) -> list[Part]:
        """Make durable what can be; the parts that storage has confirmed since the last call."""
        ...

    def durable(self, file: int, start: int, stop: int) -> bool:
        """Whether bytes that were written before the last `sync` are durable."""
        ...

    def read(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with stored bytes of a file that is complete, from storage and no cache."""
        ...

    def complete(self, sizes: Sequence[int]) -> None:
        """Complete every file; the commit members stay where nobody sees them."""
        ...

    def commit(self) -> None:
        """Make the target appear, in one step that overwrites nothing."""
        ...


@dataclass(slots=True)
class DiskSink:
    """Files in a folder beside the target, which is renamed at the end.

    Attributes:
        folder: of the job.
        target: what will appear.
        names: of the files.
    """

    folder: Path
    target: Path
    names: Sequence[str]
    uploads: Mapping[int, Upload] = field(default_factory=dict[int, "Upload"])
    _open: dict[int, int] = field(default_factory=dict[int, int])
    _dirty: set[int] = field(default_factory=set[int])

    def resume(self, parts: Sequence[Part], uploads: Mapping[int, Upload]) -> None:
        """See Sink; what is there is there."""

    def drop_waiting(self) -> None:
        """See Sink; nothing waits."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """See Sink."""
        descriptor = self._descriptor(file)
        while data:
            done = os.pwrite(descriptor, data, offset)
            data, offset = data[done:], offset + done
        self._dirty.add(file)

    def end(self, file: int, size: int) -> None:
        """See Sink."""
        os.ftruncate(self._descriptor(file), size)
        self._dirty.add(file)

    def sync(self) -> list[Part]:
        """See Sink. What was written leaves the page cache, so that it is storage that is read back."""
        for file in self._dirty:
            os.fdatasync(self._open[file])
            os.posix_fadvise(self._open[file], 0, 0, os.POSIX_FADV_DONTNEED)
        self._dirty.clear()
        return []

    def durable(self, file: int, start: int, stop: int) -> bool:  # noqa: ARG002  all is, after a sync
        """See Sink."""
        return file not in self._dirty

    def read(self, file: int, offset: int, buffer: memoryview) -> None:
        """See Sink."""
        readinto(str(self._path(file)), offset, buffer)

    def complete(self, sizes: Sequence[int]) -> None:
        """See Sink."""
        for file, size in enumerate(sizes):
            self.end(file, size)
        self.sync()
        homes = {self._path(file).parent for file in range(len(sizes))}
        for home in sorted({self.folder, *homes}, reverse=True):
            descriptor = os.open(home, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def commit(self) -> None:
        """See Sink: `renameat2` with RENAME_NOREPLACE."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        staged = self._path(0) if self.names == ["."] else self.folder / "staged"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(-100, os.fsencode(staged), -100, os.fsencode(self.target), 1):
            raise OSError(ctypes.get_errno(), "the target exists", str(self.target))

    def _path(self, file: int) -> Path:
        return self.folder / "staged" / ("file" if self.names[file] == "." else self.names[file])

    def _descriptor(self, file: int) -> int:
        if file not in self._open:
            path = self._path(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open[file] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        return self._open[file]


@dataclass(slots=True)
class PartsSink:
    """Objects that are sent in parts, each when every byte of it has come.

    A part that waits for a Late is kept while there is room; then it is dropped, and its pieces are not done: they are
    computed again in the next sweep, when the Late's facts are known.

    Attributes:
        store: of the objects.
        target: the target's location.
        staging: where commit members are until the commit.
        names: of the files.
        members: names of commit members.
        sizes: of files whose size is known.
        step: bytes of a part.
        run: id of the job, which every object carries.
        room: bytes of parts that wait.
    """

    store: Store
    target: Location
    staging: Location
    names: Sequence[str]
    members: Sequence[str]
    sizes: dict[int, int]
    step: int
    run: str
    room: int = 32 << 20
    sent: dict[int, dict[int, Part]] = field(default_factory=dict[int, "dict[int, Part]"])
    uploads: dict[int, Upload] = field(default_factory=dict[int, "Upload"])
    again: int = 0  # bytes that were dropped
    _waiting: dict[tuple[int, int], _Waiting] = field(default_factory=dict[tuple[int, int], "_Waiting"])
    _fresh: list[Part] = field(default_factory=list[Part])

    def resume(self, parts: Sequence[Part], uploads: Mapping[int, Upload]) -> None:
        """See Sink."""
        for part in parts:
            self.sent.setdefault(part.file, {})[part.number] = part
        self.uploads |= uploads

    def drop_waiting(self) -> None:
        """See Sink."""
        self.again += sum(part.filled for part in self._waiting.values())
        self._waiting.clear()

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """See Sink; bytes of parts that are sent are left out."""
        while data:
            number, at = divmod(offset, self.step)
            piece = data[: self.step - at]
            if number not in self.sent.get(file, {}):
                waiting = self._waiting.setdefault((file, number), _Waiting())
                waiting.put(at, piece)
                self._send_if_full(file, number)
            data, offset = data[len(piece) :], offset + len(piece)
        self._make_room(file, offset // self.step)

    def end(self, file: int, size: int) -> None:
        """See Sink: the last part is complete."""
        self.sizes[file] = size
        if size % self.step:
            self._send_if_full(file, size // self.step)

    def sync(self) -> list[Part]:
        """See Sink; what was sent is durable."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def durable(self, file: int, start: int, stop: int) -> bool:
        """See Sink."""
        sent = self.sent.get(file, {})
        return all(number in sent for number in range(start // self.step, -(-stop // self.step)))

    def read(self, file: int, offset: int, buffer: memoryview) -> None:
        """See Sink."""
        buffer[:] = self._place(file).read(offset, offset + len(buffer))

    def complete(self, sizes: Sequence[int]) -> None:
        """See Sink."""
        from wherry.store import store as uploads

        for file, size in enumerate(sizes):
            parts = self.sent.get(file, {})
            if file not in self.uploads:
                if not size:
                    self.store.put_object(self._place(file).path, b"", self.run)
                continue
            found = [
                uploads.Part(part.number, part.nbytes, part.mark, part.checksum)
                for part in (parts[number] for number in range(-(-size // self.step)))
            ]
            self.store.assemble(self.uploads[file], found)

    def commit(self) -> None:
        """See Sink: commit members are copied, each created only where nothing is."""
        for name in self.members:
            file = list(self.names).index(name)
            staged = self._place(file).path
            found = self.store.head(staged)
            assert found is not None, "it is complete"
            final = self.target if name == "." else self.target.join(name)
            self.store.copy_object(staged, found.mark, final.path, self.run)
            self.store.remove_object(staged, found.mark)

    def begin(self, file: int) -> Upload:
        """The upload of a file; begun before workers start where they share it."""
        if file not in self.uploads:
            self.uploads[file] = self.store.begin(self._place(file).path, self.run)
        return self.uploads[file]

    def _place(self, file: int) -> Location:
        name = self.names[file]
        if name in self.members:
            return self.staging.join("file" if name == "." else name)
        return self.target.join(name)

    def _send_if_full(self, file: int, number: int) -> None:
        size = self.sizes.get(file)
        nbytes = self.step if size is None else min(self.step, size - number * self.step)
        waiting = self._waiting.get((file, number))
        if waiting is None or waiting.filled != nbytes:
            return
        del self._waiting[file, number]
        data = memoryview(waiting.data)[:nbytes]
        if size is not None and size <= self.step:
            found = self.store.put_object(self._place(file).path, [data], self.run)
            part = Part(file, number, nbytes, found.mark)
        else:
            sent = self.store.put_part(self.begin(file), number, [data])
            part = Part(file, number, nbytes, sent.mark, sent.checksum)
        self.sent.setdefault(file, {})[number] = part
        self._fresh.append(part)

    def _make_room(self, file: int, number: int) -> None:
        """Drop the parts that have waited longest, but not the one that is being filled."""
        waiting = [key for key in self._waiting if key != (file, number)]
        held = sum(len(self._waiting[key].data) for key in waiting)
        for key in waiting:
            if held <= self.room:
                return
            held -= len(self._waiting[key].data)
            self.again += self._waiting.pop(key).filled


@dataclass(slots=True)
class _Waiting:
    """Bytes of a part that is not complete."""

    data: bytearray = field(default_factory=bytearray)
    filled: int = 0

    def put(self, at: int, data: memoryview) -> None:
        """Take bytes; each comes once, as the engine takes care of."""
        if len(self.data) < at + len(data):
            self.data.extend(bytes(at + len(data) - len(self.data)))
        self.data[at : at + len(data)] = data
        self.filled += len(data)
