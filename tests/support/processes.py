"""Processes that tests started, and whether they ended."""

from __future__ import annotations

import time

import psutil


def gone(pids, within=30.0):
    """Whether processes end within so many seconds; a zombie that nobody reaps has ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(map(is_running, pids)):
            return True
        time.sleep(0.05)
    return False


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
