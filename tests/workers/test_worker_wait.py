"""How long the coordinator waits for workers, what it says meanwhile, and what its error says."""

from __future__ import annotations

import time

import pytest

from tests.support.jobs import receipts
from tests.support.waits import waits_reported_at_once
from tests.support.worker_pools import ImaginaryPool, carried, committed_as_by_one, job_of, makes
from wherry.errors import StorageError, UsageError
from wherry.workers import coordinator
from wherry.workers import work as working

HANGS = ImaginaryPool.HANGS


@pytest.fixture
def target(tmp_path):
    return str(tmp_path / "out")


class SpotPool(ImaginaryPool):
    """Its machines are all lost in the fourth unit; another comes when `seconds` have passed."""

    def __init__(self, seconds):
        super().__init__("ab", self._lost)
        self.seconds, self.since = seconds, None

    def present(self):
        if self.since is not None and time.monotonic() - self.since > self.seconds:
            self.workers = {"c"}
        return super().present()

    def _lost(self, worker, function, _call):
        if worker == "c" or not makes(function) or sum("unit-" in title for _w, title in self.calls) < 4:
            return None
        self.since, self.workers = self.since or time.monotonic(), set()
        return HANGS


def test_machines_that_are_lost_together_are_waited_for(source, target, tmp_path, monkeypatch):
    made, pool = job_of(source, target), SpotPool(0.6)
    with waits_reported_at_once(monkeypatch) as lines:
        assert sorted(carried(made, pool)) == list(range(12))
    line = f"{made.uri}: waiting for a worker that can make units (there is none; gives up after 10:00)"
    assert lines.count(line) == 1
    assert len(pool.units_of("c")) == 9
    assert committed_as_by_one(made, source, tmp_path)


def test_the_error_says_that_the_next_run_resumes_which_it_does(source, target, tmp_path, monkeypatch):
    made = job_of(source, target)
    monkeypatch.setenv("WHERRY_WORKER_WAIT", "0.2s")
    with pytest.raises(StorageError, match="no worker can make units; there is none") as caught:
        carried(made, SpotPool(60))
    assert caught.value.retryable
    assert "run the same command again; it resumes with the units that are left" in caught.value.cure
    assert "WHERRY_WORKER_WAIT" in caught.value.cure
    assert len(receipts(target)) == 3
    pool = ImaginaryPool("d")
    assert sorted(carried(job_of(source, target), pool)) == list(range(12))
    assert len(pool.units_of("d")) == 9
    assert committed_as_by_one(made, source, tmp_path)


def test_workers_that_have_failed_their_proof_are_named_and_waited_for_a_minute_at_most(
    source, target, monkeypatch
):
    """Who has another key, wherry or storage will not get better; a new machine may come."""
    made = job_of(source, target)
    monkeypatch.setattr(coordinator, "REFUSED_SECONDS", 0.3)
    pool = ImaginaryPool("abcde", lambda *_: {"problem": "it has another plan"})
    rows = "a: it has another plan; b: it has another plan; c: it has another plan; 2 others"
    with waits_reported_at_once(monkeypatch) as lines, pytest.raises(StorageError, match=f"units; {rows} "):
        carried(made, pool)
    assert f"{made.uri}: waiting for a worker that can make units ({rows}; gives up after 0 s)" in lines


def test_a_machine_that_is_replaced_by_one_that_cannot_is_still_waited_for(source, target, monkeypatch):
    """A coordinator that had workers waits the whole time for the next."""
    made, pool = job_of(source, target), SpotPool(0.1)
    monkeypatch.setattr(coordinator, "REFUSED_SECONDS", 0.0)
    real = working.prove

    def late(worker, function, call):
        if worker == "c" and function == "prove":
            pool.workers, pool.present = {"d"}, lambda: {"c"} if time.monotonic() - begun < 0.6 else {"d"}
            return {**real(made.uri, "00000000"), "problem": "it has another plan"}
        return None if worker == "d" else pool._lost(worker, function, call)

    begun, pool.faults = time.monotonic(), late
    assert sorted(carried(made, pool)) == list(range(12))
    assert pool.units_of("d")


def test_the_time_is_a_setting(tmp_path, monkeypatch):
    assert coordinator.worker_wait() == coordinator.WAIT_SECONDS == 600
    (tmp_path / "wherry.toml").write_text('worker_wait = "30m"\n')
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))
    assert coordinator.worker_wait() == 1800
    monkeypatch.setenv("WHERRY_WORKER_WAIT", "1h")
    assert coordinator.worker_wait() == 3600
    monkeypatch.setenv("WHERRY_WORKER_WAIT", "soon")
    with pytest.raises(UsageError, match="invalid duration 'soon'"):
        coordinator.worker_wait()
