"""Small reads in order are served by large requests."""

from __future__ import annotations

import numpy as np
import pytest

from wherry.storage.ranges import STEP, ReadAhead


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


def test_a_file_that_ends_early():
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
