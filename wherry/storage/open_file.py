"""Opens the files and folders of this machine safely; all local files are opened here.

A file in a checkpoint can be a FIFO without a writer, an endless device, or a link to a private file of the user. So
only regular files are opened (and folders, for a listing), no call blocks, links obey `wherry.storage.links`, and
nothing is written through a link. The checks apply to the same descriptor that is then read.

Below a root that is open (`open_root`), paths are followed from its descriptor, and by the kernel only within it
(`wherry.storage.beneath`). A link out of it is followed only to see where it leads.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.errors import HostileError
from wherry.storage.beneath import O_PATH, open_beneath
from wherry.storage.links import Folder, Root, link_refusal, real_path, root_at

if TYPE_CHECKING:
    from collections.abc import Generator

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
    """A root whose folder is open, as it is now; the root as it is if its folder cannot be opened.

    Args:
        root: what the user named; links in its own path are followed.
    """
    for path in (root.path, os.path.dirname(root.path)):  # noqa: PTH120  a string
        try:
            descriptor = os.open(path, _FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            break
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
    name = None if root is None or root.folder is None else root.folder.relative(path)
    if root is None or root.folder is None or name is None or not _HAS_PROC:
        return path
    folder = f"/proc/self/fd/{root.folder.descriptor}"
    return folder if name == "." else f"{folder}/{name}"


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


def _open_admitted(path: str, root: Root | None, flags: int, mode: int = 0) -> int:
    """A descriptor of a file or folder to which links may lead; the caller closes it."""
    flags |= os.O_CLOEXEC if flags & O_PATH else _ALWAYS
    name = None if root is None or root.folder is None else root.folder.relative(path)
    if root is None or root.folder is None or name is None:
        descriptor = _open(path, path, flags, mode, None)
    else:
        folder = root.folder.descriptor
        try:
            return open_beneath(folder, name, flags)  # nothing outside can be reached
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise _failure(error, path, name, flags, folder) from error
        descriptor = _open(path, name, flags, mode, folder)
    try:
        _require_admitted(descriptor, path, root)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open(path: str, name: str, flags: int, mode: int, folder: int | None) -> int:
    try:
        return os.open(name, flags, mode) if folder is None else os.open(name, flags, mode, dir_fd=folder)
    except OSError as error:
        raise _failure(error, path, name, flags, folder) from error


def _failure(error: OSError, path: str, name: str, flags: int, folder: int | None) -> Exception:
    """The error to raise where a path could not be opened."""
    if error.errno in _NO_FILE:
        return special_refusal(path, os.stat(name, dir_fd=folder).st_mode)
    if error.errno == errno.ELOOP:
        return (written_link_refusal if flags & os.O_NOFOLLOW else loop_refusal)(path)
    return type(error)(error.errno, error.strerror, path)


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
        return real_path(path)
