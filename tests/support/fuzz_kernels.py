"""Fuzzes the kernels: random calls with random sizes, strides and places, compared with numpy and the `blake3` package.

    python -m tests.support.fuzz_kernels ROUNDS SEED

It needs no pytest, so that a process with a sanitizer can run it. What a call refuses is asserted, too: nothing is
written or read outside of the memory that it was given.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from tests.support.kernels import LEAF, WORDS, check_count, expected, random_bytes
from wherry.kernels import OpenLeaves, gather, look_up, permute

_SIZES = (0, 1, 2, 3, 63, 64, 65, 1000, 1023, 1024, 1025, 2048, 5000, 70_000)


def _leaves(draw: random.Random) -> None:
    """Runs with any length and step, some of them outside of the tensor, until every byte has come."""
    nbytes = draw.choice((*_SIZES[1:], LEAF - 1, LEAF, LEAF + 1, LEAF + 1025, 2 * LEAF + 7))
    data = random_bytes(nbytes, draw.randrange(1 << 30))
    view, leaves, found = memoryview(data), OpenLeaves(nbytes), {}
    for _ in range(draw.randrange(8)):
        length = draw.randint(1, max(nbytes // draw.randint(1, 9), 1))
        count = draw.randint(1, max(min(nbytes // length, 50), 1))
        step = draw.randint(1, nbytes // count + 1)
        offset = draw.randint(0, nbytes)
        fits = offset + (count - 1) * step + length <= nbytes
        rows = [data[offset + i * step : offset + i * step + length] for i in range(count)]
        held = b"".join(row.ljust(length, b"\0") for row in rows)
        try:
            found |= dict(
                leaves.add(memoryview(held), offset, length=length, count=count, apart=length, step=step)
            )
            assert fits
        except AssertionError:
            assert not fits, (nbytes, offset, length, count, step)
    cuts = sorted({0, nbytes, *(draw.randrange(nbytes + 1) for _ in range(20))})
    pieces = list(pairwise(cuts))
    draw.shuffle(pieces)
    for start, stop in pieces:
        found |= dict(leaves.add(view[start:stop], start))
    assert [found.get(leaf) for leaf in range(-(-nbytes // LEAF))] == expected(data), nbytes


def _permute(draw: random.Random) -> None:
    """Any axes in any order, forwards and backwards, into memory with gaps."""
    word = draw.choice(WORDS)
    shape = tuple(draw.choice((0, 1, 2, 3, 5, 8, 16, 17, 33)) for _ in range(draw.randrange(5)))
    room = tuple(extent * draw.randint(1, 2) + draw.randrange(3) for extent in shape)
    source = np.random.default_rng(draw.randrange(1 << 30)).integers(0, 255, room).astype(word)
    view = source[(*(slice(0, extent) for extent in shape), ...)]
    view = view[(*(slice(None, None, draw.choice((1, -1))) for _ in shape), ...)]
    view = view.transpose(draw.sample(range(len(shape)), len(shape)))
    memory = np.full(tuple(extent + draw.randrange(4) for extent in view.shape), 99, word)
    wanted, inside = memory.copy(), (*(slice(0, extent) for extent in view.shape), ...)
    wanted[inside] = view
    assert permute(view, memory[inside])
    assert (memory == wanted).all(), (word, shape)


def _look_up(draw: random.Random) -> None:
    """Blocks of any size, a beginning inside of a block, codes of 8 and of 4 bits."""
    bits, word = draw.choice((4, 8)), draw.choice(("u2", "u4"))
    rows, columns = draw.choice((0, 1, 5, 8, 63, 70)), draw.choice((0, 1, 2, 31, 32, 33, 200))
    block = draw.choice((1, 2, 5)), draw.choice((1, 3, 32, 128))
    first = draw.randrange(block[0]), draw.randrange(block[1])
    grid = [
        -(-(start + extent) // size)
        for start, extent, size in zip(first, (rows, columns), block, strict=True)
    ]
    numbers = np.random.default_rng(draw.randrange(1 << 30))
    tables = numbers.integers(0, 60_000, (*grid, 1 << bits)).astype(word)
    skip = draw.randrange(4)
    codes = numbers.integers(0, 256, (rows, -(-(skip + columns) * bits // 8))).astype("u1")
    every = (
        codes if bits == 8 else np.stack([codes & 15, codes >> 4], axis=2).reshape(rows, 2 * codes.shape[1])
    )
    orders = np.argsort(numbers.random(tables.shape), axis=-1).astype("u1")
    apart, turned = draw.randrange(3), draw.random() < 0.5
    memory = np.zeros((columns, rows + apart) if turned else (rows, columns + apart), word)
    out = memory[:, :rows].T if turned else memory[:, :columns]
    seen = look_up(codes, tables, orders if draw.random() < 0.9 else None, first, block, out, skip)
    down = (first[0] + np.arange(rows))[:, None] // block[0]
    across = (first[1] + np.arange(columns))[None] // block[1]
    wanted = every[:, skip : skip + columns]
    assert (out == tables[down, across, wanted]).all()
    assert not memory[:, rows if turned else columns :].any()
    occurs = np.zeros(tables.shape, bool)
    occurs[down, across, wanted] = True
    assert not (seen & ~occurs).any()


def _gather(draw: random.Random) -> None:
    """Places of a grid of a file, which may end before the last of them."""
    length, grid = draw.choice((1, 2, 7, 256, 5000)), []
    step = out_step = length
    for _ in range(draw.randint(1, 3)):
        extent = draw.randint(1, 6)
        step, out_step = step + draw.choice((0, 1, 700)), out_step + draw.randrange(3)
        grid.insert(0, (extent, step, out_step))
        step, out_step = step * extent, out_step * extent
    offset = draw.randrange(9)
    needed = offset + sum((extent - 1) * apart for extent, apart, _out in grid) + length
    nbytes = needed - draw.choice((0, 0, 1, length))
    data = random_bytes(nbytes, draw.randrange(1 << 30))
    out = bytearray(sum((extent - 1) * apart for extent, _step, apart in grid) + length)
    held = memoryview(bytearray(draw.choice((0, 1, length, 4096, 1 << 16))))
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        done = gather(file.fileno(), offset, length, grid, memoryview(out), held)
    assert done == (nbytes >= needed)
    for at in np.ndindex(*(extent for extent, _step, _out in grid)) if done else ():
        start = offset + sum(index * apart for index, (_e, apart, _o) in zip(at, grid, strict=True))
        place = sum(index * apart for index, (_e, _s, apart) in zip(at, grid, strict=True))
        assert out[place : place + length] == data[start : start + length]


def _count(draw: random.Random) -> None:
    """Words of any size, anywhere in memory."""
    check_count(draw.choice(_SIZES), draw.choice(WORDS), draw.randrange(70), draw.randrange(1 << 30))


KERNELS: tuple[Callable[[random.Random], None], ...] = (_leaves, _permute, _look_up, _gather, _count)


def fuzz(rounds: int, seed: int) -> None:
    """Call each kernel so many times; an error names the seed of its call."""
    for number in range(rounds):
        for kernel in KERNELS:
            own = f"{kernel.__name__}-{seed}-{number}"
            try:
                kernel(random.Random(own))
            except Exception as error:
                raise AssertionError(f"seed {own}") from error


if __name__ == "__main__":
    fuzz(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write("right\n")
    sys.stdout.flush()
    os._exit(0)  # a library with a sanitizer is unloaded badly
