"""Where the tests of faults and of kills work: in memory, but on a disk where they are slow or watch its calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.memory_files import memory_folder, temporary_folder

IN_MEMORY = ("test_crash", "test_storage_faults", "test_kill")


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder of a test: hundreds of conversions, each of which syncs forty times, are made in memory.

    The slow forms, which try every moment, are made on a disk; tests/crash/test_fencing.py tries both.
    """
    quick = request.path.stem in IN_MEMORY and request.node.get_closest_marker("slow") is None
    if not quick or memory_folder() is None:
        yield tmp_path
        return
    with temporary_folder("crash") as folder:
        yield Path(folder)
