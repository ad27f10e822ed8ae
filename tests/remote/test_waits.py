"""Which waits are reported, when, and to whom."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from wherry.remote import waits
from wherry.remote.waits import reporting_waits_to, waiting


@pytest.fixture
def watch(monkeypatch):
    """A watch of its own, with a clock that the test sets; it looks at once."""
    found = waits._Watch()
    monkeypatch.setattr(waits, "_watch", found)
    return found


def test_a_line_after_two_seconds_and_then_every_half_minute(watch):
    with waiting("gs://bucket/key", 6) as wait:
        begin = wait.since
        assert watch.look(begin + 1.9) == []
        wait.attempt = 2
        assert watch.look(begin + 2) == ["gs://bucket/key has not answered for 2 s; attempt 2 of 6"]
        assert watch.look(begin + 31) == []
        assert watch.look(begin + 43) == ["gs://bucket/key has not answered for 43 s; attempt 2 of 6"]
    assert watch.look(begin + 100) == []


def test_one_line_for_each_bucket_about_its_oldest_wait(watch):
    with waiting("gs://bucket/a", 6) as first, waiting("gs://bucket/b", 6), waiting("s3://other/c", 6):
        assert [line.split()[0] for line in watch.look(first.since + 20)] == ["gs://bucket/a", "s3://other/c"]


def test_the_work_of_others_has_its_own_line(watch):
    with (
        waiting("models:/small", what="another process that moves its aliases") as first,
        waiting("models:/small"),
    ):
        assert watch.look(first.since + 12) == [
            "models:/small: waiting for another process that moves its aliases, 12 s so far",
            "models:/small has not answered for 12 s",
        ]


@pytest.mark.parametrize("listens", [True, False])
def test_the_line_reaches_the_log_or_the_run(listens, watch, monkeypatch, caplog):
    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(waits, "_LOOK_SECONDS", 0.01)
    lines, reported = [], threading.Event()

    def say(line):
        lines.append(line)
        reported.set()

    caplog.set_level(logging.WARNING, waits.__name__)
    if listens:
        with reporting_waits_to(say), waiting("gs://bucket/key", 6):
            assert reported.wait(10)
        assert not caplog.records
    else:
        with waiting("gs://bucket/key", 6):
            deadline = time.monotonic() + 10
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.01)
        lines = [record.getMessage() for record in caplog.records]
    assert lines == ["gs://bucket/key has not answered for 0 s; attempt 1 of 6"]


def test_the_thread_ends_with_the_last_wait(watch, monkeypatch):
    monkeypatch.setattr(waits, "_LOOK_SECONDS", 0.01)
    with waiting("gs://bucket/key"):
        assert watch._running
    deadline = time.monotonic() + 10
    while watch._running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not watch._running


def until(true):
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true()


def test_a_thread_that_fails_is_followed_by_another(watch, monkeypatch, caplog):
    def fails(_line):
        raise RuntimeError("of a listener")

    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(waits, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    with monkeypatch.context() as patch:
        patch.setattr(waits, "_tell", fails)
        with waiting("gs://a/x"):
            until(lambda: not watch._running)
    with waiting("gs://b/x"):
        until(lambda: any("gs://b/x" in record.getMessage() for record in caplog.records))
