"""infra/newcomer: what it takes from the platform guide, and the whole way in an empty environment."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader

import pytest

from tests.support.infra import INFRA
from tests.support.readme import DEPLOY, INSTALL, SERVERS, TRIAL


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
