"""A run of `infra/test` fails where a test is skipped for a reason that nobody has allowed, and says which."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.house import ROOT
from tests.support.skips import allowed

TESTS = """
import pytest

pytest.importorskip("a_package_that_nobody_has") if {absent} else None

def test_one():
    pytest.skip({reason!r})

@pytest.mark.xfail
def test_two():
    assert False
"""


def outcome(folder, reason, *words, absent=False):
    (folder / "test_some.py").write_text(TESTS.format(reason=reason, absent=absent))
    ours = [
        "-q",
        "-p",
        "tests.support.skips",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        folder,
        "-c",
        "/dev/null",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *ours, *words, folder], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("words", [(), ("-p", "xdist.plugin", "-n", "1")], ids=["alone", "worker"])
def test_an_unknown_reason_fails_the_run(tmp_path, words):
    code, said = outcome(tmp_path, "not today", *words)
    assert code == 1
    assert "test_some.py::test_one: Skipped: not today" in said


def test_an_absent_package_fails_the_run(tmp_path):
    code, said = outcome(tmp_path, "", absent=True)
    assert code == 1
    assert "test_some.py: Skipped: could not import 'a_package_that_nobody_has'" in said


def test_a_known_reason_does_not(tmp_path):
    code, said = outcome(tmp_path, "there is no tmpfs")
    assert code == 0, said


def test_the_absence_of_the_corpus_is_a_reason_only_where_it_is_absent(monkeypatch, tmp_path):
    reason = "Skipped: the corpus is not here; WHERRY_CORPUS names its folder"
    monkeypatch.setattr("tests.support.skips.CORPUS", tmp_path)
    assert allowed(reason)
    (tmp_path / "INDEX.json").write_text("[]")
    assert not allowed(reason)
