"""Wrong clocks: what a machine claims never spoils the ledger, and never removes anything."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.command import typed
from tests.support.ledger import postgres, url
from wherry.errors import StorageError
from wherry.ledger import append as appending
from wherry.ledger import check as checking
from wherry.ledger import clocks
from wherry.ledger.record import check_chain, head, open_ledger, record_event
from wherry.routes import prune as pruning

__all__ = ["postgres", "url"]


def at(**ahead):
    return (datetime.now(UTC) + timedelta(**ahead)).isoformat(timespec="milliseconds")


def note(url, text="x"):
    with open_ledger(url) as ledger:
        return record_event(ledger, "note", None, {"text": text})


def _set_clock(monkeypatch, **ahead):
    for module in (appending, checking, clocks):
        monkeypatch.setattr(module, "utc_now", lambda: at(**ahead))


@pytest.mark.parametrize("days", [365, -365, 2, -2])
def test_a_wrong_clock_is_refused_before_the_append(url, monkeypatch, days):
    note(url)
    _set_clock(monkeypatch, days=days)
    with pytest.raises(
        StorageError, match=f"{abs(days)} d {'ahead of' if days > 0 else 'behind'} that of the"
    ):
        note(url, "late")
    monkeypatch.undo()
    with open_ledger(url) as ledger:
        assert head(ledger).seq == 1
        assert check_chain(ledger).clock is None


@pytest.mark.parametrize("hours", [23, -23, 1, -1])
def test_a_day_and_daylight_saving_are_no_matter(url, monkeypatch, hours):
    _set_clock(monkeypatch, hours=hours)
    note(url)
    monkeypatch.undo()
    note(url)
    with open_ledger(url) as ledger:
        chain = check_chain(ledger)
    assert (chain.statements, chain.altered, chain.clock) == (2, None, None)


def _spoiled(url, monkeypatch):
    """A ledger with a statement of the future, as an earlier wherry wrote it."""
    monkeypatch.setattr(appending, "require_plausible", lambda *_: None)
    monkeypatch.setattr(appending, "utc_now", lambda: at(days=3650))
    note(url)
    monkeypatch.undo()


def test_one_statement_of_the_future_is_a_warning_and_does_not_spread(url, monkeypatch, tmp_path, capfd):
    _spoiled(url, monkeypatch)
    note(url)
    with open_ledger(url) as ledger:
        assert head(ledger).time < at(hours=1)
        chain = check_chain(ledger)
    assert chain.altered is None
    assert chain.clock.startswith("statement 1: its time is in the future")
    code, printed = typed(f"ledger check --ledger {url} --json", tmp_path, capfd)
    assert (code, json.loads(printed)["ok"]) == (0, True)
    code, printed = typed(f"ledger check --ledger {url}", tmp_path, capfd)
    assert "clock:          warning: statement 1: its time is in the future" in printed


def test_prune_believes_no_clock_that_the_ledger_contradicts(url, monkeypatch):
    monkeypatch.setenv("WHERRY_LEDGER", url)
    note(url)
    assert pruning.prune(()).checkpoints == ()
    _set_clock(monkeypatch, days=60)
    with pytest.raises(StorageError, match="60 d ahead of that of the ledger's storage"):
        pruning.prune(())
    monkeypatch.undo()
    monkeypatch.setenv("WHERRY_LEDGER", url)
    _spoiled(url, monkeypatch)
    monkeypatch.setenv("WHERRY_LEDGER", url)
    with pytest.raises(StorageError, match="the last statement of the ledger is of 20"):
        pruning.prune(())
