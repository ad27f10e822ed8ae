"""Threads: how many, and pools of them that find the number libraries whole."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from wherry.core import dtypes


def worker_count() -> int:
    """Threads that read: two per core, so that one hashes while the other waits for storage; eight at most."""
    return min(2 * (os.cpu_count() or 2), 8)


def carrier_count() -> int:
    """Threads that also write bytes as they are: one per core hashes, one writes, one holds what comes next."""
    return worker_count() * 3 // 2


def executor(count: int, name: str = "wherry", *, numbers: bool = True) -> ThreadPoolExecutor:
    """A pool of threads.

    Args:
        count: how many.
        name: what their names begin with.
        numbers: whether they may look at numbers: numpy is imported before they start then, since threads that
            import it at one time see it half made.
    """
    if numbers:
        dtypes.ready()
    return ThreadPoolExecutor(count, thread_name_prefix=name)
