"""Sidecars in a store of objects: they appear in the commit, and not without the checkpoint that they describe."""

import pytest

import wherry
from tests.support.corpus import place
from tests.support.object_stores import Killed, leftover_names, model, release, small_parts, watched
from wherry.errors import MismatchError
from wherry.store.local_store import locate
from wherry.store.memory import MemoryStore
from wherry.target.clean import clean
from wherry.target.upload_run import UploadRun


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return model(tmp_path_factory.mktemp("source") / "model", rows=10, count=3)


@pytest.fixture(autouse=True)
def parts():
    with small_parts():
        yield


@pytest.fixture
def target(tmp_path):
    return f"memory://sidecars{tmp_path}/out"


def convert(source, target, to, **more):
    ignore = ("companions",) if to == "safetensors" else ()
    return wherry.convert(source, target, to=to, ignore=ignore, lineage=False, **more)


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_the_sidecar_appears_when_all_is_proved(source, target, monkeypatch, to):
    sidecar, proving = locate(target).join("wherry.json"), UploadRun.prove_small

    def watching(run):
        assert not sidecar.exists()
        proving(run)

    monkeypatch.setattr(UploadRun, "prove_small", watching)
    convert(source, target, to)
    assert sidecar.exists()


@pytest.mark.parametrize("to", ["hf", "orbax", "safetensors"])
def test_a_commit_that_fails_leaves_no_sidecar(source, target, monkeypatch, to):
    real = MemoryStore.copy_object

    def refused(self, path, mark, place, run, guard):
        if not place.endswith("wherry.json"):
            raise MismatchError("the copy is wrong")
        return real(self, path, mark, place, run, guard)

    monkeypatch.setattr(MemoryStore, "copy_object", refused)
    with pytest.raises(MismatchError, match="copy is wrong"):
        convert(source, target, to)
    assert not locate(target).exists()
    assert leftover_names(target) == []


def test_a_run_that_was_killed_between_two_commit_members_is_resumed(target):
    """PaxML has two: a target with the first alone is no checkpoint for PaxML."""
    source = place("made-paxml-v11")
    with watched(only=("copy_object",)) as calls:
        wherry.convert(source, f"{target}-whole", to="paxml", lineage=False)
    with watched(fatal=len(calls), only=("copy_object",)), pytest.raises(Killed):
        wherry.convert(source, target, to="paxml", lineage=False)
    release(target)
    assert locate(target).join("metadata/metadata").exists()
    assert not locate(target).join("commit_success.txt").exists()
    wherry.convert(source, target, to="paxml", lineage=False)
    assert locate(target).join("commit_success.txt").exists()
    assert wherry.verify(target, level="digest").ok
    assert [name for name in leftover_names(target) if not name.startswith("out-whole")] == []


def sidecar_of(target):
    return locate(f"{target}.wherry.json")


@pytest.fixture
def killed(source, target):
    """A file whose run was killed between its sidecar and itself."""
    with watched(fatal=1, only=("copy_object",)), pytest.raises(Killed):
        convert(source, target, "safetensors")
    release(target)
    assert sidecar_of(target).exists()
    return target


def test_clean_removes_the_sidecar_of_a_file_that_was_not_committed(killed):
    root = locate(killed).parent.uri
    assert [one.removed for one in clean(root, dry_run=True, min_age=0)] == [False]
    assert sidecar_of(killed).exists()
    assert [one.removed for one in clean(root, min_age=0)] == [True]
    assert leftover_names(killed) == []


def test_clean_leaves_the_sidecar_of_a_file_that_was_committed(source, target, monkeypatch):
    monkeypatch.setattr("wherry.target.signed_log.ObjectSink.remove", lambda *_arguments: None)
    convert(source, target, "safetensors")
    assert [one.removed for one in clean(locate(target).parent.uri, min_age=0)] == [True]
    assert sidecar_of(target).exists()


def test_clean_leaves_a_sidecar_of_somebody_else(killed):
    sidecar_of(killed).put(b"{}")
    clean(locate(killed).parent.uri, min_age=0)
    assert sidecar_of(killed).read(0, 9) == b"{}"


def test_another_conversion_removes_the_sidecar_of_a_killed_one(source, killed):
    convert(source, killed, "orbax")
    assert leftover_names(killed) == []
    assert wherry.verify(killed, level="digest").ok


def test_a_resumed_conversion_that_fails_removes_the_sidecar_of_the_killed_one(source, killed, monkeypatch):
    def refused(*_given, **_named):
        raise MismatchError("the store has other bytes")

    monkeypatch.setattr(UploadRun, "prove_small", refused)
    with pytest.raises(MismatchError, match="other bytes"):
        convert(source, killed, "safetensors")
    assert leftover_names(killed) == []
