"""A view of a remote store requests nothing twice, and reads objects in the state in which they were first seen."""

from __future__ import annotations

import pytest

from wherry.storage.location import Location
from wherry.storage.object_view import BLOCK, ObjectView, view_for_walk, view_of_store
from wherry.storage.stores import locate
from wherry.store.store import GCS, MEMORY, Entry


class Objects:
    """A store of objects that records its calls."""

    protocol = "gs"
    capabilities = GCS

    def __init__(self, **objects):
        self.objects = {name.replace("__", "/"): data for name, data in objects.items()}
        self.calls = []
        self.mark = "1"

    def stat(self, path):
        self.calls.append(("stat", path))
        data = self.objects.get(path)
        if data is not None:
            return Entry(path.rpartition("/")[2], len(data), is_dir=False, mark=self.mark)
        below = any(name.startswith(f"{path}/") for name in self.objects)
        return Entry(path.rpartition("/")[2], 0, is_dir=True) if below else None

    def entries(self, path):
        self.calls.append(("entries", path))
        names = {
            name[len(path) + 1 :].partition("/")[0] for name in self.objects if name.startswith(f"{path}/")
        }
        real, count = [self.stat(f"{path}/{name}") for name in sorted(names)], len(names)
        del self.calls[-count:]
        return real

    def read(self, path, start, stop):
        self.calls.append(("read", path, start, stop))
        return self.objects[path][start:stop]

    def readinto(self, path, start, buffer, mark=""):
        self.calls.append(("read", path, start, start + len(buffer), mark))
        data = self.objects[path][start : start + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def put(self, path, data, *, create_only=False):
        self.objects[path] = data


@pytest.fixture
def store():
    return Objects(b__folder__a=b"aaaa", b__folder__sub__c=b"c", b__large=bytes(range(256)) * 4096)


def test_what_a_listing_states_is_not_requested_again(store):
    view = ObjectView(store)
    assert view.stat("b/folder").is_dir
    assert [one.name for one in view.entries("b/folder")] == ["a", "sub"]
    calls = list(store.calls)
    assert calls == [("stat", "b/folder"), ("entries", "b/folder")]
    assert view.entries("b/folder/")
    assert view.stat("b/folder/a").size == 4
    assert view.stat("b/folder/none") is None
    assert view.stat("b/folder/none/below") is None
    assert view.stat("b/folder/a/below") is None
    with pytest.raises(FileNotFoundError):
        view.entries("b/folder/none")
    assert store.calls == calls
    assert view.stat("b/folder/sub/c").size == 1, "below a folder that is not listed yet"
    assert store.calls == [*calls, ("stat", "b/folder/sub/c")]


def test_an_object_is_looked_up_once(store):
    view = ObjectView(store)
    assert [view.stat("b/none"), view.stat("b/none"), view.stat("b/large").size] == [None, None, 1 << 20]
    assert store.calls == [("stat", "b/none"), ("stat", "b/large")]
    assert view.first_seen("b/large").mark == "1"
    assert view.first_seen("b/other") is None


def test_small_reads_are_one_request_for_each_block(store):
    view, data = ObjectView(store), store.objects["b/large"]
    for start, stop in ((0, 8), (8, 1000), (BLOCK - 3, BLOCK + 5), (5, 6), ((1 << 20) - 3, 1 << 21)):
        assert view.read("b/large", start, stop) == data[start:stop]
    reads = [one[2:] for one in store.calls if one[0] == "read"]
    end = 1 << 20
    assert reads == [(0, BLOCK, "1"), (BLOCK, 2 * BLOCK, "1"), (end - BLOCK, end, "1")]


def test_a_small_object_is_read_at_once_and_a_large_range_as_it_is(store):
    view = ObjectView(store)
    assert view.read("b/folder/a", 1, 3) + view.read("b/folder/a", 0, 100) == b"aaaaaa"
    assert view.read("b/folder/a", 4, 9) == b""
    assert len(view.read("b/large", 7, 7 + 2 * BLOCK)) == 2 * BLOCK
    buffer = bytearray(10)
    assert view.readinto("b/large", 255, memoryview(buffer)) == 10
    assert buffer == store.objects["b/large"][255:265]
    reads = [one[1:] for one in store.calls if one[0] == "read"]
    assert reads == [
        ("b/folder/a", 0, 4, "1"),
        ("b/large", 7, 7 + 2 * BLOCK, "1"),
        ("b/large", 255, 265, "1"),
    ]


def test_reads_name_the_state_that_was_seen_first(store):
    view = ObjectView(store)
    view.stat("b/large")
    store.mark = "2"
    view.read("b/large", 0, 4)
    assert store.calls[-1][-1] == "1"
    assert view.stat("b/large").mark == "1"


def test_a_store_without_states_is_read_as_it_is(store):
    store.capabilities = MEMORY
    view = ObjectView(store)
    assert view.read("b/folder/a", 1, 3) == b"aa"
    assert store.calls == [("read", "b/folder/a", 1, 3)]
    assert view.stat("b/folder/a").size == 4
    assert view.first_seen("b/folder/a") is None


def test_a_write_forgets_everything(store):
    view = ObjectView(store)
    assert view.stat("b/new") is None
    view.put("b/new", b"x")
    assert view.stat("b/new").size == 1


def test_blocks_are_bounded(store):
    store.objects["b/large"] = bytes(200 * BLOCK)
    view = ObjectView(store)
    for number in range(200):
        view.read("b/large", number * BLOCK, number * BLOCK + 1)
    assert sum(map(len, view._blocks.values())) <= 64 * BLOCK


def test_only_stores_with_full_listings_are_viewed(tmp_path, store):
    web = locate("http://127.0.0.1/x")  # its listings have neither sizes nor states
    for place in (locate(tmp_path), web):
        assert view_of_store(place) is view_for_walk(place) is place
    once = view_of_store(Location(store, "b/large", frozenset({"x"})))
    assert view_of_store(once) is once
    assert (once.opaque, once.uri) == (frozenset({"x"}), "gs://b/large")
