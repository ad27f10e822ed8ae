"""The file system in memory, for tests that sync hundreds of times and ask nothing of a disk.

A sync costs 5 to 10 ms on a disk and nothing in memory; everything else is alike: locks, renames, links, modes.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

MEMORY_FILES = Path("/dev/shm")
_LEAST_FREE = 1 << 30  # containers often have 64 MiB of it


def memory_folder(least: int = _LEAST_FREE) -> Path | None:
    """Where files in memory can be made; None where there is no such place, or fewer free bytes than so many."""
    if not os.path.ismount(MEMORY_FILES) or not os.access(MEMORY_FILES, os.W_OK):
        return None
    return MEMORY_FILES if shutil.disk_usage(MEMORY_FILES).free >= least else None


def temporary_folder(kind: str) -> tempfile.TemporaryDirectory[str]:
    """A folder in memory, or on a disk where there is no memory for it; its name shows which process made it."""
    return _folder(kind, memory_folder())


def disk_folder(kind: str) -> tempfile.TemporaryDirectory[str]:
    """A folder where temporary files usually lie, which is a disk on most machines."""
    return _folder(kind, None)


def _folder(kind: str, parent: Path | None) -> tempfile.TemporaryDirectory[str]:
    prefix = f"wherry-{kind}-{_pid_namespace()}-{os.getpid()}-"
    return tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)


def remove_abandoned() -> None:
    """Remove the temporary folders of processes that have ended: a process that is killed leaves its own."""
    name = re.compile(rf"wherry-(?:home|crash|walk|disk|tests)-{_pid_namespace()}-(\d{{1,9}})-\w+")
    for parent in {MEMORY_FILES, Path(tempfile.gettempdir())}:
        for path in parent.glob("wherry-*"):
            found = name.fullmatch(path.name)
            if found and not _exists(int(found[1])):
                shutil.rmtree(path, ignore_errors=True)


def _pid_namespace() -> int:
    """The namespace of process IDs, which containers that share a folder may not share; 0 without /proc."""
    with suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
