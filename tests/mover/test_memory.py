"""Memory of moves, and what is recorded of them: buffers, parts, outputs, checksums, findings."""

from __future__ import annotations

import hashlib
import mmap
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import wherry
from wherry.core.digest import LEAF, SHA256
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import CorruptError, StorageError
from wherry.formats.format import Extent, RangeChecksum
from wherry.mover import pool as pool_module
from wherry.mover.checksums import ContainerChecksums, LeafTable
from wherry.mover.decode import Parts
from wherry.mover.move import Move
from wherry.mover.output import Output
from wherry.mover.pool import Pool
from wherry.mover.source import Source
from wherry.store.local_store import locate
from wherry.target.journal import open_journal

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


# Memory of parts: a region stays until its thread reads the next one; memory that is given back is used
# again.


ROWS = (slice(0, 64), slice(0, 128))


@pytest.fixture
def checkpoint(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.arange(64 * 128, dtype="f4").reshape(64, 128))
    with wherry.open(tmp_path / "a.npz") as opened:
        yield opened


def test_memory_that_a_thread_gives_back_is_another_s(checkpoint):
    parts = Parts(checkpoint.reader, checkpoint.manifest.tensors)
    wanted = checkpoint.read("w")
    with ThreadPoolExecutor(1) as pool:
        first = parts.read(("w",), ROWS)
        np.testing.assert_array_equal(first, wanted)
        assert not np.shares_memory(first, pool.submit(parts.read, ("w",), ROWS).result())
        parts.release()
        pool.submit(parts.release).result()
        again = pool.submit(parts.read, ("w",), ROWS).result()
        np.testing.assert_array_equal(again, wanted)
        other = parts.read(("w",), ROWS)
        assert np.shares_memory(again, first) or np.shares_memory(other, first)
        assert not np.shares_memory(again, other)


def test_memory_that_is_too_small_is_not_kept(checkpoint):
    parts = Parts(checkpoint.reader, checkpoint.manifest.tensors)
    small = parts.read(("w",), (slice(0, 1), slice(0, 128)))
    parts.release()
    large = parts.read(("w",), ROWS)
    assert not np.shares_memory(small, large)
    np.testing.assert_array_equal(large, checkpoint.read("w"))
    parts.release()
    assert np.shares_memory(parts.read(("w",), (slice(0, 1), slice(0, 128))), large)


def test_the_end_of_a_pass_returns_memory_that_waits_and_keeps_what_is_in_use(checkpoint):
    parts = Parts(checkpoint.reader, checkpoint.manifest.tensors)
    used = Parts(checkpoint.reader, checkpoint.manifest.tensors)
    waiting, kept = parts.read(("w",), ROWS), used.read(("w",), ROWS)
    parts.release()
    with Source(checkpoint.reader, Pool(1 << 20)):
        pass
    assert not np.shares_memory(parts.read(("w",), ROWS), waiting)
    np.testing.assert_array_equal(kept, checkpoint.read("w"))
    used.release()
    assert np.shares_memory(used.read(("w",), ROWS), kept)


# An output records a move only once its bytes are durable and every leaf that it touches has its digest.


HEADER = {"plan": "p"}
SPEC = TensorSpec(("w",), (LEAF + LEAF // 2,), "uint8")
CUT = LEAF // 4  # inside the first leaf


class Storage:
    """A writer that keeps nothing but the order of calls."""

    def __init__(self):
        self.calls = []
        self.error = None

    def place(self, path, where):
        return 0

    def write(self, path, where, data):
        self.calls.append("write")

    def is_durable_by_sync(self):
        return True

    def sync(self):
        if self.error is not None:
            raise self.error
        self.calls.append("sync")


@pytest.fixture
def storage():
    return Storage()


@pytest.fixture
def journal(tmp_path):
    opened = open_journal(tmp_path / "journal", HEADER)
    yield opened
    opened.close()


def deliver(output, leaves, start, stop):
    move = Move(SPEC.path, Span(start, stop), None)
    leaves.hasher(SPEC.path).update(start, memoryview(bytes(stop - start)))
    output.deliver(move, memoryview(bytes(stop - start)))
    output.delivered([move], leaves)


def recorded(tmp_path):
    again = open_journal(tmp_path / "journal", HEADER)
    again.close()
    return {row.span: dict(row.leaves) for row in again.done}


def test_a_move_waits_for_the_digests_of_all_its_leaves(tmp_path, storage, journal):
    output, leaves = Output(storage, {SPEC.path: SPEC}, journal), LeafTable({SPEC.path: SPEC}, (SHA256,))
    deliver(output, leaves, 0, CUT)
    output.settle(leaves)
    assert recorded(tmp_path) == {}, "the first leaf is not hashed to its end"
    deliver(output, leaves, LEAF, SPEC.nbytes)
    output.settle(leaves)
    last = hashlib.sha256(bytes(LEAF // 2)).digest()
    assert recorded(tmp_path) == {(LEAF, SPEC.nbytes): {1: last}}
    deliver(output, leaves, CUT, LEAF)
    output.settle(leaves)
    first = hashlib.sha256(bytes(LEAF)).digest()
    assert recorded(tmp_path) == {
        (0, CUT): {0: first}, (CUT, LEAF): {0: first}, (LEAF, SPEC.nbytes): {1: last}
    }  # fmt: skip


def test_what_could_not_be_synced_is_never_recorded(tmp_path, storage, journal):
    output, leaves = Output(storage, {SPEC.path: SPEC}, journal), LeafTable({SPEC.path: SPEC}, (SHA256,))
    deliver(output, leaves, 0, LEAF)
    storage.error = StorageError("the disk failed", retryable=True)
    output.settle(leaves)
    assert output.error is storage.error
    storage.error = None
    output.settle(leaves)
    assert recorded(tmp_path) == {}, "a later sync says nothing of what an earlier one lost"
    assert not output.wants(Move(SPEC.path, Span(LEAF, SPEC.nbytes), None))


# The checksum that a container records for a range is compared once, when every byte of the range was
# read.


DATA = bytes(range(100))
SPEC_OF_CHECKSUMS = TensorSpec(("w",), (100,), "uint8")


@pytest.fixture
def place(tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    return locate(tmp_path / "file")


def read(checksums, place, *spans, crc=None):
    """Add spans of a tensor whose bytes are in a range with a checksum."""
    recorded = RangeChecksum(0, len(DATA), zlib.crc32(DATA) if crc is None else crc)
    for span in spans:
        extent = Extent(place, 0, len(DATA), within=recorded)
        checksums.update((extent,), span, memoryview(DATA)[span.start : span.stop], SPEC_OF_CHECKSUMS)


def test_a_range_that_tensors_share_is_not_touched_while_it_is_compared(place, monkeypatch):
    checksums, real, compared = ContainerChecksums(), ContainerChecksums._compare, []

    def compare(self, watched):
        compared.append(watched)
        read(self, place, Span(20, 60))  # another thread, for another tensor
        assert watched.crc.left == 0
        assert watched.crc.known(0, len(DATA))[0][:2] == (0, 50)
        real(self, watched)

    monkeypatch.setattr(ContainerChecksums, "_compare", compare)
    read(checksums, place, Span(0, 50), Span(50, 100))
    read(checksums, place, Span(0, 50))
    checksums.finish()
    assert len(compared) == 1


def test_a_range_that_differs_differs_whenever_the_pass_is_finished(place):
    checksums = ContainerChecksums()
    read(checksums, place, Span(0, 50), crc=7)
    for _time in range(2):
        with pytest.raises(CorruptError, match="checksum mismatch"):
            checksums.finish()
