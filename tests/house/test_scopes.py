"""How tests are spread over workers: files stay whole, flows share a server, and the list of long ones is no dead
letter."""

from __future__ import annotations

from tests.support.house import ROOT
from tests.support.workers import LONG, TOGETHER, rank, scope_of


def test_a_file_stays_whole_and_flows_stay_together():
    assert scope_of("tests/core/test_digest.py::test_one[a::b]") == "tests/core/test_digest.py"
    assert scope_of("tests/flows/test_flow.py::test_one") == scope_of("tests/flows/test_assets.py::test_two")


def test_what_is_long_begins_first():
    assert rank("tests/crash/test_fencing.py") < rank("tests/flows/") < rank("tests/core/test_digest.py")


def test_every_long_one_is_there():
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(LONG) <= names | {folder.rstrip("/").rpartition("/")[2] for folder in TOGETHER}
    assert all((ROOT / folder).is_dir() for folder in TOGETHER)
