"""Why a test may be skipped, and the plugin with which `infra/test` fails a run that skips for any other reason.

    pytest -p tests.support.skips

What the extra `test` installs is no reason: where pip has done its work, it is there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

CORPUS = Path(os.environ.get("WHERRY_CORPUS", Path(__file__).resolve().parents[3] / "shared" / "corpus"))
NO_CORPUS = "the corpus is not here; WHERRY_CORPUS names its folder"
NO_TIME = "the time of --within is over"
# The beginning of each reason.
ALLOWED = (
    NO_TIME,
    # This machine lacks what pip does not install.
    r"PostgreSQL does not run as root, and there is no user postgres",
    r"(bash|zsh|fish) is not installed",
    r"initdb and pg_ctl of PostgreSQL are not installed",
    r"there is no \S*chromium",
    r"this system has no O_DIRECT",
    r"(torch|JAX) has no GPU",
    r"there is no tmpfs",
    r"npm has not installed (Azurite|axe-core)",
    r"mounting a file system is not allowed here",
    r"only root can give files away",
    r"counts threads as Linux shows them",
    r"only glibc has mallopt",
    r"the tests do not run in a git checkout",
    r"this is no clone",
    r"LINEAGE_SPEC does not name the folder",
    r"no environment with",  # libraries of 2024, with --slow
    r"ray is not installed",  # its tests run in an environment of their own, with --slow
    # This Python or this torch is newer or older than the one that a test is about.
    r"this Python has the module",
    r"this torch writes no zstd items",
    # A row of a table of cases that has no such case.
    r"a file for each chunk needs no log",
    r"an empty folder, which git does not keep",
    r"the other database has no such statement",
    r"this form has no place for such a model",
)
_found: dict[str, str] = {}


def allowed(reason: str) -> bool:
    """Whether a test may be skipped for this reason; without the corpus, for want of it too."""
    known = ALLOWED if (CORPUS / "INDEX.json").is_file() else (*ALLOWED, "the corpus is not here")
    return any(re.match(one, reason.removeprefix("Skipped: ")) for one in known)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Keep what was skipped for another reason; the reason of an expected failure is not one."""
    if report.skipped and isinstance(report.longrepr, tuple) and not allowed(report.longrepr[2]):
        _found[report.nodeid] = report.longrepr[2]


pytest_runtest_logreport = pytest_collectreport = _note


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that skipped for a reason that is not known has failed."""
    if _found and session.exitstatus in (0, 5):  # 5: there was nothing to run
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests and their reasons."""
    if _found:
        terminalreporter.section("skipped for a reason that tests/support/skips.py does not have", red=True)
    for test, reason in sorted(_found.items()):
        terminalreporter.write_line(f"{test}: {reason}")
