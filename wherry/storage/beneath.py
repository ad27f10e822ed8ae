"""Opens a path below an open folder such that no link on the way leads out of the folder.

The path is followed from the folder's descriptor, whatever the path of the folder leads to by then. Linux 5.6 does so
in one call, `openat2` with RESOLVE_BENEATH. Elsewhere each part of the path is opened by itself, and none may be a
link.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_OPENAT2 = 437  # number of the system call on every architecture that Python supports
_RESOLVE_BENEATH = 0x08
_ATTEMPTS = 100  # a rename elsewhere makes the kernel give up a path with `..`
_NO_CALL = (errno.ENOSYS, errno.EPERM)  # an older kernel; a sandbox that does not know the call
O_PATH = getattr(os, "O_PATH", os.O_RDONLY)
_PART = O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
    if not _calls:
        _calls.append(_load_call())
    call = _calls[0]
    if call is not None:
        sys.audit("open", path, None, flags)
        code, descriptor = call(folder, path, flags)
        if descriptor >= 0:
            return descriptor
        if code not in _NO_CALL:
            raise OSError(code, os.strerror(code), path)
    return _open_each_part(folder, path, flags)


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


_calls: list[Callable[[int, str, int], tuple[int, int]] | None] = []


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
