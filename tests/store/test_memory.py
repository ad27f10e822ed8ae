"""The rules of memory:// as a store of objects, which other tests rely on."""

from __future__ import annotations

from uuid import uuid4

import pytest

from wherry.errors import StorageError
from wherry.store.local_store import locate
from wherry.store.memory import MemoryStore
from wherry.store.store import PartLimits


@pytest.fixture
def place():
    return locate(f"memory://objects-{uuid4().hex}/model")


@pytest.fixture
def objects(place, monkeypatch):
    monkeypatch.setattr(MemoryStore, "part_limits", PartLimits(4, 8, 3))
    return place.store


def views(*pieces):
    return [memoryview(one) for one in pieces]


def test_a_write_of_fsspec_gives_another_mark(objects, place):
    first = objects.put_object(place.path, b"ours", "run")
    assert objects.head(place.path) == first
    place.put(b"them")
    second = objects.head(place.path)
    assert second.mark != first.mark
    assert second.run == ""
    with pytest.raises(FileExistsError):
        objects.put_object(place.path, b"ours", "run", replaces=first.mark)
    assert not objects.remove_object(place.path, first.mark)


def test_parts_keep_to_the_limits(objects, place):
    upload = objects.begin(place.path, "run")
    for number, data in ((0, bytes(9)), (3, b"four")):
        with pytest.raises(StorageError, match="refuses part"):
            objects.put_part(upload, number, views(data))
    parts = [objects.put_part(upload, number, views(b"abc")) for number in (0, 1)]
    with pytest.raises(StorageError, match="less than 4 bytes"):
        objects.assemble(upload, parts)
    assert objects.head(place.path) is None


def test_two_locations_see_the_same_objects(objects, place):
    objects.put_object(place.path, b"ours", "run")
    other = locate(place.uri).store
    assert other.head(place.path).run == "run"
    assert place.read(0, 9) == b"ours"
