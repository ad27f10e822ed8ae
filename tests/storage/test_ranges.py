"""Ranges of a file: few requests, several at a time, bounded memory, the bytes of each range once."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.errors import IncompleteError, UsageError
from wherry.storage import ranges
from wherry.storage.location import Location
from wherry.storage.ranges import GAP, LARGEST, read_ranges, requests_for
from wherry.store.store import LOCAL, OBJECTS

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
