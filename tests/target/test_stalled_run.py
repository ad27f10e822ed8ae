"""A run in a store of objects that was stopped for longer than its lease lasts does no harm when it goes on."""

from __future__ import annotations

import pytest

from tests.support.object_stores import PartLog, small_parts
from wherry.errors import TargetExistsError, TargetInUseError
from wherry.store.local_store import locate
from wherry.store.memory import MemoryStore
from wherry.target.journal import JournalPast
from wherry.target.lease import lease_of
from wherry.target.object_staging import ObjectStaging, sent_before, without_unproved
from wherry.target.parts import Sender
from wherry.target.uploaded_file import UploadContext, UploadedFile

MEMBERS = ("COMMIT",)


@pytest.fixture(autouse=True)
def parts():
    with small_parts(64):
        yield


@pytest.fixture
def target(tmp_path):
    return locate(f"memory://stalled{tmp_path}/out")


@pytest.fixture
def store(target):
    return target.store


@pytest.fixture
def opened(target):
    """A run that has opened the target, and its heartbeat does not get its turn."""
    staging = ObjectStaging(target, "aaaaaaaa", {"plan": "a"}, MEMBERS, 100)
    with pytest.raises(TargetInUseError), staging:
        yield staging
        staging.require_held()


def stall(staging, store):
    """Let another run take the target over, while this one sleeps."""
    staging._lease._renewed = float("-inf")
    lease = staging.target.parent.join(".wherry-out.lease").path
    store.put_object(lease, b"of another run", "next", replaces=store.head(lease).mark)


def test_it_removes_no_object_and_no_upload_of_its_successor(opened, store, target):
    stall(opened, store)
    path = target.join("data").path
    found = store.put_object(path, b"whole", "next")
    upload = store.begin(target.join("more").path, "next")
    for others in ({path: found}, {}):
        with pytest.raises(TargetInUseError):
            opened._drop_others(others, JournalPast())
    assert store.head(path) == found
    assert store.parts(upload) == []


def test_it_removes_no_object_that_its_successor_adopts(opened, store, target):
    """One whose checksums nobody has noted, or that is whole besides its upload: a run looks at both as it opens."""
    path = target.join("data").path
    found = store.put_object(path, b"whole", "former")
    upload = store.begin(path, "former")
    stall(opened, store)
    fresh = opened._lease.require_fresh
    with pytest.raises(TargetInUseError):
        without_unproved(JournalPast(), {path: found}, store, fresh)
    with pytest.raises(TargetInUseError):
        sent_before(JournalPast(uploads={path: upload}), {path: found}, store, fresh)
    assert store.head(path) == found
    assert store.parts(upload) == []


def test_it_removes_no_sidecar_of_its_successor(opened, store, target):
    sidecar = target.parent.join("out.wherry.json").path
    store.put_object(sidecar, b"{}", "next")
    stall(opened, store)
    with pytest.raises(TargetInUseError):
        opened._drop_sidecar()
    assert store.head(sidecar).run == "next"


def test_it_puts_no_object(opened, store, target):
    stall(opened, store)
    file = opened.run.file(target.join("data").path, 4)
    file.write(0, memoryview(b"late"))
    with pytest.raises(TargetInUseError):
        opened.run.finish()
    assert store.head(target.join("data").path) is None


def test_a_lease_that_was_renewed_is_not_looked_up(target, monkeypatch):
    with lease_of(target) as lease:
        monkeypatch.setattr(MemoryStore, "head", lambda *_: pytest.fail("it was looked up"))
        lease.require_fresh()
        monkeypatch.undo()


@pytest.mark.parametrize("size", [4, 100])
def test_what_a_former_run_puts_late_is_replaced_and_that_of_nobody_else(target, store, size):
    path = target.join("data").path
    for run, error in (("former", None), ("", TargetExistsError), ("stranger", TargetExistsError)):
        store.put_object(path, b"late", run)
        sender = Sender(1 << 20, 2)
        using = UploadContext(store, "own", sender, PartLog(), frozenset({"former"}))
        file = UploadedFile(path, size, using)
        file.write(0, memoryview(bytes(size)))
        if error is None:
            sender.drain()
            assert store.head(path).run == "own"
        else:
            with pytest.raises(error):
                sender.drain()
            assert store.head(path).run == run
        sender.stop()
        store.remove_object(path, store.head(path).mark)


def test_no_part_is_sent_under_a_visible_name_where_an_abort_puts_an_object_there(target, monkeypatch):
    for apart in (True, False):
        monkeypatch.setattr(MemoryStore, "aborts_apart", apart)
        with ObjectStaging(target, "aaaaaaaa", {}, (), 100, by_checksum=True, is_file=True) as staging:
            assert staging.run.direct == apart
