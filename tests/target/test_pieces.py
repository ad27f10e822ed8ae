"""The pieces of a part, in any order, twice, and with gaps."""

import random

import pytest

from wherry.target.parts import PartPieces


def joined(part):
    return b"".join(part.views)


def test_pieces_in_any_order_make_the_part():
    part = PartPieces(6)
    part.add(4, memoryview(b"ef"))
    part.add(0, memoryview(b"ab"))
    assert not part.complete
    part.add(2, memoryview(b"cd"))
    assert part.complete
    assert joined(part) == b"abcdef"


def test_the_later_of_two_pieces_counts():
    part = PartPieces(6)
    part.add(0, memoryview(b"abcdef"))
    assert part.add(2, memoryview(b"XY")) == 2
    assert joined(part) == b"abXYef"
    assert part.held == 6


@pytest.mark.parametrize("seed", range(20))
def test_any_pieces_are_as_bytes_written_to_a_file(seed):
    chance, part, file = random.Random(seed), PartPieces(40), bytearray(40)
    known = set()
    for _ in range(30):
        start = chance.randrange(40)
        data = chance.randbytes(chance.randint(1, 40 - start))
        before = part.held
        dropped = part.add(start, memoryview(data))
        file[start : start + len(data)] = data
        known |= set(range(start, start + len(data)))
        assert part.held == len(known) == before + len(data) - dropped
    filled = part.fill()
    assert filled == 40 - len(known)
    assert joined(part) == bytes(file)
