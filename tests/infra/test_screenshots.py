"""The pictures of README: taken from a real browser, with the words that they are to show, and small enough."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.browser import SCREENS, THEMES
from tests.support.demo import first_story
from tests.support.infra import INFRA, load
from tests.support.readme import PAGES

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
