"""Developers' tools: each is run."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import wherry
from tests.support import held_runs, server_matrix
from tests.support.browser import SCREENS, THEMES
from tests.support.demo import first_story
from tests.support.infra import INFRA, ROOT, load
from tests.support.readme import DEPLOY, INSTALL, PAGES, SERVERS, TRIAL
from tests.support.server_matrix import AT_WORK, FLOWS, MOMENTS, PARTS, Away, run_matrix
from tests.support.server_matrix import SERVERS as SERVERS_OF_MATRIX


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


def test_a_process_notes_the_test_of_the_process_that_started_it(tmp_path):
    (tmp_path / "fault_probe.py").write_text((INFRA / "fault_probe.py").read_text())
    notes = tmp_path / "fault-notes"
    notes.mkdir()
    (notes / f"test-{os.getpid()}").write_text("tests/x/test_a.py::test_b")
    line = "import fault_probe; fault_probe.hit(7); fault_probe.hit(7); fault_probe.hit(8)"
    subprocess.run([sys.executable, "-c", line], check=True, cwd=tmp_path, env={})
    [found] = notes.glob("hits-*")
    assert found.read_text() == "7 tests/x/test_a.py::test_b\n8 tests/x/test_a.py::test_b\n"


# `infra/house` counts what it says that it counts, and the words that the code avoids are at zero.


PRODUCT = [ROOT / folder for folder in ("wherry", "integrations", "flows", "tasks")]


def house(*options: str, root: Path = ROOT) -> Any:
    """What the script prints of a checkout, with a Python that has wherry."""
    command = [sys.executable, root / "infra" / "house", "--json", *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout)


def test_rooms_add_up_to_the_product_and_a_conversion_enters_some():
    *rooms, total = house("--trace")
    texts = [path.read_text() for folder in PRODUCT for path in folder.rglob("*.py")]
    assert total["files"] == len(texts)
    assert total["lines"] == sum(text.count("\n") for text in texts)
    statements = (isinstance(node, ast.stmt) for text in texts for node in ast.walk(ast.parse(text)))
    assert total["statements"] == sum(statements)
    for name in total.keys() - {"name"}:
        assert total[name] == sum(room[name] for room in rooms)
    by_name = {room["name"]: room for room in rooms}
    assert {"wherry/mover", "integrations/formats", "flows", "tasks"} <= by_name.keys()
    assert by_name["wherry/mover"]["entered_files"] > 0
    assert by_name["wherry/trace"]["entered_files"] == 0
    assert total["entered_functions"] > total["entered_files"]


def test_words_that_the_code_avoids_are_gone():
    """In names, comments and docstrings; keys of records and texts of other software are strings."""
    assert house("--words") == []


# infra/test: a log of CI is cut in its middle, so its end names what failed.

REPORT = """<testsuites><testsuite>
<testcase classname="tests.core.test_a" name="test_good" time="0.5"/>
<testcase classname="tests.core.test_a" name="test_bad[1]" time="1">
<failure message="assert 1 == 2&#10; more"/></testcase>
<testcase classname="tests.core.test_b" name="test_left"><skipped message="no corpus"/></testcase>
<testcase classname="tests.core.test_b" name="test_late" time="2"><error message="failed on teardown"/></testcase>
</testsuite></testsuites>"""


def test_the_end_of_a_log_names_what_failed(tmp_path):
    loader = SourceFileLoader("infra_test", str(INFRA / "test"))
    module = module_from_spec(spec_from_loader("infra_test", loader))
    loader.exec_module(module)
    (tmp_path / "report.xml").write_text(REPORT)
    assert module.failures(tmp_path / "report.xml") == [
        "failure of tests.core.test_a::test_bad[1]: assert 1 == 2",
        "error of tests.core.test_b::test_late: failed on teardown",
    ]
    assert module.summary(tmp_path / "report.xml")[-1].endswith("1 passed, 2 failed, 1 skipped")


# infra/newcomer: what it takes from the platform guide, and the whole way in an empty environment.


@pytest.fixture
def newcomer(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    loader = SourceFileLoader("newcomer", str(INFRA / "newcomer"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("newcomer", loader))
    monkeypatch.setitem(sys.modules, "newcomer", module)
    loader.exec_module(module)
    return module


def test_what_is_typed_is_what_the_guide_shows(newcomer):
    guide = newcomer.sections()
    assert list(guide) == [1, 2, 3, 4, 5]
    assert [guide[number][1] for number in (1, 3, 4, 5)] == [INSTALL, TRIAL, SERVERS, DEPLOY]
    assert tomllib.loads(newcomer.routes())["routes"]["t5x"]["root"] == str(
        newcomer.Path(newcomer.RUN).parent
    )
    lines = "\n".join(block for _title, block in guide.values())
    assert all(re.search(f"^{command}", lines, re.MULTILINE) for command in newcomer.LASTING)
    assert DEPLOY.partition("wherry emit ")[2].startswith(f"{newcomer.RUN}/checkpoint_1000")


def test_only_ports_and_the_wheel_differ_from_the_guide(newcomer, capsys):
    typed = []

    class Site:
        def run(self, *words, **_):
            typed.append(words[-1])
            return ""

    ports = {"4200": "41", "5000": "51"}
    one = newcomer.Newcomer(
        Site(), newcomer.Path("/w/wherry-1-py3-none-any.whl"), newcomer.Path("python"), ports
    )
    one.type("pip install '.[prefect,mlflow]'")
    one.type("wherry emit --api http://127.0.0.1:4200/api runs/5000  # as :5000 is")
    assert typed == [
        "pip install '/w/wherry-1-py3-none-any.whl[prefect,mlflow]'",
        "wherry emit --api http://127.0.0.1:41/api runs/5000  # as :51 is",
    ]
    assert "$ pip install '.[prefect,mlflow]'" in capsys.readouterr().out
    one.wheel = None
    one.type("pip install '.[prefect,mlflow]'")
    assert len(typed) == 2


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(3000)
def test_the_guide_leads_to_a_good_night_in_an_empty_environment(tmp_path):
    tools = tmp_path / "environment" / "bin"
    tools.mkdir(parents=True)
    python = tools / "python"  # the environment of these tests, used as it is
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [INFRA / "newcomer"], env={**os.environ, "WHERRY_VENV": str(tools.parent)}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    print(done.stdout)
    minutes = re.search(r"^ *(\d+\.\d) min  to the first good night on a worker", done.stdout, re.MULTILINE)
    seconds = re.search(r"^ *(\d+\.\d) s    from the event to the run that works", done.stdout, re.MULTILINE)
    assert float(minutes[1]) <= 5
    assert float(seconds[1]) <= 10


# The pictures of README: taken from a real browser, with the words that they are to show, and small
# enough.


NAMES = ["prefect-nightly", "mlflow-version", "mlflow-run", "lineage"]


@pytest.fixture
def screenshots(monkeypatch):
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    module = load("screenshots", monkeypatch)
    if not Path(module.CHROMIUM).is_file():
        pytest.skip(f"there is no {module.CHROMIUM}")
    return module


def size_of(file):
    """Width and height of a PNG."""
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("name", NAMES)
def test_the_pictures_that_readme_shows_are_there(name):
    file = INFRA / "pictures" / f"{name}.png"
    assert 10_000 < file.stat().st_size <= 250_000
    assert size_of(file)[0] >= 1280


def test_the_script_explains_itself_and_makes_nothing(tmp_path):
    environment = {**os.environ, "WHERRY_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        [INFRA / "screenshots", "--help"],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.stdout.startswith("usage: infra/screenshots")
    assert list(tmp_path.iterdir()) == []


def test_a_page_without_the_words_is_no_picture(tmp_path, screenshots):
    (tmp_path / "page.html").write_text("<p>one</p><p style='display: none'>two</p>")
    url = (tmp_path / "page.html").as_uri()
    good, bad = screenshots.Page("good", url, ("one",)), screenshots.Page("bad", url, ("two",))
    assert size_of(screenshots.take([good], tmp_path, patience=10)[0]) == good.size
    with pytest.raises(SystemExit, match="'two' not found on"):
        screenshots.take([bad], tmp_path, patience=1)
    assert not (tmp_path / "bad.png").exists()


def test_docs_show_own_pages_on_every_screen_in_both_themes(screenshots):
    for name, screen, theme in screenshots.SHOWN:
        file = INFRA / "pictures" / "screens" / f"{name}-{screen}-{theme}.png"
        assert size_of(file) == screenshots.SCREENS[screen]
        assert f"(../infra/pictures/screens/{file.name})" in PAGES["look"]
    assert {screen for _name, screen, _theme in screenshots.SHOWN} == set(SCREENS)
    assert screenshots.SCREENS == SCREENS
    assert {theme for _name, _screen, theme in screenshots.SHOWN} == set(THEMES)


@pytest.mark.slow
@pytest.mark.server
def test_a_browser_shows_what_the_demo_left(tmp_path, screenshots):
    story = first_story()
    assert story.code == 0, story.text
    with patch.dict(os.environ):
        screenshots.demo.settle(story.folder)
        with screenshots.servers(story.folder) as (prefect, mlflow), screenshots.served_ledger() as ledger:
            own = [*screenshots.screens(story.folder, ledger)]
            files = screenshots.take([*screenshots.pages(prefect, mlflow, story.folder), *own], tmp_path)
    assert [file.stem for file in files[:4]] == NAMES
    assert len(files) == len(NAMES) + len(screenshots.SHOWN)
    assert all(file.stat().st_size <= screenshots.LARGEST for file in files)


# infra/device-check: the libraries hold on the device what wherry recorded, and a difference is seen.


SCRIPT = Path(__file__).parents[2] / "infra" / "device-check"


@pytest.fixture(scope="module")
def script():
    spec = spec_from_loader("device_check", SourceFileLoader("device_check", str(SCRIPT)))
    module = module_from_spec(spec)
    sys.modules["device_check"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["device_check"]


@pytest.mark.full
def test_every_result_is_restored_as_recorded(tmp_path):
    words = ["--here", "--size", "2", "--json", "--scratch", str(tmp_path)]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert [(row["result"], row["equal"], row["tensors"]) for row in rows] == [
        ("orbax", 32, 32),
        ("dcp", 32, 32),
        ("huggingface", 32, 32),
    ]
    assert all(row["load_seconds"] > 0 and row["export_seconds"] > 0 for row in rows)
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_a_value_that_differs_on_the_device_is_seen(script, tmp_path):
    source, target = tmp_path / "source.safetensors", tmp_path / "dcp"
    script.make_source(source, 1 << 20)
    wherry.convert(source, target, to="dcp", family="none", lineage=False)
    held = script.by_torch(target)
    recorded = script.digests_of(target)
    assert dict(script.hashed(held, target)) == recorded
    name = next(iter(held.state))
    held.state[name][0, 0] += 1
    differing = {key for key, digest in script.hashed(held, target) if digest != recorded[key]}
    assert differing == {name}
    row = script.Row("dcp", "torch", "cpu", 1, 1.0, len(recorded) - len(differing), len(recorded), 1.0)
    assert not row.ok
    assert replace(row, equal=len(recorded)).ok


# The matrix of servers, whole; and that a run of it is held where it says, and its table names what broke
# the rule.


pytest.importorskip("prefect")
pytest.importorskip("mlflow")
pytest.importorskip("psycopg")


HELD = """
import textwrap
print(textwrap.dedent("  done"), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("flow", FLOWS)
def test_the_next_run_completes_whatever_is_killed_whenever(flow, tmp_path):
    cells = run_matrix(tmp_path, (flow,), PARTS, MOMENTS)
    assert [one for one in cells if not one.holds] == []
    assert len(cells) == len(PARTS) * len(MOMENTS) - 1


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_server_that_is_away_for_a_minute_changes_no_end(stopped, tmp_path):
    cells = run_matrix(tmp_path, ("nightly", "promote"), SERVERS_OF_MATRIX, AT_WORK, away=Away(60.0, stopped))
    assert [one for one in cells if not one.holds] == []
    assert len(cells) == 18


def test_a_process_is_held_at_a_function_until_it_may_go_on(tmp_path):
    variables = held_runs.install(tmp_path / "held")
    wanted, reached = tmp_path / "held" / "wanted" / "a-run", tmp_path / "held" / "reached" / "a-run"
    wanted.write_text("textwrap:dedent")
    environment = {**os.environ, **variables, held_runs.RUN: "a-run"}
    with subprocess.Popen(
        [sys.executable, "-c", HELD], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        while not reached.exists():
            assert process.poll() is None
            time.sleep(0.01)
        assert process.poll() is None
        wanted.unlink()
        assert process.communicate(timeout=60)[0] == "done\n"
    assert process.returncode == 0


def test_the_table_names_what_broke_the_rule():
    row = {"flow": "nightly", "part": "all", "moment": "running", "killed": "Crashed", "following": "Completed",
           "open": [], "missed": True, "commit": "c"}  # fmt: skip
    bad = {
        **row,
        "part": "server",
        "following": "Failed",
        "open": ["MLflow: run a|b is RUNNING"],
        "missed": False,
    }
    page = server_matrix.table({"machine": "m", "cells": [row, bad]})
    assert "ok (Crashed, later)" in page
    assert r"**Failed** (Crashed): MLflow: run a\|b is RUNNING" in page
    assert "| run | – | not run |" in page


def test_the_shipped_automations_are_those_whose_times_are_shortened(tmp_path):
    assert server_matrix._automations(tmp_path).exists()
