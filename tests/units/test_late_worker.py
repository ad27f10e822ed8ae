"""A worker that comes back from the dead when all is over."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext, suppress

import wherry
from tests.support.jobs import as_elsewhere, committed, made_job, undisturbed
from tests.support.object_stores import left_beside, uploads_below
from wherry.errors import StorageError, TargetExistsError
from wherry.records import claims
from wherry.records.claims import Claims
from wherry.records.records import records_beside
from wherry.staging.clean import clean
from wherry.storage.stores import locate
from wherry.units import make
from wherry.units.work import work


def _quietly(target):
    with suppress(
        TargetExistsError, StorageError
    ):  # its object was made by the other worker, or its folder is gone
        work(target)


def test_a_worker_that_comes_back_after_the_commit_changes_nothing(source, target, tmp_path, monkeypatch):
    """Its unit was made by another, the target is committed, the job is removed; `wherry clean` knows what it left."""
    made_job(source, target)
    real, back = make.finish, threading.Event()

    def slow(writer):
        if threading.current_thread().name == "slow":
            back.wait(60)
        real(writer)

    monkeypatch.setattr(make, "finish", slow)
    monkeypatch.setattr(Claims, "renewed", lambda _self, _claim, _unit: nullcontext())
    with monkeypatch.context() as patch:
        as_elsewhere(patch)
        thread = threading.Thread(target=lambda: _quietly(target), name="slow")
        thread.start()
        while not claims.claims_among(records_beside(locate(target)).names()):
            time.sleep(0.02)
    work(target, expiry=0.3)
    receipt = committed(target)
    before = {entry.name: entry.size for entry in locate(target).walk()}
    back.set()
    thread.join()
    assert {entry.name: entry.size for entry in locate(target).walk()} == before
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest
    assert wherry.verify(target, level="digest").ok
    assert all(report.removed for report in clean(locate(target).parent.uri, min_age=0))
    assert [name for name in left_beside(target) if not name.startswith("undisturbed")] == []
    assert wherry.verify(target, level="digest").ok
    if not target.startswith("/"):
        assert uploads_below(target) == []
