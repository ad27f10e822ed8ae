"""Retention: what the rules of a route keep, and what they leave to be removed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from wherry.config.schema import Retention
from wherry.errors import CorruptError
from wherry.routes.prune import RetentionEntry, superfluous

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def kept(rules, *rows):
    made = [
        RetentionEntry(f"/{step}", "a", "orbax", step, (NOW - timedelta(days=age)).isoformat(), score)
        for step, age, score in rows
    ]
    return sorted(
        int(uri[1:]) for uri, reason in superfluous(Retention(**rules), made, NOW).items() if reason
    )


def test_a_time_that_no_ledger_stores_is_damage():
    made = [RetentionEntry("/1", "a", "orbax", 1, "zzz")]
    with pytest.raises(CorruptError, match="the ledger holds invalid times: 'zzz'"):
        superfluous(Retention(keep_days=1), made, NOW)


def test_rules():
    rows = [(1, 40, 3.0), (2, 30, 1.0), (3, 20, 2.0), (4, 10, None), (5, 1, 4.0)]
    assert kept({}, *rows) == [1, 2, 3, 4, 5]
    assert kept({"keep_last": 2}, *rows) == [4, 5]
    assert kept({"keep_days": 25}, *rows) == [3, 4, 5]
    assert kept({"keep_best": 1, "metric": "loss"}, *rows) == [2, 4], "an unknown score might be the best"
    assert kept({"keep_best": 1, "metric": "acc", "highest": True}, *rows) == [4, 5]
    assert kept({"keep_last": 1, "keep_best": 1, "metric": "loss"}, *rows) == [2, 4, 5]
    other = [
        RetentionEntry("/b", "b", "orbax", 0, NOW.isoformat()),
        RetentionEntry("/n", "a", "npz", 0, NOW.isoformat()),
    ]
    assert all(superfluous(Retention(keep_last=1), other, NOW).values()), (
        "runs and formats count on their own"
    )
