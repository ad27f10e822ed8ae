"""Ranges of files and objects: few requests, bounded memory, the bytes of each once."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.errors import IncompleteError, UsageError
from wherry.store import ranges
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.object_view import BLOCK, ObjectView, view_for_walk, view_of_store
from wherry.store.ranges import GAP, LARGEST, STEP, ReadAhead, read_ranges, requests_for
from wherry.store.store import GCS, LOCAL, MEMORY, OBJECTS, Entry

MIB = 1 << 20


class Counting:
    """A store of one file that counts what is read at a time."""

    protocol = "counting"

    def __init__(self, size, capabilities=OBJECTS, *, seconds=0.0, endless=False, together=0):
        self.data = (bytes(range(251)) * (size // 251 + 1))[:size]
        self.capabilities, self.seconds, self.endless = capabilities, seconds, endless
        self.lock, self.together, self.met = threading.Lock(), together, threading.Event()
        self.running = self.most = 0
        self.reads = []

    def read(self, _path, start, stop):
        with self.lock:
            self.reads.append((start, stop))
            self.running += 1
            self.most = max(self.most, self.running)
        if self.most >= self.together:
            self.met.set()
        self.met.wait(60)  # each waits until as many are read at a time
        time.sleep(self.seconds)
        with self.lock:
            self.running -= 1
        return self.data[: stop - start] if self.endless else self.data[start:stop]


def gathered(store, wanted, **how):
    found = [bytearray(stop - start) for start, stop in wanted]
    filled = [0] * len(wanted)
    for part in read_ranges(Location(store, "/x"), wanted, **how):
        found[part.number][part.offset : part.offset + len(part.data)] = part.data
        filled[part.number] += len(part.data)
    assert filled == [stop - start for start, stop in wanted], "each byte once"
    return found


def test_small_gaps_are_read_and_large_ones_are_not():
    near, far = (0, 10), (10 + GAP - 1, 20 + GAP)
    assert [(one.start, one.stop) for one in requests_for([near, far])] == [(0, 20 + GAP)]
    far = (10 + GAP, 20 + GAP)
    assert [(one.start, one.stop) for one in requests_for([far, near])] == [near, far]


def test_requests_are_of_four_to_eight_mib():
    sizes = [one.stop - one.start for one in requests_for([(5, 5 + 50 * MIB)])]
    assert sum(sizes) == 50 * MIB
    assert all(LARGEST // 2 <= size <= LARGEST for size in sizes)
    many = [(start, start + MIB // 2) for start in range(0, 64 * MIB, MIB)]
    assert len(requests_for(many)) == 8


@given(
    wanted=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 900)).map(lambda one: (one[0], sum(one)))),
    memory=st.sampled_from([1, 250, 10_000]),
)
@settings(max_examples=60, deadline=None)
def test_every_byte_of_every_range(wanted, memory):
    store = Counting(4000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "LARGEST", 100)
        patch.setattr(ranges, "GAP", 30)
        found = gathered(store, wanted, memory=memory)
    assert found == [store.data[start:stop] for start, stop in wanted]


@pytest.mark.parametrize(("memory", "most"), [(1, 1), (4 * LARGEST, 4), (1 << 40, ranges.MOST_REQUESTS)])
def test_as_many_requests_at_a_time_as_the_memory_allows(memory, most):
    store = Counting(LARGEST, seconds=0.02, endless=True, together=most)
    for part in read_ranges(Location(store, "/x"), [(0, 40 * LARGEST)], memory):
        assert part.number == 0
    assert len(store.reads) == 40
    assert store.most == most


def test_a_local_file_needs_no_threads():
    store = Counting(3 * GAP, LOCAL)
    gathered(store, [(0, 10), (2 * GAP, 2 * GAP + 10)])
    assert (store.most, len(store.reads)) == (1, 2)


def test_no_more_is_held_for_a_slow_reader_than_the_memory_allows():
    store = Counting(LARGEST, endless=True)
    found = read_ranges(Location(store, "/x"), [(0, 40 * LARGEST)], 4 * LARGEST)
    next(found)
    deadline = time.monotonic() + 60
    while len(store.reads) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(store.reads) == 4
    found.close()


def test_who_stops_early_leaves_no_request_behind():
    store = Counting(LARGEST, seconds=0.02, endless=True)
    found = read_ranges(Location(store, "/x"), [(0, 40 * LARGEST)], 4 * LARGEST)
    next(found)
    found.close()
    assert store.running == 0
    assert len(store.reads) <= 6


def test_a_file_that_ends_early():
    with pytest.raises(IncompleteError, match="expected 20 bytes, got 15"):
        gathered(Counting(15), [(0, 20)])


@pytest.mark.parametrize("one", [(3, 2), (-1, 2)])
def test_an_invalid_range(one):
    with pytest.raises(UsageError, match="invalid byte range"):
        requests_for([one])


# Small reads in order are served by large requests.


class Place:
    def __init__(self, data):
        self.data, self.reads = data, []

    def read(self, start, stop):
        self.reads.append((start, stop))
        return self.data[start:stop]


@pytest.mark.parametrize("length", [10, STEP, 2 * STEP + 12345])
def test_every_byte_in_order(length):
    data = np.random.default_rng(0).bytes(length + 7)
    place = Place(data)
    ahead = ReadAhead(place, 7, length)
    found = [ahead.read(start, start + 100_000) for start in range(0, length, 100_000)]
    assert b"".join(found) == data[7:]
    assert len(place.reads) == -(-length // STEP)
    assert all(stop - start <= STEP for start, stop in place.reads)


def test_anywhere_else():
    data = np.random.default_rng(0).bytes(3 * STEP)
    ahead = ReadAhead(Place(data), 0, len(data))
    for start, stop in ((5, 10), (2 * STEP, 2 * STEP + 3), (0, 4), (STEP - 2, STEP + 2), (3, 2 * STEP + 9)):
        assert ahead.read(start, stop) == data[start:stop]
    assert ahead.read(len(data), len(data) + 5) == b""


def test_a_file_that_ends_early_ahead():
    assert ReadAhead(Place(b"abc"), 1, 100).read(0, 50) == b"bc"


def test_an_error_of_the_next_request_is_raised_where_its_bytes_are_needed():
    place = Place(bytes(2 * STEP))
    ahead = ReadAhead(place, 0, 2 * STEP)
    real = place.read

    def read(start, stop):
        if start:
            raise OSError("gone")
        return real(start, stop)

    place.read = read
    assert len(ahead.read(0, STEP)) == STEP
    with pytest.raises(OSError, match="gone"):
        ahead.read(STEP, STEP + 1)


# A view of a remote store requests nothing twice, and reads objects in the state in which they were first
# seen.


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
