"""Buffers are reused, and what is handed out never exceeds the budget."""

import mmap
import weakref
from contextlib import ExitStack

from wherry.mover import pool as pool_module
from wherry.mover.pool import Pool

pytest_plugins = ["tests.support.turns"]
MIB = 1 << 20


def test_buffers_are_reused_and_exact():
    pool = Pool(8 * MIB)
    with pool.buffer(100) as first:
        first[:3] = b"abc"
        assert len(first) == 100
    with pool.buffer(50) as second:
        assert bytes(second[:3]) == b"abc"


def test_requests_wait_until_there_is_room(asking):
    pool, order = Pool(2 * MIB), []

    def late():
        with pool.buffer(2 * MIB):
            order.append("late")

    with pool.buffer(MIB + 1):
        thread = asking(late)
        order.append("early")
    thread.join(120)
    assert order == ["early", "late"]
    assert pool.peak == 2 * MIB


def test_a_request_that_waits_is_not_overtaken_by_smaller_ones(asking):
    pool, order, threads = Pool(4 * MIB), [], []

    def use(name, size):
        with pool.reserved(size * MIB):
            order.append(name)

    with pool.reserved(3 * MIB):
        for name, size in [("large", 4), ("small", 1), ("small too", 1)]:
            threads.append(asking(use, name, size))
    for thread in threads:
        thread.join(120)
    assert order[0] == "large"
    assert sorted(order[1:]) == ["small", "small too"]


def test_one_request_larger_than_the_budget_is_admitted_alone():
    pool = Pool(MIB)
    with pool.reserved(10 * MIB):
        assert pool.peak == 10 * MIB


class Pages(mmap.mmap):
    """Memory that can be counted while it exists."""


def test_memory_of_large_buffers_is_not_held_by_small_ones(monkeypatch):
    mapped = weakref.WeakSet()

    def pages(size):
        mapped.add(made := Pages(-1, size + mmap.PAGESIZE))
        return made

    monkeypatch.setattr(pool_module, "map_memory", pages)
    pool = Pool(8 * MIB)
    for sizes in ([4, 4], [1, 1, 1, 1], [8], [3, 2, 2], [1] * 8, [4, 2, 2], [5, 2]):
        with ExitStack() as stack:
            for size in sizes:
                stack.enter_context(pool.buffer(size * MIB))
            assert sum(len(one) - mmap.PAGESIZE for one in mapped) <= 8 * MIB
