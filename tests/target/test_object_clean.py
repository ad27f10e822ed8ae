"""clean in a store of objects: everything of dead runs, nothing of living ones, and nothing of a committed target."""

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

import wherry
from tests.support.object_stores import (
    Killed,
    leftover_names,
    model,
    release,
    small_parts,
    uploads_below,
    watched,
)
from wherry.store.local_store import locate
from wherry.store.location import MOST_CONFIG
from wherry.store.memory import MemoryStore
from wherry.store.store import AnonymousUpload
from wherry.target import clean as clean_module
from wherry.target.clean import clean, tidy
from wherry.target.journal import JournalPast
from wherry.target.lease import LeaseObject, lease_of, this_process
from wherry.target.object_staging import sent_before

OPTIONS = {"max_shard_size": "500KB"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(autouse=True)
def parts():
    with small_parts():
        yield


@pytest.fixture
def target(tmp_path):
    return f"memory://cleaned{tmp_path}/out"


@pytest.fixture
def killed(source, target):
    with watched(fatal=36, only=("put_part",)), pytest.raises(Killed):
        wherry.convert(source, target, to="hf", options=OPTIONS, lineage=False)
    release(target)
    return target


def root(target):
    return locate(target).parent.uri


def test_everything_of_a_killed_run_is_removed(killed):
    assert locate(killed).exists()
    assert uploads_below(killed)
    (report,) = clean(root(killed), min_age=0)
    assert report.removed
    assert report.nbytes > 10_000
    assert ".wherry-out." in report.uri
    assert not locate(killed).exists()
    assert leftover_names(killed) == []
    assert uploads_below(killed) == []
    assert clean(root(killed), min_age=0) == []


def test_a_journal_longer_than_a_config_is_read_as_by_a_run(killed):
    (dry,) = clean(root(killed), dry_run=True)
    locate(dry.uri).join("journal-999999").put(b"-" * (MOST_CONFIG + 1))
    (report,) = clean(root(killed), min_age=0)
    assert report.removed
    assert not locate(killed).exists()
    assert leftover_names(killed) == []


def test_a_dry_run_only_names_what_is_left(killed):
    before = leftover_names(killed)
    (dry,) = clean(root(killed), dry_run=True)
    assert (dry.removed, dry.reason) == (False, "dry run")
    assert leftover_names(killed) == before


def test_the_age_of_what_a_dead_run_left_does_not_matter(killed, monkeypatch):
    monkeypatch.setattr("wherry.target.clean.modified_time", lambda *_: pytest.fail("it was looked at"))
    (young,) = clean(root(killed), min_age=1e12)
    assert (young.removed, young.reason) == (True, "stale")


def test_the_uploads_are_listed_before_the_leases(target, monkeypatch):
    """Else a run that begins in between has an upload, and seems to have no lease."""
    place = locate(target)
    store, real = place.store, clean_module._staging_entries
    with ExitStack() as stack:

        def listed(folder):
            found = list(real(folder))
            lease = lease_of(place)
            stack.enter_context(lease)
            store.begin(place.path, lease.token)
            return found

        monkeypatch.setattr(clean_module, "_staging_entries", listed)
        place.parent.join("other").put(b"")
        assert clean(root(target)) == []
        assert uploads_below(target)


def test_what_a_living_run_holds_is_left(killed):
    with lease_of(locate(killed)):
        (report,) = clean(root(killed), min_age=0)
    assert (report.removed, report.reason) == (False, "a running job holds its lease")
    assert uploads_below(killed)


def test_a_committed_target_keeps_its_objects(source, target, monkeypatch):
    """Killed just after the commit, a run leaves its journal; the objects that this names are the checkpoint."""
    monkeypatch.setattr("wherry.target.signed_log.ObjectSink.remove", lambda *_arguments: None)
    wherry.convert(source, target, to="hf", options=OPTIONS, lineage=False)
    assert any("journal" in name for name in leftover_names(target))
    (report,) = clean(root(target), min_age=0)
    assert report.removed
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []


def test_objects_of_others_in_the_folder_are_left(killed):
    locate(killed).join("notes.txt").put(b"notes")
    clean(root(killed), min_age=0)
    assert [entry.name for entry in locate(killed).walk()] == ["notes.txt"]


def test_an_upload_without_anything_else_is_named_and_aborted(target):
    place = locate(target)
    place.store.begin(place.path, "run")
    (report,) = clean(root(target), min_age=0)
    assert (report.uri, report.removed) == (place.uri, True)
    assert uploads_below(target) == []


@pytest.fixture
def anonymous_uploads(monkeypatch):
    """A function that makes a store report when its uploads were begun, but not by whom, as S3 does."""
    real = MemoryStore.uploads

    def begin(days):
        begun = time.time() - days * 86_400
        monkeypatch.setattr(
            MemoryStore,
            "uploads",
            lambda self, prefix: (
                AnonymousUpload(one.path, one.key, "", begun) for one in real(self, prefix)
            ),
        )

    return begin


def test_an_upload_that_another_program_may_have_begun_is_left_for_a_week(target, anonymous_uploads):
    place = locate(target)
    place.store.begin(place.path, "not ours")
    anonymous_uploads(days=6)
    (report,) = clean(root(target))
    assert (report.uri, report.removed) == (place.uri, False)
    assert "perhaps by another program" in report.reason
    assert uploads_below(target)
    anonymous_uploads(days=8)
    (report,) = clean(root(target))
    assert report.removed
    assert uploads_below(target) == []


def test_an_upload_to_a_staging_object_is_of_nobody_else(target, anonymous_uploads):
    """Its beginning was late: its run had ended, and had looked for uploads, before the store got the request."""
    place = locate(target)
    store = place.store
    store.begin(place.parent.join(".wherry-out.0123abcd/wherry.json").path, "run")
    other = store.begin(place.path, "perhaps of another program")
    anonymous_uploads(days=0)
    (report,) = clean(root(target))
    assert (report.uri, report.removed) == (place.uri, True)
    assert [one.key for one in store.uploads(place.parent.path)] == [other.key]


def test_an_upload_with_other_leftovers_of_a_run_is_its_own(killed, anonymous_uploads):
    anonymous_uploads(days=-1)
    (report,) = clean(root(killed), min_age=0.001)
    assert report.removed
    assert uploads_below(killed) == []


def test_a_lease_that_a_dead_process_left_is_removed(target, monkeypatch):
    place = locate(target)
    lease = place.parent.join(".wherry-out.lease")
    monkeypatch.setattr(LeaseObject, "expiry", 0.1)
    monkeypatch.setattr("wherry.target.lease.LOOK_SECONDS", 0.02)
    place.store.put_object(lease.path, b"of another machine", "run")
    (report,) = clean(root(target), min_age=0)
    assert (report.uri, report.removed) == (lease.uri, True)
    assert not lease.exists()


def ended_process():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left_lease(target, owner):
    """A lease next to a target that its owner did not release."""
    place = locate(target)
    lease = place.parent.join(f".wherry-{place.name}.lease")
    text = json.dumps({"schema": 1, **owner.to_json(), "beat": 0}).encode()
    place.store.put_object(lease.path, text, "run")
    return lease


def test_a_run_that_finds_a_committed_target_removes_the_lease_of_a_dead_process(source, target):
    wherry.convert(source, target, to="hf", options=OPTIONS, lineage=False)
    lease = left_lease(target, replace(this_process("0" * 8), pid=ended_process(), process_start=None))
    wherry.convert(source, target, to="hf", options=OPTIONS, lineage=False)
    assert not lease.exists()
    assert wherry.verify(target, level="digest").ok


def test_the_lease_of_a_living_process_and_one_of_another_machine_are_left(target):
    for owner in (this_process("0" * 8), replace(this_process("0" * 8), host="elsewhere")):
        lease = left_lease(target, owner)
        tidy(locate(target))
        assert lease.exists()
        release(target)


def test_parts_of_an_object_that_was_assembled_are_removed(target):
    """On gs:// a run can be killed after it has assembled an object and before it has removed the parts."""
    place = locate(target)
    store = place.store
    upload = store.begin(place.path, "run")
    found = store.put_object(place.path, b"whole", "run")
    before, agreed = sent_before(JournalPast(uploads={place.path: upload}), {place.path: found}, store)
    assert agreed
    assert before[place.path].found == found
    assert uploads_below(target) == []
