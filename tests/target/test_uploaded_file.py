"""One file that is uploaded in parts: any order, twice, gaps, resumed, and bounded memory."""

import random
import threading
import time

import pytest

from tests.support.object_stores import PartLog, small_parts
from wherry.errors import StorageError, TargetExistsError
from wherry.storage.stores import locate
from wherry.store.memory import MemoryStore
from wherry.store.store import PartLimits
from wherry.target.parts import Sender
from wherry.target.uploaded_file import SentBefore, UploadContext, UploadedFile, part_size

SIZE = 1000


@pytest.fixture(autouse=True)
def parts():
    with small_parts(64):
        yield


@pytest.fixture
def place(tmp_path):
    return locate(f"memory://bucket{tmp_path}/file")


@pytest.fixture
def sending(place):
    sender = Sender(256, 2)
    yield UploadContext(place.store, "run", sender, PartLog())
    sender.stop()


def test_any_order_of_writes_makes_the_object(place, sending):
    data, chance = random.Random(0).randbytes(SIZE), random.Random(1)
    file, starts = UploadedFile(place.path, SIZE, sending), list(range(0, SIZE, 30))
    chance.shuffle(starts)
    for start in starts:
        file.write(start, memoryview(data)[start : start + 30])
    sending.sender.drain()
    assert file.stored.nbytes == SIZE
    assert place.read(0, SIZE) == data
    assert sorted(sending.log) == list(range(16))


class _Interrupted:
    """A lock; when it is given back, another thread runs."""

    def __init__(self, lock, other):
        self._lock, self._other = lock, other

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *error):
        self._lock.__exit__(*error)
        other, self._other = self._other, None
        if other is not None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()


def test_a_part_that_another_thread_completes_meanwhile_is_sent_once(place, sending):
    data = random.Random(0).randbytes(SIZE)
    file = UploadedFile(place.path, SIZE, sending)
    file._lock = _Interrupted(file._lock, lambda: file.write(40, memoryview(data)[40:]))
    file.write(0, memoryview(data)[:40])
    sending.sender.drain()
    assert place.read(0, SIZE) == data
    assert sorted(sending.log) == list(range(16))


def test_bytes_of_a_part_that_was_sent_while_they_waited_for_memory_are_dropped(place, sending, monkeypatch):
    data = random.Random(0).randbytes(SIZE)
    file, reserve = UploadedFile(place.path, SIZE, sending), sending.sender.reserve

    def wait(nbytes):
        monkeypatch.setattr(sending.sender, "reserve", reserve)
        file.write(0, memoryview(data)[:64])  # another writer has the same bytes
        reserve(nbytes)

    monkeypatch.setattr(sending.sender, "reserve", wait)
    file.write(0, memoryview(data))
    sending.sender.drain()
    assert place.read(0, SIZE) == data
    assert sorted(sending.log) == list(range(16))
    assert sending.sender._held == 0


def test_bytes_that_nobody_wrote_are_zeros(place, sending):
    file = UploadedFile(place.path, SIZE, sending)
    file.write(500, memoryview(b"in the middle"))
    assert not file.holds(500, 513)
    file.complete()
    sending.sender.drain()
    assert file.holds(500, 513)
    assert place.read(0, SIZE) == bytes(500) + b"in the middle" + bytes(SIZE - 513)


@pytest.mark.parametrize("size", [0, 1, 64])
def test_a_small_file_is_one_put(place, sending, size):
    file = UploadedFile(place.path, size, sending)
    file.write(0, memoryview(bytes(size)))
    file.complete()
    sending.sender.drain()
    assert place.stat().size == size
    assert sending.log == []


def test_parts_of_an_earlier_run_are_not_sent_again(place, sending):
    data = random.Random(0).randbytes(SIZE)
    first = UploadedFile(place.path, SIZE, sending)
    first.write(0, memoryview(data)[:640])
    sending.sender.drain()
    upload = next(place.store.uploads(place.path))
    known = {part.number: part for part in sending.store.parts(upload)}
    del sending.log[:]
    again = UploadedFile(place.path, SIZE, sending, SentBefore(upload, known))
    assert again.holds(0, 640)
    sending.sender.peak = 0
    again.write(0, memoryview(data)[:640])
    assert sending.sender.peak == 0, "its bytes wait for no memory"
    again.write(640, memoryview(data)[640:])
    sending.sender.drain()
    assert sorted(sending.log) == list(range(10, 16))
    assert place.read(0, SIZE) == data


def test_an_object_of_somebody_else_is_not_replaced(place, sending):
    file = UploadedFile(place.path, SIZE, sending)
    file.write(0, memoryview(bytes(SIZE - 1)))
    place.put(b"other")
    file.complete()
    with pytest.raises(TargetExistsError):
        sending.sender.drain()
    assert place.read(0, 9) == b"other"


def test_no_more_is_held_than_the_budget_while_parts_are_sent(place, sending, monkeypatch):
    real = MemoryStore.put_part

    def slow(self, *args):
        time.sleep(0.005)
        return real(self, *args)

    monkeypatch.setattr(MemoryStore, "put_part", slow)
    file = UploadedFile(place.path, 20 * SIZE, sending)
    for start in range(0, 20 * SIZE, 64):
        file.write(start, memoryview(bytes(64)))
    sending.sender.drain()
    assert 64 < sending.sender.peak <= 256


def test_open_parts_beyond_the_budget_do_not_stop_the_run(place, sending):
    file, done = UploadedFile(place.path, SIZE, sending), threading.Event()

    def write():
        for start in (*range(0, 960, 64), *range(32, 992, 64)):  # first one half of each part, then the other
            file.write(start, memoryview(bytes(32)))
        file.complete()
        done.set()

    threading.Thread(target=write, daemon=True).start()
    assert done.wait(120)
    sending.sender.drain()
    assert sending.sender.peak > 256


def test_the_first_error_of_sending_ends_every_later_write(place, sending, monkeypatch):
    def refused(*_args):
        raise StorageError("no answer", uri="memory://", cure="retry")

    monkeypatch.setattr(MemoryStore, "put_part", refused)
    file = UploadedFile(place.path, SIZE, sending)
    with pytest.raises(StorageError, match="no answer"):
        for start in range(0, SIZE, 20):
            file.write(start, memoryview(bytes(20)))
            time.sleep(0.001)


def test_parts_grow_with_the_object():
    limits = PartLimits(most=10_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wherry.target.uploaded_file.PART_BYTES", 8 << 20)
        assert part_size(1 << 30, limits) == 8 << 20
        for size in (80 << 30, 100 << 30, 5 << 40):
            part = part_size(size, limits)
            assert part % (1 << 20) == 0
            assert -(-size // part) <= 10_000
        assert part_size(1 << 30, PartLimits(smallest=16 << 20)) == 16 << 20
