"""The files of a target, written at offsets from several threads and made durable in groups.

`OpenFiles` is the one interface. What is behind it depends on the place, and on who else writes there:

- `FlatFiles`, on a disk: every file is created and its space allocated before the first byte, so that a full disk fails
  early. Whole blocks are written with direct I/O, where the file system supports it and the memory is aligned like the
  file (`place` of a writer names the offset); parts of blocks are collected in `Blocks`. Everything else goes through
  the page cache, and `sync` drops those pages, so that a later read comes from storage. The number of open files is
  bounded (see `Descriptors`), whatever the number of shards. Once a sync has failed, every later `sync` fails too: the
  kernel drops the failed pages, and a second fsync would report success for lost data.
- `SharedFiles`, on a disk: files of which other processes write other regions.
- `UploadedFiles`, in the staged objects of a run: they are sent in parts.
- `SlicedFiles`: those of a `Slice`, of any of these kinds.

`Blocks` collects small writes in memory until whole blocks of a file can be written. Direct I/O writes whole blocks
only. Where a tensor begins or ends within a block, its first and last bytes are held here together with the
neighbouring bytes; so are small tensors. Adjacent blocks are written together. A block is read from its file when a
part of it is first written, so that the bytes of an earlier run are kept.

Two files whose names a file system does not tell apart because it folds case would become one: the second replaces the
first without an error, and nothing is wrong but their bytes. So they are refused before the first of them is written.
Whether a file system folds case is not looked up by its kind, because some fold it only in some folders: the staging
area is looked for by its name in the other case. A file system that folds case also takes composed and decomposed
characters for the same (APFS, and ext4 and F2FS with `casefold`).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Span
from wherry.cures import Argument, Command, Cure
from wherry.errors import StorageError, UnsupportedError, storage_error, storage_errors
from wherry.store.folders import sync_folder
from wherry.store.local_store import make_folder, sync_folders
from wherry.store.open_file import BLOCK, DIRECT, NO_DIRECT, Descriptors, cut, is_aligned, open_regular
from wherry.target.file_map import File, content_of
from wherry.target.staged_objects import run_of

if TYPE_CHECKING:
    from wherry.store.location import Location


# Name of a file, offset of a block, memory of one block or several; raises OSError.
Transfer = Callable[[str, int, memoryview], None]

_MOST = 256  # blocks that are held in memory


@dataclass(slots=True)
class Blocks:
    """The blocks that wait to be written; thread-safe.

    Attributes:
        read: fills a block from its file; bytes beyond the end of the file are left unchanged.
        write: writes adjacent blocks.
    """

    read: Transfer
    write: Transfer
    _memory: mmap.mmap | None = None  # of the blocks, and then of a run of adjacent ones
    _held: dict[tuple[str, int], memoryview] = field(default_factory=dict["tuple[str, int]", memoryview])
    _dirty: set[tuple[str, int]] = field(default_factory=set["tuple[str, int]"])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, name: str, offset: int, data: memoryview) -> None:
        """Add bytes of a file.

        Raises:
            OSError: the storage failed.
        """
        with self._lock:
            while data:
                start = offset // BLOCK * BLOCK
                part = data[: start + BLOCK - offset]
                block = self._block(name, start, whole=len(part) == BLOCK)
                block[offset - start : offset - start + len(part)] = part
                self._dirty.add((name, start))
                data, offset = data[len(part) :], offset + len(part)

    def forget(self, name: str, start: int, stop: int) -> None:
        """Write and drop the blocks of a range, because the range is about to be written directly.

        Raises:
            OSError: the storage failed.
        """
        with self._lock:
            if any(key[0] == name and start <= key[1] < stop for key in self._held):
                self._clear()

    def flush(self) -> None:
        """Write every block that changed.

        Raises:
            OSError: the storage failed.
        """
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Drop the blocks with their memory, which would stay until garbage is collected; nothing is written."""
        with self._lock:
            self._held.clear()
            self._dirty.clear()
            self._memory = None

    def _view(self) -> memoryview:
        if self._memory is None:
            self._memory = mmap.mmap(-1, 2 * _MOST * BLOCK)
        return memoryview(self._memory)

    def _clear(self) -> None:
        self._flush()
        self._held.clear()

    def _flush(self) -> None:
        waiting = sorted(self._dirty)
        while waiting:
            name, start = waiting[0]
            count = 1
            while count < len(waiting) and waiting[count] == (name, start + count * BLOCK):
                count += 1
            run = self._view()[_MOST * BLOCK :][: count * BLOCK]
            for number, key in enumerate(waiting[:count]):
                run[number * BLOCK : (number + 1) * BLOCK] = self._held[key]
            self.write(name, start, run)
            waiting = waiting[count:]
        self._dirty.clear()

    def _block(self, name: str, start: int, *, whole: bool) -> memoryview:
        block = self._held.get((name, start))
        if block is None:
            if len(self._held) == _MOST:
                self._clear()
            place = len(self._held) * BLOCK
            block = self._view()[place : place + BLOCK]
            if not whole:
                block[:] = bytes(BLOCK)
                self.read(name, start, block)
            self._held[name, start] = block
        return block


def require_separate_names(folder: Location, names: Iterable[str]) -> None:
    """Refuse files of a target that are the same file where the file system folds case.

    Args:
        folder: where they will be, in a staging area; it need not exist yet.
        names: relative to it, with `/` between parts. A folder is as different as a file: `A/x` and `a/y` are refused.

    Raises:
        UnsupportedError: two names differ only by case.
        StorageError: the storage failed.
    """
    if not folder.store.capabilities.local:
        return
    with storage_errors(folder.uri):
        if not _folds_case(Path(folder.path)):
            return
    first: dict[str, str] = {}  # folded name → the name
    for name in names:
        end = 0
        while end != len(name):
            end = name.find("/", end + 1)
            end = len(name) if end < 0 else end
            # The same text for all names that such a file system takes for one.
            folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", name[:end]).casefold())
            known = first.setdefault(folded, name[:end])
            if known != name[:end]:
                raise UnsupportedError(
                    f"the file system does not tell {known} and {name[:end]} apart: their names differ only by case",
                    uri=folder.uri,
                    cure=Cure(
                        "rename a tensor with {}, or choose a target on a file system that is case-sensitive",
                        Argument("rename"),
                    ),
                )


def _folds_case(folder: Path) -> bool:
    """Whether the file system finds names in the other case, around a folder."""
    for path in (folder, *folder.parents):
        swapped = path.name.swapcase()
        if swapped != path.name and path.exists():
            found = path.with_name(swapped)
            return found.exists() and found.samefile(path)
    return False


# Concurrent large writes. Two keep a device busy; with more, all would end, and then hash, at the same time.
_AT_ONCE = 2
_STEP = 64 << 20  # bytes by which files grow
_FULL = (errno.ENOSPC, errno.EDQUOT)
SMALL = 64 << 10  # smaller writes are collected in `Blocks`


@dataclass(frozen=True, slots=True)
class Slice:
    """What one of several processes writes of a target: some of its files, or a region of one.

    Attributes:
        files: their names, relative to the target; `.` for a target that is one file.
        region: the bytes of the only file that are written; None if files are written whole.
        guard: called before bytes of a region are written; raises if somebody else has written them. Where a store
            keeps equal parts apart by itself, it does nothing.
    """

    files: frozenset[str]
    region: Span | None = None
    guard: Callable[[], None] = lambda: None

    def within(self, folder: str) -> Slice:
        """The files in a folder of the target, with their names relative to it."""
        prefix = f"{folder}/" if folder else ""
        names = (name.removeprefix(prefix) for name in self.files if name.startswith(prefix))
        return replace(self, files=frozenset(names))


class OpenFiles(ABC):
    """Files in one folder of a target, of known sizes; safe from several threads."""

    @abstractmethod
    def write(self, name: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """Write bytes at an offset of a file.

        Raises:
            WherryError: the storage failed, also while other bytes were sent; or somebody else has written them.
        """

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Read bytes [start, stop) of a file, which were written; of an object, when it is complete.

        Raises:
            StorageError: the storage failed, now or in an earlier call.
        """

    def has_bytes(self, path: str, start: int, stop: int) -> bool:  # noqa: ARG002  see UploadedFiles
        """Whether bytes of the file at a path, which were written, are durable after a `sync`."""
        return True

    @abstractmethod
    def sync(self) -> None:
        """Make every `write` durable that has returned; what an object waits for is durable when it was sent.

        Raises:
            WherryError: the storage failed, now or in an earlier call.
        """

    @abstractmethod
    def finish(self) -> None:
        """Make the files and their names durable.

        Raises:
            WherryError: the storage failed, now or in an earlier call.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what is open."""


class FlatFiles(OpenFiles):
    """A set of preallocated files in one local folder."""

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Create the files.

        Args:
            folder: an existing folder.
            sizes: name → bytes.

        Raises:
            StorageError: the storage is full or failed.
        """
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._room: dict[str, int] = {}  # of files that grow: bytes that are allocated
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._turn = threading.Semaphore(_AT_ONCE)
        self._open = Descriptors(self._open_file)
        self._direct = bool(DIRECT)
        self._blocks = Blocks(self._read_block, self._write_run)
        self._dirty: set[str] = set()
        self._failed: StorageError | None = None
        try:
            for name, size in sizes.items():
                self.add(name, size)
            above = set(folder.parents)
            homes = {home for name in sizes for home in (folder / name).parents} - above
            for home in sorted(homes, reverse=True):
                self._check(lambda home=home: sync_folder(home))
        except BaseException:
            self.close()
            raise

    def add(self, name: str, size: int) -> None:
        """Create one more file; a longer existing file is truncated.

        Raises:
            StorageError: the storage is full or failed.
        """
        self._sizes[name] = size
        self._guard(name, lambda fd: _allocate(fd, size))

    def grow(self, name: str, size: int) -> None:
        """Allow writes up to a size. Space is allocated in large steps; `finish` frees what is unused.

        Raises:
            StorageError: the storage is full or failed.
        """
        self._sizes[name] = size
        if size > self._room.get(name, 0):
            self._guard(name, lambda fd: self._enlarge(fd, name, size))

    def write(self, name: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """See OpenFiles."""
        view = memoryview(data).cast("B")
        try:
            if offset + len(view) <= self._sizes[name]:
                self._write_blocks(name, offset, view)
            else:
                self._write(name, offset, view)
        except OSError as error:
            raise storage_error(error, str(self._folder / name)) from error
        with self._lock:
            self._dirty.add(name)

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """See OpenFiles."""
        self.sync()
        try:
            with os.fdopen(open_regular(str(self._folder / name)), "rb", buffering=0) as opened:
                opened.seek(start)
                return memoryview(opened.read(stop - start))
        except OSError as error:
            raise storage_error(error, str(self._folder / name)) from error

    def sync(self) -> None:
        """See OpenFiles."""
        with self._syncing:  # a second caller returns when the writes of the first are durable
            with self._lock:
                dirty, self._dirty = self._dirty, set()
            self._check(self._blocks.flush)
            self._check(lambda: [self._guard(name, _settle) for name in sorted(dirty)])

    def finish(self) -> None:
        """See OpenFiles."""
        self.sync()
        for name in self._room:
            self._guard(name, lambda fd, name=name: os.ftruncate(fd, self._sizes[name]))
        self._check(lambda: [self._guard(name, os.fsync) for name in self._sizes])
        self._check(lambda: sync_folder(self._folder))

    def close(self) -> None:
        """See OpenFiles; what was not synced may be lost."""
        self._open.close()
        self._blocks.close()

    def _check(self, act: Callable[[], object]) -> None:
        if self._failed is not None:
            raise self._failed
        try:
            act()
        except OSError as error:
            self._failed = storage_error(error, str(self._folder))
            raise self._failed from error

    def _guard(self, name: str, act: Callable[[int], None]) -> None:
        try:
            with self._open.using((name, False)) as descriptor:
                act(descriptor)
        except OSError as error:
            raise storage_error(error, str(self._folder / name)) from error

    def _enlarge(self, descriptor: int, name: str, size: int) -> None:
        """Allocate one step more than requested, or exactly the requested size where space is short."""
        self._room[name] = size + _STEP
        try:
            os.posix_fallocate(descriptor, 0, size + _STEP)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._room[name] = size
            os.posix_fallocate(descriptor, 0, size)

    def _write_blocks(self, name: str, offset: int, view: memoryview) -> None:
        if len(view) < SMALL:
            self._write_small(name, offset, view)
            return
        parts = cut(offset, len(view))
        body = view[parts.body - offset : parts.tail - offset]
        self._write_small(name, offset, view[: parts.body - offset])
        self._blocks.forget(name, parts.body, parts.tail)
        with self._turn:
            self._write(name, parts.body, body, direct=is_aligned(body))
        self._write_small(name, parts.tail, view[parts.tail - offset :])

    def _write_small(self, name: str, offset: int, view: memoryview) -> None:
        self._blocks.put(name, offset, view)

    def _write_run(self, name: str, offset: int, run: memoryview) -> None:
        held = run[: self._sizes[name] - offset]  # nothing is written beyond the end
        whole = len(held) // BLOCK * BLOCK
        self._write(name, offset, held[:whole], direct=True)
        self._write(name, offset + whole, held[whole:])

    def _write(self, name: str, offset: int, view: memoryview, *, direct: bool = False) -> None:
        done = 0
        while done < len(view):
            straight = direct and (offset + done) % BLOCK == 0  # not aligned after a partial write
            done += self._act(name, straight, lambda fd, at=done: os.pwrite(fd, view[at:], offset + at))

    def _read_block(self, name: str, offset: int, block: memoryview) -> None:
        self._act(name, True, lambda fd: os.preadv(fd, [block], offset))

    def _act(self, name: str, direct: bool, act: Callable[[int], int]) -> int:
        """Read or write, with direct I/O where it is requested and supported."""
        direct = direct and self._direct
        try:
            with self._open.using((name, direct)) as descriptor:
                return act(descriptor)
        except OSError as error:
            if not direct or error.errno not in NO_DIRECT:
                raise
        self._direct = False
        with self._open.using((name, False)) as descriptor:
            return act(descriptor)

    def _open_file(self, key: tuple[str, bool]) -> int:
        name, direct = key
        flags = os.O_RDWR | os.O_CREAT | (DIRECT if direct else 0)
        return open_regular(str(self._folder / name), flags=flags)


class SharedFiles(FlatFiles):
    """Files of which other processes write other regions: this one writes exactly its own bytes, and no others.

    A file has its full size before the first byte, and never another one, so nobody truncates what somebody else has
    written. No block is read, changed and written again, as by `Blocks`: a process that was slow would put back what it
    had read before somebody else wrote there.
    """

    def add(self, name: str, size: int) -> None:
        """Create one more file, or open it.

        Raises:
            StorageError: the file has another size; or the storage is full or failed.
        """
        self._sizes[name] = size
        self._guard(name, lambda descriptor: _require_size(descriptor, self._folder / name, size))

    def finish(self) -> None:
        """Make what was written durable."""
        self.sync()

    def _write_small(self, name: str, offset: int, view: memoryview) -> None:
        self._write(name, offset, view)


class UploadedFiles(OpenFiles):
    """Files in the staged objects of a run; see OpenFiles."""

    def __init__(self, folder: Location, sizes: Mapping[str, int]) -> None:
        """Begin or continue the files.

        Args:
            folder: a folder of a run's staged objects.
            sizes: name → bytes.
        """
        self._folder, self._run = folder, run_of(folder)
        self._files = {name: self._run.file(folder.join(name).path, size) for name, size in sizes.items()}

    def write(self, name: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """See OpenFiles."""
        self._files[name].write(offset, memoryview(data).cast("B"))

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """See OpenFiles."""
        return memoryview(self._folder.join(name).read(start, stop))

    def has_bytes(self, path: str, start: int, stop: int) -> bool:
        """See OpenFiles."""
        return self._run.file_at(path).has_bytes(start, stop)

    def sync(self) -> None:
        """See OpenFiles: nothing can hurry a part, but sending may have failed."""
        self._run.using.sender.require_sound()

    def finish(self) -> None:
        """See OpenFiles."""
        self._run.finish()

    def close(self) -> None:
        """See OpenFiles; the run ends the sending."""


class SlicedFiles(OpenFiles):
    """The files of a slice; what is written to others, or outside its region, is left out."""

    def __init__(self, files: OpenFiles | None, part: Slice) -> None:
        """Begin.

        Args:
            files: those of the slice; None if it has none in this folder.
            part: the slice, with names relative to the folder.
        """
        self._files, self._part = files, part

    def write(self, name: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """See OpenFiles."""
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
        """See OpenFiles."""
        assert self._files is not None, "no file is written"
        return self._files.read(name, start, stop)

    def keeps(self, name: str) -> bool:
        """Whether the slice has a file."""
        return name in self._part.files

    def sync(self) -> None:
        """See OpenFiles."""
        if self._files is not None:
            self._files.sync()

    def finish(self) -> None:
        """See OpenFiles."""
        if self._files is not None:
            self._files.finish()

    def close(self) -> None:
        """See OpenFiles."""
        if self._files is not None:
            self._files.close()


def open_files(folder: Location, sizes: Mapping[str, int], part: Slice | None = None) -> OpenFiles:
    """The files of a folder, on a local disk or in the staged objects of a run.

    Args:
        folder: the folder.
        sizes: name of each file → its bytes.
        part: the files that are written, with names relative to the folder; all by default.

    Raises:
        UnsupportedError: the folder is neither.
        StorageError: the storage is full or failed.
    """
    if part is not None:
        sizes = {name: size for name, size in sizes.items() if name in part.files}
        if not sizes:
            return SlicedFiles(None, part)
    if folder.store.capabilities.staged:
        files = UploadedFiles(folder, sizes)
    else:
        require_local(folder)
        kind = FlatFiles if part is None or part.region is None else SharedFiles
        files = kind(Path(folder.path), sizes)
    return files if part is None else SlicedFiles(files, part)


def require_local(folder: Location) -> None:
    """Refuse a folder that is neither on a local disk nor in the staged objects of a run.

    Raises:
        UnsupportedError: it is neither.
    """
    if not folder.store.capabilities.local:
        raise UnsupportedError(
            "files can only be written into a staging area", uri=folder.uri, cure="use wherry.convert"
        )


def write_runs(
    files: OpenFiles,
    rows: list[tuple[str, int, bytes | bytearray | memoryview]],
) -> None:
    """Write pieces of files; those that follow one another in a file are written at once.

    Args:
        files: the files.
        rows: name, offset and bytes of each piece; they are sorted.

    Raises:
        StorageError: the storage failed.
    """
    rows.sort(key=itemgetter(0, 1))
    run: list[bytes | bytearray | memoryview] = []
    file, start, end = "", 0, 0
    for name, offset, data in rows:
        if not run or name != file or offset != end:
            if run:
                files.write(file, start, b"".join(run))
            run, file, start = [], name, offset
        run.append(data)
        end = offset + len(data)
    if run:
        files.write(file, start, b"".join(run))


def put_in_order(folder: Location, files: Iterable[File]) -> None:
    """Put files without tensors, each when the one before it is durable, then make their names durable.

    Raises:
        StorageError: the storage failed.
    """
    homes: dict[str, Location] = {}
    for file in files:
        place = folder.join(file.name)
        make_folder(place.parent)
        place.put(content_of(file))
        homes[place.parent.path] = place.parent
    sync_folders(homes[path] for path in sorted(homes, reverse=True))


def start_after(end: int, nbytes: int) -> int:
    """Offset of bytes that are written at once after others: many begin on a block, for direct I/O."""
    return end if nbytes < SMALL else -(-end // BLOCK) * BLOCK


def _allocate(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)
    if size:
        os.posix_fallocate(descriptor, 0, size)


def _settle(descriptor: int) -> None:
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # pages used again cost less than fresh ones


def _require_size(descriptor: int, path: Path, size: int) -> None:
    """Give a file its size if it is new.

    Args:
        descriptor: of the file.
        path: for errors.
        size: bytes that it has in every process.

    Raises:
        StorageError: it has another size.
        OSError: the storage is full or failed.
    """
    found = os.fstat(descriptor).st_size
    if found not in (0, size):
        raise StorageError(
            f"the file that the units share has {found:,} bytes instead of {size:,}",
            uri=str(path),
            cure=Cure("remove it, and run {} again", Command("work")),
        )
    if not found:
        os.ftruncate(descriptor, size)  # two processes that both do this leave the same file
    # Space is allocated where the file system can do so: `posix_fallocate` may write zeros, which are not harmless.
    libc = ctypes.CDLL(None, use_errno=True)
    if size and hasattr(libc, "fallocate64"):
        code = libc.fallocate64(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size))
        number = ctypes.get_errno() if code else 0
        if number in _FULL:
            raise OSError(number, os.strerror(number))
