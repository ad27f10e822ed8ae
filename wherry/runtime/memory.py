"""memory: the available memory of this machine or container, and the return of freed memory to it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def return_freed_memory() -> None:
    """Return freed blocks that malloc keeps for reuse (see `keep_freed_memory`) to the system; only glibc can do so.

    For the end of a pass: the next one needs blocks of other sizes, and those of both would be in memory.
    """
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, within the container's limit; None where unknown."""
    found: list[int] = []
    try:
        rows = Path("/proc/meminfo").read_text().splitlines()
        found += [int(row.split()[1]) << 10 for row in rows if row.startswith("MemAvailable:")]
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(row.split() for row in (_CGROUP / "memory.stat").read_text().splitlines())
            cached = int(stat["inactive_file"]) + int(stat["active_file"])
            found.append(int(limit) - int((_CGROUP / "memory.current").read_text()) + cached)
    except (OSError, ValueError, KeyError):
        return min(found, default=None)  # this system reports less
    return min(found, default=None)
