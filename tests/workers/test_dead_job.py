"""A home that cannot hold a key: each process has its own, and a job whose process has ended is set aside."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace

import pytest

import wherry
from tests.support.jobs import as_dead, killed, made_job, receipts, row_of
from wherry.errors import HostileError
from wherry.store.local_store import locate
from wherry.target import signed_log
from wherry.target.lease import this_process
from wherry.workers import job as job_module
from wherry.workers.commit import commit
from wherry.workers.records import job_records
from wherry.workers.work import work


@pytest.fixture(autouse=True)
def homeless(monkeypatch, tmp_path):
    """A home that is a file, so that it can hold no key."""
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(signed_log.KEY_ENV, raising=False)
    signed_log._own_key.cache_clear()
    yield
    signed_log._own_key.cache_clear()


def ended(monkeypatch):
    """This process names itself as one that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    owner = replace(this_process("aaaaaaaa"), pid=process.pid, process_start=1)
    monkeypatch.setattr(job_module, "owner_text", lambda: json.dumps(owner.to_json()))


def job_of_another(source, target, monkeypatch, state):
    """A job that another process has left: it has another key."""
    with monkeypatch.context() as patch:
        if state != "alive":
            ended(patch)
        made_job(source, target)
        if state == "dead workers":
            as_dead(patch)
        if state != "split":
            killed(target, patch, "_describe_file", 2)
    signed_log._own_key.cache_clear()


@pytest.mark.parametrize("state", ["split", "dead workers"])
def test_the_job_of_a_process_that_has_ended_is_set_aside(source, target, monkeypatch, caplog, state):
    job_of_another(source, target, monkeypatch, state)
    with caplog.at_level(logging.WARNING):
        made_job(source, target)
    assert "set aside" in caplog.text
    assert receipts(target) == {}
    work(target)
    commit(target)
    assert wherry.verify(target, level="digest").ok
    left = [entry.name for entry in locate(target).parent.entries() if entry.name.startswith(".wherry")]
    assert left == []


@pytest.mark.parametrize("state", ["alive", "live worker"])
def test_a_job_with_a_living_process_is_left(source, target, monkeypatch, caplog, state):
    job_of_another(source, target, monkeypatch, state)
    before = job_records(locate(target)).names()
    with pytest.raises(HostileError, match="another key"):
        made_job(source, target)
    assert job_records(locate(target)).names() == before
    assert "set aside" not in caplog.text


def test_a_job_with_the_key_of_a_home_names_no_owner(source, target, monkeypatch, tmp_path):
    """Others may have its key; it is not set aside because this process has another one."""
    monkeypatch.setenv(signed_log.KEY_ENV, "a" * 32)
    made_job(source, target)
    assert row_of(job_records(locate(target)), "job.json")["key_owner"] == ""
    monkeypatch.setenv(signed_log.KEY_ENV, "b" * 32)
    with pytest.raises(HostileError, match="another key"):
        made_job(source, target)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b'{"key_owner": 3}'])
def test_a_record_that_names_nobody_is_left(source, target, text):
    folder = job_records(locate(target))
    folder.begin()
    folder.folder.join("job.json").put(text)
    with pytest.raises(HostileError, match="another key"):
        made_job(source, target)
