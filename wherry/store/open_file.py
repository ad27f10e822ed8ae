"""Opens the files and folders of this machine safely, and reads past the page cache; all local files are opened here.

A file in a checkpoint can be a FIFO without a writer, an endless device, or a link to a private file of the user. So
only regular files are opened (and folders, for a listing), no call blocks, and nothing is written through a link. The
checks apply to the same descriptor that is then read.

A checkpoint is untrusted data, and a link in it could point to any file of this machine. A link is followed only if its
final target is

1. below the root: the folder or file that the user named (`/data/run` may itself be a link, or be below one);
2. in `blobs/` of the Hugging Face cache whose `snapshots/` holds the root;
3. below a folder that the user's own configuration allows: `links = ["/data/models"]`, or `WHERRY_LINKS`.

Any other link raises a HostileError that names the link, its target and the configuration line that allows it. The
check compares the real path of the open file, so that no file can be exchanged between the check and the use.

The folder of a checkpoint is opened once (`open_root`), and everything below it from its descriptor: a folder that is
exchanged for a link later is not followed. Paths are followed by the kernel only within that folder: Linux 5.6 does so
in one call, `openat2` with RESOLVE_BENEATH. Elsewhere each part of the path is opened by itself, and none may be a
link. A link out of the folder is followed only to see where it leads.

Paths of this machine, from the texts and URIs in which people and files state them, are made here too (`local_path`).

**Direct I/O** moves bytes between memory and a device without the page cache, in whole blocks. A read-back must come
from storage, and filling the page cache costs more than the read itself: 2.2 GB took 0.5 s longer through the page
cache. Direct reads and writes need whole blocks, and memory with the same alignment as the file (`Pool.buffer` with a
place). Other requests, and file systems without direct I/O, use the page cache. Temporary files are opened once for
many reads or writes (`reading`, `writing`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import contextmanager
from dataclasses import field, replace
from functools import cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes, urlsplit

from wherry.core.lazy_dataclass import dataclass
from wherry.core.services import service
from wherry.errors import HostileError, UsageError, storage_errors

_OPENAT2 = 437  # number of the system call on every architecture that Python supports
_RESOLVE_BENEATH = 0x08
# A rename elsewhere makes the kernel give up a path with `..`; a link can change between two looks.
_ATTEMPTS = 100
_NO_CALL = (errno.ENOSYS, errno.EPERM)  # an older kernel; a sandbox that does not know the call
O_PATH = getattr(os, "O_PATH", os.O_RDONLY)
_PART = O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CACHED = ("models--", "datasets--", "spaces--")
_DELETED = " (deleted)"  # what Linux appends to the path of a deleted file
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_ALWAYS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
# Errors of `open` for a socket, a device without a driver, and a FIFO opened for writing without a reader.
_NO_FILE = (errno.ENXIO, errno.ENODEV)
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a block device",
}
_FOLDER = O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_HAS_PROC = os.path.isdir("/proc/self/fd")  # noqa: PTH112  a string
_CURE = "remove it from the checkpoint; only regular files are read"
MOST_OPEN = 64
_Key = TypeVar("_Key", bound="Hashable")


def native_path(text: str) -> str:
    """A path in the encoding of this process's locale; the inverse of `path_uri` for a bare path."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return os.fsdecode(text.encode("utf-8", "surrogateescape"))
    return text


def local_path(uri: str) -> str | None:
    """The path of this machine that a URI means, with the home folder for `~`; None for a URI of another store.

    Raises:
        UsageError: the URI names another machine.
    """
    protocol, separator, _ = uri.partition("://")
    if not separator:
        return native_path(os.path.expanduser(uri))  # noqa: PTH111  a string
    if protocol != "file":
        return None
    parts = urlsplit(uri)
    if "@" in parts.netloc:
        raise UsageError("a URI must not carry credentials", cure="write the path alone")
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"{uri} names the host {parts.netloc!r}; expected a path of this machine",
            cure=f"write file:///{parts.netloc}{parts.path}, or the path alone",
        )
    return os.fsdecode(unquote_to_bytes(parts.path.encode("utf-8", "surrogateescape")))


def open_beneath(folder: int, path: str, flags: int) -> int:
    """Open an existing file or folder for reading.

    Args:
        folder: descriptor of the folder.
        path: relative to it.
        flags: of `os.open`.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        OSError: it cannot be opened; with EXDEV if a link leads out of the folder, or its end is not known.
    """
    call = _load_call()
    if call is not None:
        sys.audit("open", path, None, flags)
        code, descriptor = call(folder, path, flags)
        if descriptor >= 0:
            return descriptor
        if code not in _NO_CALL:
            raise OSError(code, os.strerror(code), path)
    return _open_each_part(folder, path, flags)


@cache
def _load_call() -> Callable[[int, str, int], tuple[int, int]] | None:
    """`openat2` as a function that returns error and descriptor; None where there is no such call."""
    if sys.platform != "linux":
        return None
    try:
        system_call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    system_call.restype = ctypes.c_long
    system_call.argtypes = (
        ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t,
    )  # fmt: skip

    def call(folder: int, path: str, flags: int) -> tuple[int, int]:
        name, how = os.fsencode(path), struct.pack("=QQQ", flags, 0, _RESOLVE_BENEATH)
        if b"\0" in name:
            raise ValueError("embedded null byte")
        code = 0
        for _attempt in range(_ATTEMPTS):
            descriptor = system_call(_OPENAT2, folder, name, how, len(how))
            if descriptor >= 0:
                return 0, descriptor
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR):
                break
        return errno.EXDEV if code == errno.EAGAIN else code, -1

    return call


def _open_each_part(folder: int, path: str, flags: int) -> int:
    *folders, name = [part for part in path.split("/") if part not in ("", ".")] or ["."]
    if ".." in folders or name == "..":
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    at = folder
    try:
        for part in folders:
            inner = os.open(part, _PART, dir_fd=at)
            if at != folder:
                os.close(at)
            at = inner
        descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):  # a link, or below a file
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path) from error
        raise
    finally:
        if at != folder:
            os.close(at)
    if stat.S_ISLNK(os.fstat(descriptor).st_mode):  # opened by O_PATH
        os.close(descriptor)
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    return descriptor


class Folder:
    """An open folder, from which what is below it is opened.

    Attributes:
        path: the path by which it was opened.
        descriptor: of the folder; -1 once it is closed.
    """

    __slots__ = ("descriptor", "path")

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def relative(self, path: str) -> str | None:
        """A path relative to the folder; None if it is not below it, and once the folder is closed."""
        if self.descriptor < 0:
            return None
        head = self.path.rstrip("/")
        if path == self.path or path.rstrip("/") == head:
            return "."
        return path[len(head) + 1 :].lstrip("/") if path.startswith(f"{head}/") else None

    def __reduce__(self) -> str:
        raise TypeError("an open folder belongs to its process")

    def close(self) -> None:
        """Close the folder; what is read later is opened by its path, under the same rules for links."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Root:
    """The path that a user named; links may point below it.

    Attributes:
        path: as the user named it; absolute.
        real: the same path when it was named, with links resolved.
        above: the real path of the folder that holds it, at that time too.
        configurable: whether the configuration may allow further folders; False while the configuration itself is
            checked.
        folder: the root itself, opened, or the folder that holds it if it is a file; None before it is opened.
    """

    path: str
    real: str
    above: str = ""
    configurable: bool = True
    folder: Folder | None = field(default=None, compare=False, repr=False)

    def holds(self, path: str) -> bool:
        """Whether a path is this root or is below it."""
        return _is_within(path, self.path)

    def inside(self, path: str) -> tuple[int, str] | None:
        """The descriptor of the open folder and the path from there; None if it is closed, or elsewhere."""
        name = None if self.folder is None else self.folder.relative(path)
        return None if self.folder is None or name is None else (self.folder.descriptor, name)

    def admits(self, path: str, real: str) -> bool:
        """Whether a path below this root, or next to it, may point to a real path.

        Args:
            path: the path that is opened.
            real: the same path with links resolved.
        """
        if path == real or _is_within(real, self.real):
            return True
        real = real.removesuffix(_DELETED)
        base = self.real if self.holds(path) else self._real_above(os.path.commonpath((self.path, path)))
        return (
            _is_within(real, base)
            or _is_within(real, _blobs_of(base))
            or (self.configurable and any(_is_within(real, folder) for folder in allowed_roots()))
        )

    def _real_above(self, folder: str) -> str:
        """The real path that a folder above the root had when the root was named."""
        rest = os.path.dirname(self.path).rstrip("/")[len(folder.rstrip("/")) :]  # noqa: PTH120  text alone
        return (self.above.removesuffix(rest) or "/") if self.above.endswith(rest) else real_path(folder)


def real_path(path: str) -> str:
    """A path with links resolved.

    Raises:
        HostileError: each time that it is resolved, a link in it becomes something else.
    """
    for _attempt in range(_ATTEMPTS):
        try:
            return os.path.realpath(path)
        except OSError:  # a link between two looks, and no link in the second one
            continue
    raise HostileError("links in the path change all the time", uri=path, cure="find what changes them")


def root_at(path: str, *, configurable: bool = True) -> Root:
    """The root for a path that the user named."""
    head, name = os.path.split(path)
    above = real_path(head)
    plain = name not in ("", "..") and not os.path.islink(path)  # noqa: PTH114  a string
    return Root(path, os.path.join(above, name) if plain else real_path(path), above, configurable)  # noqa: PTH118


def allowed_roots() -> tuple[str, ...]:
    """The folders below which the configuration allows targets of links; with links resolved.

    Raises:
        UsageError: the configuration is invalid.
    """
    stated = os.environ.get("WHERRY_LINKS")
    folders = (
        [one for one in stated.split(os.pathsep) if one]
        if stated
        else service("settings").configured_value("links") or ()
    )
    return tuple(real_path(path) for folder in folders if (path := local_path(folder)) is not None)


def link_refusal(path: str, real: str) -> HostileError:
    """The error for a link that must not be followed.

    Args:
        path: the path that was opened.
        real: the target of the link.
    """
    folder = os.path.dirname(real.removesuffix(_DELETED))  # noqa: PTH120
    return HostileError(
        f"symbolic link points outside the checkpoint: {real}",
        uri=path,
        cure=f'replace the link with the file, or allow the folder in your wherry.toml: links = ["{folder}"]',
    )


def _is_within(path: str, folder: str) -> bool:
    return bool(folder) and (path == folder or path.startswith(f"{folder.rstrip('/')}/"))


def _blobs_of(real: str) -> str:
    """`blobs/` of the Hugging Face cache whose snapshots contain a folder; empty if the folder is in no cache."""
    parts = real.split("/")
    for number in range(len(parts) - 1, 0, -1):
        if parts[number] == "snapshots" and parts[number - 1].startswith(_CACHED):
            return "/".join((*parts[:number], "blobs"))
    return ""


def open_regular(path: str, *, root: Root | None = None, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file.

    Args:
        path: the file.
        root: the path that the user named, which limits links; None for files outside checkpoints.
        flags: of `os.open`; a file that is opened for writing must not be a link.
        mode: permissions of a new file.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        HostileError: it is a FIFO, a socket or a device, or a link points to a forbidden place.
        OSError: it cannot be opened; `IsADirectoryError` for a folder.
    """
    descriptor = _open_admitted(path, root, flags | (os.O_NOFOLLOW if flags & _WRITING else 0), mode)
    try:
        _require_regular(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def opened_regular(
    path: str, *, root: Root | None = None, flags: int = os.O_RDONLY, mode: int = 0o666
) -> Generator[int]:
    """A descriptor of a regular file while the block runs.

    Args and Raises: as `open_regular`.
    """
    descriptor = open_regular(path, root=root, flags=flags, mode=mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_folder(path: str, root: Root | None = None) -> Generator[int]:
    """A descriptor of a folder while the block runs.

    Raises:
        HostileError: a link points to a forbidden place.
        OSError: it cannot be opened; `NotADirectoryError` for a file.
    """
    descriptor = _open_admitted(path, root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def status_of(path: str, root: Root) -> os.stat_result:
    """The status of a file or folder to which a path leads.

    Raises:
        HostileError: a link points to a forbidden place, or back to itself.
        OSError: it does not exist, or cannot be reached.
    """
    descriptor = _open_admitted(path, root, O_PATH)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def open_root(root: Root) -> Root:
    """The root with its folder opened; the unchanged root if the folder cannot be opened.

    Args:
        root: what the user named; links in its own path are followed.
    """
    for path in (root.path, os.path.dirname(root.path)):  # noqa: PTH120  a string
        try:
            descriptor = os.open(path, _FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            continue  # a file, or nothing yet: the folder that holds it
        except OSError:
            break  # who reads below it gets the error; without an open folder links obey the same rules
        real = _real_path(descriptor, path) if path == root.path else root.real
        return replace(root, real=real, folder=Folder(path, descriptor))
    return root


def root_within(outer: Root, path: str) -> Root:
    """A root below another one, for a checkpoint that was found there; its folder is open if that of the other one is.

    Raises:
        HostileError: a link on the way points to a forbidden place.
    """
    if outer.folder is None:
        inner = root_at(path, configurable=outer.configurable)
        if not outer.admits(inner.path, inner.real):
            raise link_refusal(inner.path, inner.real)
        return inner
    head = os.path.dirname(path)  # noqa: PTH120  a string
    try:
        descriptor = _open_admitted(path, outer, O_PATH | os.O_DIRECTORY)
    except NotADirectoryError:
        file = _open_admitted(path, outer, O_PATH)
        try:
            real = _real_path(file, path)
        finally:
            os.close(file)
        folder = Folder(head, _open_admitted(head, outer, O_PATH | os.O_DIRECTORY))
        return Root(path, real, _real_path(folder.descriptor, head), outer.configurable, folder)
    except FileNotFoundError:
        return root_at(path, configurable=outer.configurable)
    folder = Folder(path, descriptor)
    real = _real_path(descriptor, path)
    above, name = os.path.split(real)
    above = above if name == os.path.basename(path) else real_path(head)  # noqa: PTH119  a string
    return Root(path, real, above, outer.configurable, folder)


def stable_path(path: str, root: Root | None) -> str:
    """A path for another library that leads through the open folder of a root, where there is one."""
    inside = None if root is None else root.inside(path)
    if inside is None or not _HAS_PROC:
        return path
    descriptor, name = inside
    return f"/proc/self/fd/{descriptor}" if name == "." else f"/proc/self/fd/{descriptor}/{name}"


def read_descriptor(descriptor: int, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of an open file; fewer if it ends earlier. Memory is bounded by the size of the file."""
    left = min(stop, os.fstat(descriptor).st_size) - start
    pieces: list[bytes] = []
    while left > 0 and (piece := os.pread(descriptor, left, start)):
        pieces.append(piece)
        start, left = start + len(piece), left - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def write_regular(
    path: str, pieces: Iterable[bytes], *, create_only: bool = False, mode: int = 0o666
) -> None:
    """Write a file and sync it; syncing its folder is left to the caller.

    Args:
        path: the file.
        pieces: its contents, which are not held at once.
        create_only: whether it must not exist.
        mode: permissions of a new file, from its first moment on.

    Raises:
        FileExistsError: it must not exist, but does.
        HostileError, OSError: as `open_regular`.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if create_only else os.O_TRUNC)
    with os.fdopen(open_regular(path, flags=flags, mode=mode), "wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def special(mode: int) -> str:
    """The kind of a special file, by its mode; empty for a regular file or a folder."""
    kind = stat.S_IFMT(mode)
    return "" if kind in (stat.S_IFREG, stat.S_IFDIR) else _KINDS.get(kind, "an unknown type of file")


def _special_refusal(path: str, mode: int) -> HostileError:
    """The error for a file that is not a regular file."""
    return HostileError(f"expected a regular file, got {special(mode) or 'a device'}", uri=path, cure=_CURE)


def loop_refusal(path: str) -> HostileError:
    """The error for a link that points back to itself."""
    return HostileError("symbolic link points back to itself", uri=path, cure="remove the link")


def _open_admitted(path: str, root: Root | None, flags: int, mode: int = 0) -> int:
    """A descriptor of a file or folder to which links may lead; the caller closes it."""
    flags |= os.O_CLOEXEC if flags & O_PATH else _ALWAYS
    inside = None if root is None else root.inside(path)
    folder, name = inside or (None, path)
    if folder is not None:
        try:
            return open_beneath(folder, name, flags)  # nothing outside can be reached
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise _failure(error, path, name, flags, folder) from error
    try:
        where = {} if folder is None else {"dir_fd": folder}
        descriptor = os.open(name, flags, mode, **where)
    except OSError as error:
        raise _failure(error, path, name, flags, folder) from error
    try:
        _require_admitted(descriptor, path, root)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _failure(error: OSError, path: str, name: str, flags: int, folder: int | None) -> Exception:
    """The error to raise where a path could not be opened."""
    if error.errno in _NO_FILE:
        return _special_refusal(path, os.stat(name, dir_fd=folder).st_mode)
    if error.errno == errno.ELOOP:
        if flags & os.O_NOFOLLOW:  # it is opened for writing
            return HostileError("cannot write through a symbolic link", uri=path, cure="remove the link")
        return loop_refusal(path)
    return type(error)(error.errno, error.strerror, path)


def _require_regular(descriptor: int, path: str) -> None:
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if kind != stat.S_IFREG:
        raise _special_refusal(path, kind)


def _require_admitted(descriptor: int, path: str, root: Root | None) -> None:
    if root is None:
        return
    real = _real_path(descriptor, path)
    if not root.admits(path, real):
        raise link_refusal(path, real)


def _real_path(descriptor: int, path: str) -> str:
    """The real path of an open file; if the system cannot report it, the present real path of its name."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115  called for every read
    except OSError:
        return real_path(path)


class Descriptors(Generic[_Key]):
    """A bounded number of open files by key, kept open over many reads or writes; safe from several threads.

    A descriptor in use is never closed; of the others, the least recently used one is closed first.

    Args:
        open_file: opens the file of a key and returns its descriptor.
    """

    def __init__(self, open_file: Callable[[_Key], int]) -> None:
        self._open_file = open_file
        self._open: OrderedDict[_Key, int] = OrderedDict()
        self._users: dict[_Key, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def using(self, key: _Key) -> Generator[int]:
        """The descriptor of a key while the block runs.

        Raises:
            OSError: the file could not be opened.
        """
        with self._lock:
            if key not in self._open:
                self._close_idle(max(len(self._open) - MOST_OPEN + 1, 0))
                self._open[key] = self._open_file(key)
            self._open.move_to_end(key)
            self._users[key] = self._users.get(key, 0) + 1
            descriptor = self._open[key]
        try:
            yield descriptor
        finally:
            with self._lock:
                self._users[key] -= 1
                if self._closed:
                    self._close_idle()

    def close(self) -> None:
        """Close every descriptor; one in use, or opened later, is closed when its block ends."""
        with self._lock:
            self._closed = True
            self._close_idle()

    def _close_idle(self, most: int | None = None) -> None:
        idle = [key for key in self._open if not self._users.get(key)]
        for key in idle[:most]:
            os.close(self._open.pop(key))


BLOCK = 4096  # accepted by every supported file system; devices require 512 or 4096
DIRECT = getattr(os, "O_DIRECT", 0)  # Linux
# Errors that mean that a file system has no direct I/O, and not that the storage failed.
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_LEAST = 64 << 10  # bytes; below this the page cache is as fast


class Cut(NamedTuple):
    """A byte range split at block boundaries: positions in the file, start ≤ body ≤ tail ≤ stop."""

    start: int
    body: int
    tail: int
    stop: int


def cut(offset: int, nbytes: int) -> Cut:
    """Split a byte range into the part before the first whole block, the whole blocks, and the part after the last.

    Args:
        offset: of the first byte in its file.
        nbytes: how many.
    """
    stop = offset + nbytes
    body = min(-(-offset // BLOCK) * BLOCK, stop)
    return Cut(offset, body, max(stop // BLOCK * BLOCK, body), stop)


def is_aligned(view: memoryview) -> bool:
    """Whether a buffer is aligned for direct I/O; False for read-only memory, whose address is not available."""
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % BLOCK == 0


def readinto(path: str, offset: int, buffer: memoryview, *, root: Root | None = None) -> int:
    """Fill a buffer from a local file, with direct I/O for whole blocks where it is supported.

    Args:
        path: the file.
        offset: of the first byte.
        buffer: receives the bytes.
        root: what the user named, for a file of a checkpoint; see `open_regular`.

    Returns:
        Number of bytes read; fewer than the size of the buffer at the end of the file.

    Raises:
        HostileError, OSError: as `open_regular`.
    """
    parts = cut(offset, len(buffer))
    body = buffer[parts.body - offset : parts.tail - offset]
    with opened_regular(path, root=root) as plain:
        if not DIRECT or len(body) < _LEAST or not is_aligned(body):
            return _fill(plain, offset, buffer)
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into the page cache
        done = _fill(plain, offset, buffer[: parts.body - offset])
        if done < parts.body - offset:
            return done
        done += _straight(path, root, plain, parts.body, body)
        return done if done < parts.tail - offset else done + _fill(plain, parts.tail, buffer[done:])


def _straight(path: str, root: Root | None, plain: int, offset: int, body: memoryview) -> int:
    """Read whole blocks; through the cache if the file system refuses, or if the file ends within a block."""
    done = 0
    try:
        with opened_regular(path, root=root, flags=os.O_RDONLY | DIRECT) as direct:
            while done < len(body) and done % BLOCK == 0:
                count = os.preadv(direct, [body[done:]], offset + done)
                if not count:
                    break
                done += count
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
    return done + _fill(plain, offset + done, body[done:])


def _fill(file: int, offset: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done


@contextmanager
def writing(path: Path) -> Generator[Callable[[memoryview, int], None]]:
    """A function that writes bytes at an offset of a file; a missing file is created, accessible to its user alone.

    Raises:
        StorageError: the storage failed.
    """
    flags = os.O_WRONLY | os.O_CREAT
    with storage_errors(str(path)), opened_regular(str(path), flags=flags, mode=0o600) as file:

        def write(data: memoryview, offset: int) -> None:
            while data:
                done = os.pwrite(file, data, offset)
                data, offset = data[done:], offset + done

        yield write


@contextmanager
def reading(path: Path) -> Generator[Callable[[int, memoryview], None]]:
    """A function that fills a buffer from an offset of a file that wherry wrote; the file must be long enough.

    Raises:
        StorageError: the storage failed.
    """
    with storage_errors(str(path)), opened_regular(str(path)) as file:

        def read(offset: int, buffer: memoryview) -> None:
            count = _fill(file, offset, buffer)
            if count < len(buffer):
                raise AssertionError(f"{path} is truncated: it ends at byte {offset + count}")

        yield read
