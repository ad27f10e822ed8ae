"""A worker that comes back from the dead when all is over."""

from __future__ import annotations

import wherry
from tests.support.jobs import committed, made_job, slow_worker, undisturbed
from tests.support.object_stores import leftover_names, uploads_below
from wherry.storage.stores import locate
from wherry.target.clean import clean
from wherry.workers.work import work


def test_a_worker_that_comes_back_after_the_commit_changes_nothing(source, target, tmp_path, monkeypatch):
    """Its unit was made by another, the target is committed, the job is removed; `wherry clean` knows what it left."""
    made_job(source, target)
    with slow_worker(target, monkeypatch):
        work(target, expiry=0.3)
        receipt = committed(target)
        before = {entry.name: entry.size for entry in locate(target).walk()}
    assert {entry.name: entry.size for entry in locate(target).walk()} == before
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest
    assert wherry.verify(target, level="digest").ok
    assert all(report.removed for report in clean(locate(target).parent.uri, min_age=0))
    assert [name for name in leftover_names(target) if not name.startswith("undisturbed")] == []
    assert wherry.verify(target, level="digest").ok
    if not target.startswith("/"):
        assert uploads_below(target) == []
