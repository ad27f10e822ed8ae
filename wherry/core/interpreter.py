"""Settings of the interpreter for short commands whose threads move bytes, and the memory that is available to it."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys

_THRESHOLD = 10_000
_SWITCH_SECONDS = 0.001
_UTF8 = "PYTHONUTF8"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt, in <malloc.h>
_KEPT_BYTES = 128 << 20
_LARGEST_KEPT_BLOCK = 32 << 20


def use_utf8() -> None:
    """Read and print file names as UTF-8; in any other locale, restart the interpreter in UTF-8 mode.

    A file name is bytes. In UTF-8 mode it decodes to the same text in every locale, so that ledger, manifests and
    digests have one name for one file. Undecodable bytes are printed escaped.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_UTF8) != "1" and sys.executable:
        os.environ[_UTF8] = "1"  # for the children as well
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606  no shell
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tune() -> None:
    """Reduce the cost of garbage collection, of thread switches and of OpenBLAS threads.

    Imports create many objects and no garbage: collecting takes 5 % of the start-up, and 0.1 s at exit, when all
    objects would be visited once more. Threads that move bytes need the interpreter rarely, but then at once. numpy
    would start an OpenBLAS thread for each core, which costs 0.07 s of processor time without any use.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(_THRESHOLD)
    atexit.register(gc.freeze)
    sys.setswitchinterval(_SWITCH_SECONDS)


def keep_freed_memory() -> None:
    """Let malloc reuse freed blocks of up to 32 MiB instead of returning them to the kernel.

    The kernel clears every page that it hands out. Decoded chunks are allocated and freed one after another, and
    without this a tenth of the processor time of a conversion of compressed chunks goes to clearing. Only glibc has
    these settings; 32 MiB is the largest size that it accepts.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK)


_CGROUP = "/sys/fs/cgroup"


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, within the container's limit; None where unknown."""
    from pathlib import Path  # `wherry --help` needs no path

    cgroup = Path(_CGROUP)
    found: list[int] = []
    try:
        rows = Path("/proc/meminfo").read_text().splitlines()
        found += [int(row.split()[1]) << 10 for row in rows if row.startswith("MemAvailable:")]
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(row.split() for row in (cgroup / "memory.stat").read_text().splitlines())
            cached = int(stat["inactive_file"]) + int(stat["active_file"])
            found.append(int(limit) - int((cgroup / "memory.current").read_text()) + cached)
    except (OSError, ValueError, KeyError):
        return min(found, default=None)  # this system reports less
    return min(found, default=None)
