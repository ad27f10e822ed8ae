"""Sidecars in a store of objects: they appear in the commit, and not without the checkpoint that they describe."""

import pytest

import wherry
from tests.support.object_stores import left_beside, model, small_parts
from wherry.errors import MismatchError
from wherry.objects.memory import MemoryObjects
from wherry.storage.stores import locate
from wherry.upload.run import UploadRun


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
    beside, proving = locate(target).join("wherry.json"), UploadRun.prove_small

    def watching(run):
        assert not beside.exists()
        proving(run)

    monkeypatch.setattr(UploadRun, "prove_small", watching)
    convert(source, target, to)
    assert beside.exists()


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_a_commit_that_fails_leaves_no_sidecar(source, target, monkeypatch, to):
    real = MemoryObjects.copy_object

    def refused(self, path, mark, place, run):
        if not place.endswith("wherry.json"):
            raise MismatchError("the copy is wrong")
        return real(self, path, mark, place, run)

    monkeypatch.setattr(MemoryObjects, "copy_object", refused)
    with pytest.raises(MismatchError, match="copy is wrong"):
        convert(source, target, to)
    assert not locate(target).exists()
    assert left_beside(target) == []
