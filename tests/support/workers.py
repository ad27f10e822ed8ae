"""The plugin with which `infra/test` spreads tests over workers: a file stays whole, and what is long begins first.

    pytest -p tests.support.workers -n 2

Fixtures of a module are made once that way, and the flows share one Prefect server. The order is the same without
workers. The folders of the tests lie in memory if there is room; they are removed at the end, also those of tests that
failed. With the slow tests they lie on a disk, and so they do for the rooms that tests/conftest.py names.
"""

from __future__ import annotations

import os
import time

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.memory_files import memory_folder, temporary_folder
from tests.support.skips import NO_TIME

# Folders whose tests share a server.
TOGETHER = ("tests/flows/",)
# What takes longer than half a minute, about the longest first: begun last, one of them would keep one worker waiting.
LONG = (
    "test_contract", "test_fencing", "flows", "test_native_attacks", "test_special_files", "test_crash",
    "test_storage_faults", "test_spill", "test_end_to_end", "test_directions", "test_names", "test_demo",
    "test_registry_server", "test_durability", "test_systems", "test_native", "test_readme",
    "test_troubleshooting", "test_promote", "test_kill", "test_register", "test_made_pairs",
)  # fmt: skip

# The selections whose folders lie in memory: what is slow fills a disk.
QUICK = ("not slow", "not slow and not full", "not slow and full")
# Of `infra/test --within`: the moment after which tests of the rest are skipped, and the rooms whose tests come first.
END, FIRST = "WHERRY_TESTS_END", "WHERRY_TESTS_FIRST"
# Bytes of free memory that the folders of all tests may take.
_ROOM = 4 << 30


def scope_of(test: str) -> str:
    """What stays in one worker: a file of tests, or a folder of them that shares a server."""
    file = test.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def room_of(test: str) -> str:
    """The folder of a test: `families`."""
    return test.split("/")[1] if test.count("/") > 1 else ""


def rank(scope: str) -> int:
    """The place of a scope among all."""
    name = scope.rstrip("/").rpartition("/")[2].removesuffix(".py")
    return LONG.index(name) if name in LONG else len(LONG)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before pytest chooses a folder: the process that starts the workers makes one for all of them."""
    if hasattr(config, "workerinput") or config.option.basetemp or config.option.markexpr not in QUICK:
        return
    memory = memory_folder(_ROOM)
    if (
        memory is not None and not os.statvfs(memory).f_flag & os.ST_NOEXEC
    ):  # tests make programs and run them
        folder = temporary_folder("tests")
        config.add_cleanup(folder.cleanup)
        config.option.basetemp = f"{folder.name}/files"


class Scopes(LoadScopeScheduling):
    """Gives each worker that has next to nothing left the next scope."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The rooms that changed first, then long scopes; otherwise the order is as it was."""
    first = os.environ.get(FIRST, "").split()
    items.sort(key=lambda item: (room_of(item.nodeid) not in first, rank(scope_of(item.nodeid))))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would begin after the end of the time that is stated."""
    end = os.environ.get(END)
    if end and time.time() > float(end):
        pytest.skip(NO_TIME)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scopes:
    """By our scopes, in the order of the tests and not of their numbers."""
    config.option.loadscopereorder = False
    return Scopes(config, log)
