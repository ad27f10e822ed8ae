"""Wrong clocks: what a machine claims never spoils the ledger, and never removes anything."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.command import typed
from tests.support.ledger import altered, postgres, url
from wherry.errors import StorageError
from wherry.ledger import check as checking
from wherry.ledger import statements as chain
from wherry.ledger.record import check_chain, head, open_ledger, record_event, statements
from wherry.nightly import prune as pruning

__all__ = ["postgres", "url"]


def at(**ahead):
    return (datetime.now(UTC) + timedelta(**ahead)).isoformat(timespec="milliseconds")


def note(url, text="x"):
    with open_ledger(url) as ledger:
        return record_event(ledger, "note", None, {"text": text})


def _set_clock(monkeypatch, **ahead):
    for module in (checking, chain):
        monkeypatch.setattr(module, "utc_now", lambda: at(**ahead))


def _set_clocks_of_statement(monkeypatch, machine, storage):
    """What the next statements state, past the comparison of clocks, as a login could forge it."""
    monkeypatch.setattr(chain, "plausible_clocks", lambda _: chain.ClockReadings(machine, storage))


@pytest.mark.parametrize("days", [365, -365, 2, -2, 1.1, -1.1])
def test_a_wrong_clock_is_refused_before_the_append(url, monkeypatch, days):
    note(url)
    _set_clock(monkeypatch, days=days)
    words = f"{abs(days):.0f} d {'ahead of' if days > 0 else 'behind'} that of the"
    with pytest.raises(StorageError, match=words):
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
        first, second = statements(ledger)
        chain = check_chain(ledger)
    assert (chain.statements, chain.altered, chain.clock) == (2, None, None)
    claimed, stored, now = (datetime.fromisoformat(text) for text in (first.time, first.storage_time, at()))
    assert abs(claimed - stored - timedelta(hours=hours)) < timedelta(minutes=10), "each clock as it was"
    assert abs(now - stored) < timedelta(minutes=10)
    assert (second.time < first.time) == (hours > 0), "a claim is not made to fit the order"


@pytest.mark.parametrize("zones", [("CET-1", "CEST-2"), ("CEST-2", "CET-1"), ("HST10", "LINT-14")])
def test_a_time_zone_that_changes_changes_no_time(url, monkeypatch, zones):
    for zone in zones:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        note(url)
    monkeypatch.undo()
    time.tzset()
    with open_ledger(url) as ledger:
        for statement in statements(ledger):
            for text in (statement.time, statement.storage_time):
                assert abs(datetime.fromisoformat(text) - datetime.now(UTC)) < timedelta(minutes=10)
                assert text.endswith("+00:00")
        assert check_chain(ledger).clock is None


def _spoiled(url, monkeypatch, **ahead):
    """A ledger with a statement of another time, by a machine and a storage whose clocks agree."""
    _set_clocks_of_statement(monkeypatch, at(**ahead), at(**ahead))
    note(url)
    monkeypatch.undo()


def test_one_statement_of_the_future_is_a_warning_and_does_not_spread(url, monkeypatch, tmp_path, capfd):
    _spoiled(url, monkeypatch, days=3650)
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


@pytest.mark.parametrize(
    ("machine", "storage", "words"),
    [
        ({"days": 365}, {}, "its time is in the future"),
        ({}, {"days": 365}, "its time is in the future"),
        ({"days": -365}, {}, "but that of the ledger's storage was"),
        ({"days": -365}, {"days": -365}, "its time is before that of the statement before it"),
        ({"hours": -23}, {}, None),
    ],
    ids=str,
)
def test_the_check_names_a_clock_that_was_wrong(url, monkeypatch, machine, storage, words):
    note(url)
    _set_clocks_of_statement(monkeypatch, at(**machine), at(**storage))
    note(url)
    with open_ledger(url) as ledger:
        chain = check_chain(ledger)
    assert (chain.statements, chain.altered) == (2, None)
    assert chain.clock is None if words is None else words in chain.clock


def test_a_ledger_up_to_a_moment_is_that_of_the_clock_that_all_writers_share(url, monkeypatch):
    for hours, ahead in ((1, 20), (2, -20), (3, 0)):
        _set_clocks_of_statement(monkeypatch, at(days=-9, hours=hours + ahead), at(days=-9, hours=hours))
        note(url)
    with open_ledger(url) as ledger:
        found = [
            [one.seq for one in statements(ledger, until=at(days=-9, hours=hours + 0.5))]
            for hours in range(4)
        ]
    assert found == [[], [1], [1, 2], [1, 2, 3]]


def test_a_storage_time_is_part_of_the_hash(url):
    note(url)
    altered(url, "UPDATE statement SET storage_time = '2001-01-01T00:00:00.000+00:00'")
    with open_ledger(url) as ledger:
        assert check_chain(ledger).altered == "statement 1: its contents were altered"


@pytest.mark.parametrize("days", [1.1, 60, 365, -1.1, -365])
def test_prune_believes_no_clock_that_the_ledger_contradicts(url, monkeypatch, days):
    monkeypatch.setenv("WHERRY_LEDGER", url)
    note(url)
    assert pruning.prune(()).checkpoints == ()
    _set_clock(monkeypatch, days=days)
    with pytest.raises(StorageError, match=r"d (ahead of|behind) that of the ledger's storage"):
        pruning.prune(())


def test_prune_removes_nothing_after_a_statement_of_the_future(url, monkeypatch):
    _spoiled(url, monkeypatch, days=365)
    monkeypatch.setenv("WHERRY_LEDGER", url)
    with pytest.raises(StorageError, match="the last statement of the ledger is of 20"):
        pruning.prune(())
