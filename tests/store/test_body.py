"""The body of a request: clients read, rewind and iterate it, whatever the pieces are."""

from __future__ import annotations

import asyncio
import io

import pytest

from wherry.store.content import Body, views_of

KIB = 1 << 10
SIZES = [
    [],
    [0, 0],
    [1, 2, 3],
    [300 * KIB, 0, 5, 70 * KIB, *[KIB] * 200, 64 * KIB],
]


def pieces(sizes):
    return [memoryview(bytes([number % 251]) * size) for number, size in enumerate(sizes)]


async def blocks(body):
    return [bytes(block) async for block in body]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_blocks_are_the_pieces_in_order_and_none_is_tiny_or_huge(sizes):
    body = Body(pieces(sizes))
    found = asyncio.run(blocks(body))
    assert b"".join(found) == b"".join(pieces(sizes))
    assert asyncio.run(blocks(body)) == found, "a second attempt sends the same"
    assert max(map(len, found), default=0) <= 256 * KIB
    assert len(found) <= sum(sizes) // (64 * KIB) + 4


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("step", [1000, 100 * KIB, 1 << 30])
def test_it_is_read_and_rewound(sizes, step):
    body, whole = Body(pieces(sizes)), b"".join(pieces(sizes))
    assert body.nbytes == len(whole) == body.seek(0, io.SEEK_END)
    assert body.read(step) == b""
    body.seek(0)
    assert b"".join(iter(lambda: body.read(step), b"")) == whole
    assert body.seek(-min(7, len(whole)), io.SEEK_CUR) == body.tell()
    assert body.read() == whole[len(whole) - min(7, len(whole)) :]


def test_bytes_are_one_buffer():
    assert views_of(b"abc") == [b"abc"]
    assert views_of(pieces([1, 2])) == pieces([1, 2])
