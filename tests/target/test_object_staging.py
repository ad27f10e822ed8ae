"""Staging in a store of objects: what a run finds of those before it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.support.object_stores import Killed, release, small_parts
from wherry.errors import MismatchError
from wherry.store.local_store import locate
from wherry.store.memory import MemoryStore
from wherry.target.object_staging import ObjectStaging
from wherry.target.sinks import is_unfinished

MEMBERS = ("COMMIT",)


@pytest.fixture
def target(tmp_path):
    return locate(f"memory://staged{tmp_path}/out")


def staging(target, identity):
    return ObjectStaging(target, identity, {"plan": identity}, MEMBERS, 100)


def kill(target, identity):
    """Let a run end without a word after it has sent a part."""
    with small_parts(64), pytest.raises(Killed), staging(target, identity) as run:
        run.run.file(target.join("data").path, 100).write(0, memoryview(bytes(64)))
        run.run.using.sender.drain()
        run.journal().flush()
        run._keep = lambda: None
        raise Killed
    release(target.uri)


def test_a_run_that_ends_while_it_aborts_an_upload_leaves_an_unfinished_target(target, monkeypatch):
    """An upload that is being aborted is an empty object for a moment, on Azure."""
    kill(target, "aaaaaaaa")

    def abort(self, upload):
        self.put_object(upload.path, b"", upload.run)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "abort", abort)
        with pytest.raises(Killed), staging(target, "bbbbbbbb"):
            pytest.fail("it was opened")
    release(target.uri)
    assert target.join("data").exists()
    assert is_unfinished(target, MEMBERS)
    with staging(target, "bbbbbbbb"):
        assert not target.join("data").exists()


@pytest.mark.parametrize("end", ["commit", "fail"])
def test_an_upload_whose_answer_was_lost_is_aborted_in_the_end(target, monkeypatch, end):
    """A store that names uploads itself has two then, of which nobody has the id of the first."""
    real = MemoryStore.begin
    monkeypatch.setattr(MemoryStore, "names_uploads", False)
    monkeypatch.setattr(MemoryStore, "begin", lambda *sent: (real(*sent), real(*sent))[1])
    store = target.store
    with small_parts(64), suppress(MismatchError), staging(target, "aaaaaaaa") as run:
        run.run.file(target.join("data").path, 100).write(0, memoryview(bytes(100)))
        run.run.put(target.join("COMMIT").path, b"done")
        run.run.finish()
        assert len(list(store.uploads(target.path))) == 1
        if end == "fail":
            raise MismatchError("read-back differs")
        run.commit()
    assert list(store.uploads(target.path)) == []
    assert target.exists() == (end == "commit")


def test_a_commit_lists_no_uploads_of_a_store_that_knows_them_by_our_names(target, monkeypatch):
    with staging(target, "aaaaaaaa") as run:
        monkeypatch.setattr(MemoryStore, "uploads", lambda *_: pytest.fail("it listed uploads"))
        run.run.put(target.join("COMMIT").path, b"done")
        run.commit()


def test_the_commit_member_that_comes_first_in_the_format_appears_last(target, monkeypatch):
    order, real = [], MemoryStore.copy_object

    def copy(self, *arguments, **options):
        order.append(arguments[2])
        return real(self, *arguments, **options)

    monkeypatch.setattr(MemoryStore, "copy_object", copy)
    members = ("marker", "index", "none")
    with ObjectStaging(target, "aaaaaaaa", {"plan": "a"}, members, 100) as run:
        for name in ("marker", "data", "index"):
            run.run.put(target.join(name).path, name.encode())
        run.run.finish()
        run.commit()
    assert order == [target.join(name).path for name in ("index", "marker")]
