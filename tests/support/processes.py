"""Processes that tests started, and whether they ended; what this process has open."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil


def gone(pids, within=30.0):
    """Whether processes end within so many seconds; a zombie that nobody reaps has ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(map(is_running, pids)):
            return True
        time.sleep(0.05)
    return False


def open_descriptors():
    """Number → path of each file or folder that is open.

    Those of garbage, such as another test's, are closed before; sockets and pipes of servers of other tests, which come
    and go, are left out.
    """
    gc.collect()
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of the listing itself
            found[number] = str(Path(f"/proc/self/fd/{number}").readlink())
    return {number: path for number, path in found.items() if path.startswith("/")}


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
