"""`infra/faults` draws the same faults for the same seed, in every room, and each changes what its line does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from tests.support.infra import INFRA, ROOT, load


@pytest.fixture
def drawing(monkeypatch):
    return load("drawing", monkeypatch)


def test_the_same_seed_draws_the_same_faults_in_every_room(drawing):
    faults = drawing.draw_faults(ROOT, 1, 120)
    assert len(faults) == 120
    assert {fault.operator for fault in faults} == {
        "comparison", "boundary", "boolean", "constant", "dropped call", "swapped arguments",
    }  # fmt: skip
    assert faults == drawing.draw_faults(ROOT, 1, 120)
    assert faults != drawing.draw_faults(ROOT, 2, 120)
    for top in drawing.PRODUCT:
        assert any(fault.file.startswith(f"{top}/") for fault in faults)


def test_each_fault_changes_its_file_and_leaves_it_valid(drawing):
    for fault in drawing.draw_faults(ROOT, 3, 200):
        text = (ROOT / fault.file).read_text()
        changed = fault.apply(text)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), fault
        assert text.encode()[slice(*fault.place)].decode() == fault.old


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("a < b", {"a >= b", "a <= b"}),
        ("a and not b", {"(a or not b)", "bool(b)"}),
        ("f(a, 3)", {"f(3, a)", "4"}),
        ("f(*a, b)", set()),
        ("isinstance(a, b)", set()),
        ("True", {"False"}),
    ],
)
def test_what_becomes_of_an_expression(drawing, line, faults):
    text = f"LIMIT = 4 < 5\n\ndef g(a, b, c=7):\n    return {line}\n"
    assert {fault.new for fault in drawing.faults_of("x.py", text)} == faults


def test_a_call_that_is_a_statement_is_left_out(drawing):
    [fault] = drawing.faults_of("x.py", "def g(a):\n    print(a)\n")
    assert (fault.operator, fault.new) == ("dropped call", "None")


def test_a_process_notes_the_test_of_the_process_that_started_it(tmp_path):
    (tmp_path / "fault_probe.py").write_text((INFRA / "fault_probe.py").read_text())
    notes = tmp_path / "fault-notes"
    notes.mkdir()
    (notes / f"test-{os.getpid()}").write_text("tests/x/test_a.py::test_b")
    line = "import fault_probe; fault_probe.hit(7); fault_probe.hit(7); fault_probe.hit(8)"
    subprocess.run([sys.executable, "-c", line], check=True, cwd=tmp_path, env={})
    [found] = notes.glob("hits-*")
    assert found.read_text() == "7 tests/x/test_a.py::test_b\n8 tests/x/test_a.py::test_b\n"


@pytest.mark.parametrize(
    ("code", "said", "outcome"),
    [
        (0, "3 passed in 1s", "passed"),
        (0, "3 skipped in 1s", "skipped"),
        (5, "no tests ran", "skipped"),
        (1, "1 failed", "failed"),
        (4, "ERROR: not found", "pytest ended with exit code 4: ERROR: not found"),
    ],
)
def test_how_pytest_ends(monkeypatch, code, said, outcome):
    assert load("copies", monkeypatch).classify_outcome(code, said) == outcome
