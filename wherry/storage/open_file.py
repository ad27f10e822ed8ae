"""Opens the files and folders of this machine safely; all local files are opened here.

A file in a checkpoint can be a FIFO without a writer, an endless device, or a link to a private file of the user. So
only regular files are opened (and folders, for a listing), no call blocks, links obey `wherry.storage.links`, and
nothing is written through a link. The checks apply to the same descriptor that is then read.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.errors import HostileError
from wherry.storage.links import link_refusal

if TYPE_CHECKING:
    from collections.abc import Generator

    from wherry.storage.links import Root

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
_CURE = "remove it from the checkpoint; only regular files are read"


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
    descriptor = _open(path, flags | (os.O_NOFOLLOW if flags & _WRITING else 0), mode)
    try:
        _require_admitted(descriptor, path, root)
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
    descriptor = _open(path, os.O_RDONLY | os.O_DIRECTORY, 0)
    try:
        _require_admitted(descriptor, path, root)
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: str, start: int, stop: int, root: Root | None = None) -> bytes:
    """Bytes [start, stop) of a regular file; fewer if it ends earlier. Memory is bounded by the size of the file.

    Raises:
        HostileError, OSError: as `open_regular`.
    """
    with opened_regular(path, root=root) as descriptor:
        return read_descriptor(descriptor, start, stop)


def read_descriptor(descriptor: int, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of an open file; fewer if it ends earlier. Memory is bounded by the size of the file."""
    left = min(stop, os.fstat(descriptor).st_size) - start
    pieces: list[bytes] = []
    while left > 0 and (piece := os.pread(descriptor, left, start)):
        pieces.append(piece)
        start, left = start + len(piece), left - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def special(mode: int) -> str:
    """The kind of a special file, by its mode; empty for a regular file or a folder."""
    kind = stat.S_IFMT(mode)
    return "" if kind in (stat.S_IFREG, stat.S_IFDIR) else _KINDS.get(kind, "an unknown type of file")


def special_refusal(path: str, mode: int) -> HostileError:
    """The error for a file that is not a regular file."""
    return HostileError(f"expected a regular file, got {special(mode) or 'a device'}", uri=path, cure=_CURE)


def loop_refusal(path: str) -> HostileError:
    """The error for a link that points back to itself."""
    return HostileError("symbolic link points back to itself", uri=path, cure="remove the link")


def written_link_refusal(path: str) -> HostileError:
    """The error for a link at a path that is opened for writing."""
    return HostileError("cannot write through a symbolic link", uri=path, cure="remove the link")


def _open(path: str, flags: int, mode: int) -> int:
    try:
        return os.open(path, flags | _ALWAYS, mode)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise special_refusal(path, os.stat(path).st_mode) from error  # noqa: PTH116  as in store
        if error.errno == errno.ELOOP:
            raise (written_link_refusal if flags & os.O_NOFOLLOW else loop_refusal)(path) from error
        raise


def _require_regular(descriptor: int, path: str) -> None:
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if kind != stat.S_IFREG:
        raise special_refusal(path, kind)


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
        return os.path.realpath(path)
