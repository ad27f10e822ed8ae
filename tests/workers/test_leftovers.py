"""`wherry clean` knows each leftover of a job: of one that was only split, half made, or made and never committed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.jobs import Killed, as_dead, killed, made_job
from tests.support.object_stores import uploads_below
from wherry.storage.stores import locate
from wherry.target.clean import clean
from wherry.workers.commit import commit
from wherry.workers.work import work


def everything_below(target):
    return sorted(entry.name for entry in locate(target).parent.walk())


def stopped(*_arguments):
    raise Killed


def aged(target):
    """Make everything look two hours old."""
    if target.startswith("/"):
        for path in Path(target).parent.rglob("*"):
            os.utime(path, (time.time() - 7200,) * 2)


@pytest.mark.parametrize("state", ["split", "killed", "made", "committing"])
def test_clean_removes_a_job_that_nobody_works_on(source, target, monkeypatch, state):
    made_job(source, target)
    if state == "killed":
        with monkeypatch.context() as patch:
            as_dead(patch)
            killed(target, patch, "_describe_file", 2)
    if state in ("made", "committing"):
        work(target)
    if state == "committing":
        with monkeypatch.context() as patch:
            patch.setattr("wherry.converter.job.complete", stopped)
            with pytest.raises(Killed):
                commit(target)
    aged(target)
    before = everything_below(target)
    assert any(name.startswith(".wherry-out.job/") for name in before)
    reports = clean(locate(target).parent.uri, min_age=0)
    assert reports
    assert all(report.removed for report in reports)
    assert everything_below(target) == []
    assert uploads_below(target) == [] if not target.startswith("/") else True


def test_clean_leaves_a_job_that_somebody_works_on(source, target):
    made_job(source, target)
    work(target)
    before = everything_below(target)
    [report] = clean(locate(target).parent.uri)
    assert not report.removed
    assert report.reason == "changed within the hour; may be in use"
    assert everything_below(target) == before
