"""Memory of parts: a region stays until its thread reads the next one; memory that is given back is used again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import wherry
from wherry.mover.decode import Parts
from wherry.mover.pool import Pool
from wherry.mover.source import Source

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
