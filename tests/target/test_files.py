"""Flat files: whatever is written in whatever order lies in the file, past the page cache or through it."""

import errno
import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wherry.core.threads import without_collection
from wherry.errors import StorageError
from wherry.mover.pool import Pool
from wherry.store.open_file import BLOCK, cut
from wherry.target import files as flatfile
from wherry.target.files import Blocks, FlatFiles

SIZE = 70 * BLOCK + 123


@pytest.fixture(params=["direct", "through the page cache"], autouse=True)
def way(request, monkeypatch):
    """Both kinds of file system."""
    if request.param != "direct":
        real = os.open

        def refusing(path, flags, *mode, **options):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(path, flags, *mode, **options)

        monkeypatch.setattr(os, "open", refusing)
    return request.param


def aligned(data, place):
    """The bytes in memory that lies in its page as the file does."""
    pages = mmap.mmap(-1, len(data) + 2 * mmap.PAGESIZE)
    start = place % mmap.PAGESIZE
    pages[start : start + len(data)] = data
    return memoryview(pages)[start : start + len(data)]


@given(offset=st.integers(0, 5 * BLOCK), nbytes=st.integers(0, 5 * BLOCK))
def test_a_cut_falls_on_blocks(offset, nbytes):
    parts = cut(offset, nbytes)
    assert offset == parts.start <= parts.body <= parts.tail <= parts.stop == offset + nbytes
    assert (parts.tail - parts.body) % BLOCK == 0
    assert parts.body == parts.tail or parts.body % BLOCK == 0
    assert parts.body - parts.start < BLOCK
    assert parts.stop - parts.tail < BLOCK


@given(
    pieces=st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE), st.booleans()), max_size=12),
    synced=st.sets(st.integers(0, 11)),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_last_bytes_written_lie_there(pieces, synced, tmp_path, monkeypatch):
    monkeypatch.setattr(flatfile, "SMALL", 2 * BLOCK)
    expected = bytearray(SIZE)
    files = FlatFiles(tmp_path, {"a": SIZE})
    for number, (start, length, congruent) in enumerate(pieces):
        data = os.urandom(min(length, SIZE - start))
        files.write("a", start, aligned(data, start if congruent else start + 1))
        expected[start : start + len(data)] = data
        if number in synced:
            files.sync()
    files.finish()
    files.close()
    assert (tmp_path / "a").read_bytes() == expected
    (tmp_path / "a").unlink()


def test_what_an_earlier_run_wrote_of_a_block_stays(tmp_path):
    for start, text in ((10, b"first"), (2000, b"second"), (SIZE - 4, b"last")):
        files = FlatFiles(tmp_path, {"a": SIZE})  # each run knows nothing of the one before
        files.write("a", start, text)
        files.sync()
        files.close()
    found = (tmp_path / "a").read_bytes()
    assert len(found) == SIZE
    assert (found[10:15], found[2000:2006], found[-4:]) == (b"first", b"second", b"last")
    assert found.strip(b"\0").replace(b"\0", b"") == b"firstsecondlast"


def test_many_threads_share_blocks(tmp_path):
    files = FlatFiles(tmp_path, {"a": 300 * 1000})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: files.write("a", n * 1000, bytes([n % 251 + 1]) * 1000), range(300)))
    files.finish()
    files.close()
    assert (tmp_path / "a").read_bytes() == b"".join(bytes([n % 251 + 1]) * 1000 for n in range(300))


def test_more_blocks_than_are_held(tmp_path):
    names = [f"f{number}" for number in range(400)]
    files = FlatFiles(tmp_path, dict.fromkeys(names, 2 * BLOCK))
    for part in (b"one", b"two"):
        for name in names:
            files.write(name, 5 if part == b"one" else BLOCK - 1, part)
    files.sync()
    files.close()
    assert {(tmp_path / name).read_bytes().replace(b"\0", b"") for name in names} == {b"onetwo"}


def test_large_bytes_that_lie_right_pass_the_page_cache(tmp_path, monkeypatch, way):
    used = []
    real = os.pwrite

    def noted(descriptor, data, offset):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        used.append((len(data), bool(flags & os.O_DIRECT)))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", noted)
    files = FlatFiles(tmp_path, {"a": 1 << 20})
    with Pool(1 << 20).buffer(300_000, place=777) as buffer:
        buffer[:] = b"x" * 300_000
        files.write("a", 777, buffer)
    files.finish()
    files.close()
    assert (tmp_path / "a").read_bytes().strip(b"\0") == b"x" * 300_000
    assert any(length >= 290_000 and straight == (way == "direct") for length, straight in used)


@pytest.mark.parametrize("room", ["plenty", "just enough"])
def test_a_file_grows_and_ends_where_its_bytes_do(tmp_path, monkeypatch, room):
    real = os.posix_fallocate

    def limited(descriptor, start, length):
        if room == "just enough" and length > flatfile._STEP:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, start, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    files = FlatFiles(tmp_path, {"a": 0})
    for size in (5, 100_000, 250_001):
        files.grow("a", size)
    files.write("a", 250_000, b"!")
    files.finish()
    files.close()
    assert (tmp_path / "a").read_bytes() == b"\0" * 250_000 + b"!"


def test_a_block_that_cannot_be_written_fails_the_sync_for_good(tmp_path, monkeypatch):
    files = FlatFiles(tmp_path, {"a": BLOCK})
    files.write("a", 0, b"1234")
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", lambda *_args: (_ for _ in ()).throw(OSError(errno.EIO, "I/O")))
        with pytest.raises(StorageError):
            files.sync()
    with pytest.raises(StorageError):
        files.finish()
    files.close()


def test_neighbours_are_written_together():
    written = []
    blocks = Blocks(lambda *_args: None, lambda name, at, run: written.append((name, at, bytes(run))))
    blocks.put("a", BLOCK - 2, memoryview(b"abcd"))
    blocks.put("a", 7 * BLOCK, memoryview(b"e" * BLOCK))
    blocks.put("b", 0, memoryview(b"f"))
    blocks.flush()
    assert [(name, at, len(run)) for name, at, run in written] == [
        ("a", 0, 2 * BLOCK),
        ("a", 7 * BLOCK, BLOCK),
        ("b", 0, BLOCK),
    ]
    assert written[0][2].strip(b"\0") == b"abcd"


def shared_memory():
    return Path("/proc/self/maps").read_text().count("/dev/zero")


def test_closed_files_give_their_memory_back_at_once(tmp_path):
    """Each companion has files of its own, and no garbage is collected while they are copied."""
    with without_collection():
        before = shared_memory()
        for number in range(20):
            files = FlatFiles(tmp_path, {f"{number}": 100})
            files.write(f"{number}", 0, bytes(100))
            files.sync()
            files.close()
        assert shared_memory() == before
