"""Notes which test reaches which fault: a module, and a plugin of pytest, in the copy that `infra/faults` makes.

A process that a test starts looks for the process of that test among its ancestors. Only what the standard library has
is imported, since any process of any test may import this.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

NOTES = Path(__file__).with_name("fault-notes")
_SEEN: set[int] = set()
os.register_at_fork(after_in_child=_SEEN.clear)


def hit(number: int) -> None:
    """Note that the running test reaches a fault; once for each process and test."""
    if number in _SEEN:
        return
    _SEEN.add(number)
    test = _running_test() or os.environ.get("PYTEST_CURRENT_TEST", "")
    with suppress(OSError), (NOTES / f"hits-{os.getpid()}").open("a") as notes:
        notes.write(f"{number} {test}\n")


def _running_test() -> str:
    """The test that this process, or one of its ancestors, runs; empty if none does."""
    process = os.getpid()
    while process > 1:
        with suppress(OSError):
            return (NOTES / f"test-{process}").read_text()
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return ""
    return ""


def pytest_runtest_logstart(nodeid: str) -> None:
    """Another test begins in this process."""
    _SEEN.clear()
    (NOTES / f"test-{os.getpid()}").write_text(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """A test that fails without a fault finds none."""
    if report.failed:
        with (NOTES / f"failed-{os.getpid()}").open("a") as notes:
            notes.write(f"{report.nodeid}\n")
