"""infra/test ends with what each file of tests took, and with what the suites of kills and faults tried."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from types import SimpleNamespace

import pytest

from tests.support.infra import INFRA

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="one" time="2.5">
<properties><property name="kills" value="3"/></properties></testcase>
<testcase classname="tests.test_a.TestGroup" name="two" time="1"><failure message="no"/></testcase>
<testcase classname="tests.test_b" name="one" time="9">
<properties><property name="kills" value="4"/></properties></testcase>
<testcase classname="tests.test_b" name="two" time="0"><skipped message="no corpus"/></testcase>
<testcase classname="" name="tests.test_broken" time="0"><error message="cannot be imported"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(INFRA))
    loader = SourceFileLoader("infra_test", str(INFRA / "test"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_files_by_their_time_and_sums(script, tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert script.summary(report) == [
        "    9.0 s  test_b: 1 passed, 1 skipped",
        "    3.5 s  test_a: 1 passed, 1 failed",
        "    0.0 s  tests.test_broken: 1 failed",
        "   12.5 s  in all: 2 passed, 2 failed, 1 skipped, 7 kills",
    ]


def test_a_file_beyond_its_budget_is_marked(script, tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert (
        script.summary(report, budget=8)[0]
        == "    9.0 s  test_b: 1 passed, 1 skipped (over the budget of 8 s)"
    )
    assert not any("budget" in line for line in script.summary(report, budget=9)[1:])


@pytest.mark.parametrize(("words", "named"), [([], False), (["-x", "-k", "digest"], False), (["tests/core"], True),
                                              (["-x", "tests/core/test_digest.py::test_a"], True)])  # fmt: skip
def test_tests_that_are_named_run_whole(script, words, named):
    assert script.names_tests(words) is named


def test_the_rooms_of_the_last_commits_come_first(script, monkeypatch):
    said = "wherry/mover/carrier.py\ntests/text/test_toml.py\nREADME.md\nintegrations/formats/dcp/read.py\n"
    monkeypatch.setattr(script.subprocess, "run", lambda *_words, **_more: SimpleNamespace(stdout=said))
    assert {"mover", "text", "dcp", "formats"} <= {*script.changed_rooms()}


def test_pytest_reports_what_is_summed_up(script, tmp_path, reported):
    report = reported(tmp_path)
    assert any("2 tries" in line for line in script.summary(report))


@pytest.fixture
def reported():
    """Run pytest itself on a file with one recorded property; the report."""

    def make(folder):
        (folder / "test_x.py").write_text("def test_x(record_property):\n    record_property('tries', 2)\n")
        report = folder / "x.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            folder,
        ]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
        return report

    return make
