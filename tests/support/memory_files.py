"""The file system in memory, for tests that sync hundreds of times and ask nothing of a disk.

A sync costs 5 to 10 ms on a disk and nothing in memory; everything else is alike: locks, renames, links, modes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MEMORY_FILES = Path("/dev/shm")
_LEAST_FREE = 1 << 30  # containers often have 64 MiB of it


def memory_folder() -> Path | None:
    """Where files in memory can be made; None where there is no such place, or little of it."""
    if not os.path.ismount(MEMORY_FILES) or not os.access(MEMORY_FILES, os.W_OK):
        return None
    return MEMORY_FILES if shutil.disk_usage(MEMORY_FILES).free >= _LEAST_FREE else None
