"""A command says on a terminal which registry it waits for."""

from __future__ import annotations

import logging
import sys

import pytest

from wherry.cli.say import show_waits

LOG = "wherry.ledger.resolve"


@pytest.fixture(autouse=True)
def log():
    """The resolver's log as it was before."""
    found = logging.getLogger(LOG)
    before, level = list(found.handlers), found.level
    yield found
    found.handlers[:] = before
    found.setLevel(level)


@pytest.mark.parametrize(
    ("words", "terminal", "shown"),
    [
        (["detect", "models:/m@champion"], True, True),
        (["detect", "models:/m@champion"], False, False),
        (["detect", "models:/m@champion", "--json"], True, False),
        (["verify", "models:/m@champion", "--quiet"], True, False),
        (["detect", "folder"], True, False),
    ],
)
def test_only_where_a_progress_bar_would_be_shown(words, terminal, shown, monkeypatch, capsys, log):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    show_waits(words)
    log.info("waiting for the model registry %s", "http://host")
    expected = "waiting for the model registry http://host\n" if shown else ""
    assert capsys.readouterr() == ("", expected)
